"""`biascope ledger`: every claim, what was measured, the verdict, the run that shows it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from biascope.support.files import write_text

COLOURS = {"confirmed": "green", "not confirmed": "red"}


def show_ledger(
    folder: Annotated[Path, typer.Option(help="Folder of kept runs.")] = Path("reproductions"),
    write: Annotated[bool, typer.Option(help="Also write ledger.md and ledger.html into the folder.")] = True,
    tested: Annotated[bool, typer.Option("--tested", help="Only claims that a run tests.")] = False,
) -> None:
    """Print the table of claims joined with the kept runs, and write it beside them."""
    from biascope.reports import ledger, ledger_markdown, ledger_page, summary
    from biascope.reports.html import write_look

    rows = ledger(folder)
    console = Console()
    table = Table(title="Ledger of claims", show_lines=True)
    for column in ("claim", "what it says", "run", "measured", "verdict"):
        table.add_column(column, no_wrap=column == "verdict", overflow="fold")
    for row in rows:
        if tested and row.run is None:
            continue
        colour = COLOURS.get(row.verdict, "dim")
        run = f"{row.size} {row.settings}\n{row.device}" if row.run else row.study
        verdict = f"[{colour}]{row.verdict}[/]"
        table.add_row(row.claim.id, escape(row.claim.claim), escape(run), escape(row.measured), verdict)
    console.print(table)
    console.print(summary(rows))
    if not folder.is_dir():
        console.print(f"There is no folder {folder}: runs are kept there by `biascope keep`; --folder names another.")
    if write and folder.is_dir():
        write_text(folder / "ledger.md", ledger_markdown(rows, folder, "/index.html"))
        write_text(folder / "ledger.html", ledger_page(rows, folder, look="."))
        write_look(folder)
        console.print(f"Written: {folder / 'ledger.md'} and {folder / 'ledger.html'}", soft_wrap=True)
