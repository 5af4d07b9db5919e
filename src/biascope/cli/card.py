"""`biascope card`: the bias card of a network."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from biascope.errors import InputError
from biascope.studies.registry import check_device


def card(
    name: Annotated[
        str, typer.Argument(help="A name from `biascope nets`, package.module:factory or script.py:factory.")
    ],
    input_: Annotated[str | None, typer.Option("--input", help="Shape of one input, e.g. 3,64,64.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page. [default: runs/card-NAME.html]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    networks: Annotated[int | None, typer.Option(min=2, help="Initialisations to average over.")] = None,
) -> None:
    """Make the bias card of a network: one page that says what it is inclined to learn."""
    from biascope.reports import make_card

    check_device(device)
    console = Console(highlight=False)
    made = make_card(name, shape(input_), out, seed=seed, device=device, networks=networks)
    for panel in made.panels:
        console.print(f"[bold]{escape(panel.title)}[/]: {escape(panel.meaning)}")
    console.print(f"The card took {made.seconds:.0f} s. Open it in a browser:")
    console.print(escape(str(made.path.resolve())), soft_wrap=True)


def shape(text: str | None) -> tuple[int, ...] | None:
    """`3,64,64` as a tuple.

    Example:
        >>> shape("3,64,64")
        (3, 64, 64)
    """
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--input {text!r} should be the shape of one input, e.g. 3,64,64")
    return sizes
