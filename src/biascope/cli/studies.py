"""`biascope list`: every study by paper and figure; with a name, its claim, options and sizes."""

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from biascope.studies.claims import documents
from biascope.studies.registry import Study, discover, find, studies


def list_studies(
    name: Annotated[
        str | None, typer.Argument(help="A study: show its claim, options and sizes. Or a family, such as nad.")
    ] = None,
) -> None:
    """Every study by paper and figure, or those of a family; with a name, what it claims and which options it takes."""
    console = Console()
    chosen = [study for study in studies().values() if name is None or study.name.startswith(f"{name.rstrip('/')}/")]
    if name is not None and not chosen:
        describe(find(name), console)
        return
    width = max(len(study.name) for study in chosen)
    for paper, group in groupby(chosen, key=lambda study: study.paper):
        table = Table(title=escape(documents()[paper].title), title_justify="left")
        table.add_column("name", no_wrap=True, min_width=width)  # the same in all tables
        table.add_column("figure", width=9)
        table.add_column("what it shows", ratio=1)
        for study in group:
            table.add_row(study.name, escape(study.figure), escape(study.summary))
        console.print(table)
    console.print(
        "Run one with [bold]biascope run NAME --size smoke|laptop|paper[/]; [bold]biascope list NAME[/] tells more."
    )
    for module, error in discover().items():
        console.print(f"[red]{module} could not be imported[/]: {escape(error)}")


def describe(study: Study, console: Console) -> None:
    """A study's claim, and a table of its options at every size."""
    console.print(f"[bold]{study.name}[/]: {escape(study.summary)}")
    console.print(f"{study.place}. Claim: {escape(study.statement)}")
    table = Table(title="Options")
    for column in ("option", "type", *study.sizes, "meaning"):
        table.add_column(column)
    values = {size: study.values(size) for size in study.sizes}
    for option in study.options:
        table.add_row(
            f"--{option.name}",
            escape(option.type_name),
            *(escape(str(values[size][option.name])) for size in study.sizes),
            escape(option.help),
        )
    console.print(table)
