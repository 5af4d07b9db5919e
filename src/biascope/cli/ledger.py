"""`biascope ledger`: every claim, what was measured, the verdict, the run that shows it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from biascope.studies.files import write_text


def show_ledger(
    folder: Annotated[Path, typer.Option(help="Folder of finished run folders.")] = Path("reproductions"),
    write: Annotated[bool, typer.Option(help="Also write ledger.md and ledger.html into the folder.")] = True,
) -> None:
    """Print the table of claims from run folders, and write it beside them."""
    from biascope.reports import ledger, ledger_markdown, ledger_page

    rows = ledger(folder)
    console = Console()
    table = Table(title="Ledger of claims", show_lines=True)
    for column in ("study", "claim", "measured", "size", "verdict"):
        table.add_column(column, no_wrap=column == "study")
    for row in rows:
        table.add_row(row.study, escape(row.claim), escape(row.measured), row.size, row.verdict)
    console.print(table)
    if write and folder.is_dir():
        write_text(folder / "ledger.md", ledger_markdown(rows, folder))
        write_text(folder / "ledger.html", ledger_page(rows, folder))
        console.print(f"Written: {folder / 'ledger.md'} and {folder / 'ledger.html'}", soft_wrap=True)
