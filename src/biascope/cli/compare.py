"""`biascope compare`: several networks side by side on one page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from biascope.cli.card import network_options, shape
from biascope.support.wording import on_the_command_line


def compare(
    names: Annotated[list[str], typer.Argument(help="Two or more networks, each as `biascope card` takes them.")],
    input_: Annotated[str | None, typer.Option("--input", help="Shape of one input. [default: the first's]")] = None,
    out: Annotated[Path | None, typer.Option(help="The page. [default: runs/compare-NAMES.html]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    networks: Annotated[int | None, typer.Option(min=4, help="Initialisations of each to average over.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the networks, key=value.")] = None,
) -> None:
    """Put networks side by side: which input directions they share, their spectra, their maps."""
    from biascope.reports import make_compare

    console = Console(highlight=False)
    options = network_options(settings or [])
    with on_the_command_line():
        made = make_compare(names, shape(input_), out, seed, device, networks, options)
    console.print(escape(made.meaning))
    console.print(f"The page took {made.seconds:.0f} s. Open it in a browser:")
    console.print(escape(str(made.path.resolve())), soft_wrap=True)
