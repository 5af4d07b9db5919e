"""`biascope watch`: a local page that follows a folder of probes, runs and cards."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder to follow: probes, runs, cards.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Follow a folder in a local page: probes while a network trains, studies and cards as they finish."""
    from biascope.reports.watch import WatchServer

    console = Console(highlight=False)
    with WatchServer(folder, port) as server:
        console.print(f"Watching {escape(str(server.folder))}. The page, on this computer only (Ctrl-C stops):")
        console.print(escape(server.address), soft_wrap=True)
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("stopped")
