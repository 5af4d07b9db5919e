"""`biascope data`: real data sets, fetched once, verified, cached."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(help="Real data sets: list, get, info, pack, unpack.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the set; `biascope data list` shows all.")]


@app.command("list")
def list_sets() -> None:
    """Every data set, and whether it is here."""
    from biascope import data

    table = Table(title=f"Data sets in {data.data_root()}")
    for column in ("name", "title", "train", "test", "download", "here"):
        table.add_column(column, justify="right" if column in {"train", "test", "download"} else "left")
    for name in data.names():
        info = data.info(name)
        size = f"{info.download_mib} MiB" if info.download_mib else ""
        table.add_row(name, escape(info.title), str(info.n_train), str(info.n_test), size, "yes" if info.cached else "")
    Console().print(table)
    shared = data.data_root() / "networks"
    taken = sum(file.stat().st_size for file in shared.rglob("*.safetensors"))
    if taken:
        typer.echo(f"{shared}: {taken / 2**20:.1f} MiB of networks that studies share; delete it at will.")


@app.command()
def get(name: Name, force: Annotated[bool, typer.Option(help="Fetch again even if it is here.")] = False) -> None:
    """Fetch a set with its registry's client, verify it by checksum, store it in the cache."""
    from biascope import data

    path = data.get(name, force=force, log=lambda line: typer.echo(line, err=True))
    _licence(name)
    typer.echo(str(path))


@app.command()
def info(name: Name) -> None:
    """What a set is, where it comes from, its licence and citation."""
    from biascope import data

    known = data.info(name)
    console = Console(highlight=False)
    for field in ("title", "kind", "shape", "n_train", "n_test", "package", "version", "cached", "path", "notes"):
        console.print(f"{field:>9}: {escape(str(getattr(known, field)))}", soft_wrap=True)
    _licence(name)


@app.command()
def pack(
    name: Name,
    out: Annotated[Path, typer.Argument(help="Folder for the parts.")],
    part_mib: Annotated[float, typer.Option(help="Largest part in MiB.")] = 60,
) -> None:
    """Cut a set into parts small enough to carry to another machine."""
    from biascope.data.packing import pack

    typer.echo(str(pack(name, out, part_mib)))


@app.command()
def unpack(folder: Annotated[Path, typer.Argument(help="Folder with the parts.")]) -> None:
    """Put the parts together again, verify them, store the set in the cache."""
    from biascope.data.packing import unpack

    typer.echo(str(unpack(folder)))


def _licence(name: str) -> None:
    from biascope import data

    known = data.info(name)
    console = Console(highlight=False, stderr=True)
    console.print(f"  licence: {escape(known.licence)}", soft_wrap=True)
    console.print(f" citation: {escape(known.citation)}", soft_wrap=True)
