"""`biascope keep`: a finished run in the form that is committed."""

from pathlib import Path
from typing import Annotated

import typer


def keep_run(
    folder: Annotated[Path, typer.Argument(help="A finished run folder.")],
    into: Annotated[Path, typer.Option(help="Folder of kept runs.")] = Path("reproductions"),
    name: Annotated[str, typer.Option(help="Name of the copy. [default: study-size-network-device]")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier one of that name.")] = False,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Keep it, marked as such, although its code is in no commit.")
    ] = False,
) -> None:
    """Copy a finished run in committed form: small, without host names or absolute paths; the ledger reads it."""
    from biascope.reports import keep

    kept = keep(folder, into, name, replace, uncommitted)
    for part in kept.left_out:
        typer.echo(f"left out: {part}", err=True)
    typer.echo(f"{kept.path} ({kept.size / 1000:.0f} kB)")
