"""`biascope ledger`: every claim, whether it holds, whether its numbers came out, at which size, by which run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from biascope.support.files import write_text

COLOURS = {"supported": "green", "contradicted": "red"}


def show_ledger(
    folder: Annotated[Path, typer.Option(help="Folder of kept runs.")] = Path("reproductions"),
    write: Annotated[bool, typer.Option(help="Also write ledger.html and ledger.json into the folder.")] = True,
    tested: Annotated[bool, typer.Option("--tested", help="Only claims that a run tests.")] = False,
) -> None:
    """Print the claims joined with the kept runs, and write them beside the runs."""
    from biascope.reports import ledger, ledger_json, ledger_page, summary
    from biascope.reports.html import write_look

    rows = ledger(folder)
    console = Console()
    table = Table(title="Ledger of claims", show_lines=True)
    for column in ("claim", "what it says", "verdict", "numbers", "scope", "why"):
        table.add_column(column, no_wrap=column == "verdict", overflow="fold")
    for row in rows:
        if tested and not row.judgements:
            continue
        verdict = f"[{COLOURS.get(row.verdict, 'dim')}]{row.verdict}[/]\n{row.level}"
        cells = (escape(text) for text in (row.replication, row.scope, row.sentence))
        table.add_row(row.claim.id, escape(row.claim.statement), verdict, *cells)
    console.print(table)
    console.print(summary(rows))
    if not folder.is_dir():
        console.print(f"There is no folder {folder}: runs are kept there by `biascope keep`; --folder names another.")
    if write and folder.is_dir():
        write_text(folder / "ledger.html", ledger_page(rows, folder, look="."))
        write_text(folder / "ledger.json", ledger_json(rows))
        write_look(folder)
        console.print(f"Written: {folder / 'ledger.html'} and ledger.json", soft_wrap=True)
