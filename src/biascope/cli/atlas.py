"""`biascope atlas`: the map of architectures, a network's place on it, and how it is made."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from biascope.cli.card import network_options, shape

app = typer.Typer(no_args_is_help=True, help="A map of architectures by what they are inclined to learn.")
File = Annotated[Path | None, typer.Option("--atlas", help="An atlas of your own. [default: the one that comes along]")]
Out = Annotated[Path, typer.Option(help="The page.")]
PAGE = Path("runs") / "atlas.html"


@app.command("show")
def show(atlas: File = None, out: Out = PAGE) -> None:
    """Write the atlas as a page: the map, the table, the neighbours of every network."""
    from biascope.atlas import Atlas
    from biascope.atlas.page import atlas_page
    from biascope.support.files import write_text

    write_text(out, atlas_page(Atlas.load(atlas).fingerprints))
    Console(highlight=False).print(f"Open it in a browser:\n{escape(str(out.resolve()))}", soft_wrap=True)


@app.command("place")
def place(
    name: Annotated[str, typer.Argument(help="From `biascope nets`, script.py:factory, timm:NAME, ...")],
    input_: Annotated[str | None, typer.Option("--input", help="Shape of one input, e.g. 3,32,32.")] = None,
    out: Out = PAGE,
    seed: Annotated[int, typer.Option(help="Of networks and inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    atlas: File = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the network, key=value.")] = None,
) -> None:
    """Put a network on the map: its nearest neighbours here, and a page with its place."""
    from biascope.atlas import Atlas, fingerprint
    from biascope.atlas.page import atlas_page
    from biascope.support.files import write_text

    known = Atlas.load(atlas)
    found = fingerprint(name, shape(input_), seed, device, network_options(settings or []))
    console = Console(highlight=False)
    console.print(
        f"{escape(found.name)}: kernel rank {found.effective_rank:.1f} of 63, {found.constant:.0%} of it shared by all "
        f"inputs; learns harmonics of {found.mean_harmonic:.2f} on average ({found.seconds:.0f} s)"
    )
    console.print("Nearest (the typical distance of two networks is 1):")
    for other, distance in known.nearest(found, 5):
        console.print(f"  {distance:.2f}  {escape(other)}")
    write_text(out, atlas_page(known.fingerprints, found))
    console.print(f"Open the map in a browser:\n{escape(str(out.resolve()))}", soft_wrap=True)


@app.command("build")
def build(
    folder: Annotated[Path, typer.Argument(help="Where to keep fingerprints; what is there is not made again.")],
    networks: Annotated[Path | None, typer.Option(help="A list like biascope/atlas/entries.toml.")] = None,
    only: Annotated[str | None, typer.Option(help="Networks by name, with commas.")] = None,
    seed: Annotated[int, typer.Option(help="Of networks and inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Measure all networks of the atlas, one file each, and put them together in FOLDER/atlas.safetensors."""
    from biascope.atlas.build import ENTRIES, build, entries
    from biascope.atlas.page import atlas_page
    from biascope.support.errors import InputError, near
    from biascope.support.files import write_text

    console = Console(highlight=False)
    chosen = entries(networks or ENTRIES)
    if only is not None:
        names = [part.strip() for part in only.split(",")]
        unknown = [each for each in names if each not in [entry.name for entry in chosen]]
        if unknown:
            raise InputError(f"the list has no {unknown[0]!r}{near(unknown[0], [entry.name for entry in chosen])}")
        chosen = [entry for entry in chosen if entry.name in names]
    made, left_out = build(folder, chosen, device, seed, lambda line: console.print(escape(line), soft_wrap=True))
    made.save(folder / "atlas.safetensors")
    if len(made.fingerprints) > 2:
        write_text(folder / "atlas.html", atlas_page(made.fingerprints))
    console.print(f"{len(made.fingerprints)} networks, {len(left_out)} left out: {escape(str(folder))}", soft_wrap=True)
