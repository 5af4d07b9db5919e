"""`biascope card`: the bias card of a network."""

import ast
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from biascope.support.errors import InputError
from biascope.support.wording import on_the_command_line


def card(
    name: Annotated[
        str,
        typer.Argument(help="From `biascope nets`, package.module:factory, script.py:factory, torchvision:NAME, ..."),
    ],
    input_: Annotated[str | None, typer.Option("--input", help="Shape of one input, e.g. 3,64,64.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page. [default: runs/card-NAME.html]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    networks: Annotated[int | None, typer.Option(min=2, help="Initialisations to average over.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long the card may take.")] = 2.0,
    weights: Annotated[Path | None, typer.Option(help="Trained weights: a file, a folder, or pretrained.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set (cifar10), or a file with x and y.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file, for a language model hf:FOLDER.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the network, key=value.")] = None,
) -> None:
    """Make the bias card of a network: one page that says what it is inclined to learn."""
    from biascope.reports import make_card
    from biascope.reports.card import default_page

    console = Console(highlight=False)
    with on_the_command_line():
        made = make_card(
            name,
            shape(input_),
            out,
            seed=seed,
            device=device,
            networks=networks,
            weights=weights,
            data=data,
            options=network_options(settings or []),
            minutes=minutes,
            text=text,
        )
    for panel in made.panels:
        console.print(f"[bold]{escape(panel.title)}[/]: {escape(panel.meaning)}")
    if out is None and made.path != default_page(name):
        console.print(f"{escape(str(default_page(name)))} was made with other settings and stays as it is.")
    console.print(f"The card took {made.seconds:.0f} s. Open it in a browser:")
    console.print(escape(str(made.path.resolve())), soft_wrap=True)


def network_options(settings: list[str]) -> dict[str, Any]:
    """`key=value` pairs with Python values where the text is one."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {setting!r} should read key=value")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[key.strip()] = value.strip()
    return found


def shape(text: str | None) -> tuple[int, ...] | None:
    """`3,64,64` as a tuple; also as Python or people write it."""
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in re.split(r"\s*[,x×]\s*|\s+", text.lower().strip("()[], ")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--input {text!r} should be the shape of one input, e.g. 3,64,64")
    return sizes
