"""`biascope nets`: the networks that have a name."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show_nets(
    name: Annotated[str | None, typer.Argument(help="A network: show its options and layers.")] = None,
) -> None:
    """The networks that have a name; with a name, its options, layers and parameter count."""
    from biascope import nets

    console = Console(highlight=False)
    if name is not None:
        info = nets.info(name)
        network = nets.build(name, seed=0)
        count = sum(parameter.numel() for parameter in network.parameters())
        console.print(f"[bold]{escape(name)}[/]: {escape(info.summary)}")
        console.print(f"input {info.input_shape}, {count:,} parameters")
        console.print("options: " + escape(", ".join(f"{key}={value!r}" for key, value in info.defaults.items())))
        console.print(escape(str(network)))
        return
    table = Table(title="Networks")
    for column in ("name", "input", "what it is"):
        table.add_column(column, no_wrap=column == "name")
    for known in nets.names():
        info = nets.info(known)
        table.add_row(escape(known), "×".join(map(str, info.input_shape)), escape(info.summary))
    console.print(table)
    console.print("Your own: package.module:factory or path/to/script.py:factory wherever a name is asked for.")
