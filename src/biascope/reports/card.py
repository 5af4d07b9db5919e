"""The bias card: one page that says what an architecture is inclined to learn."""

import hashlib
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn

import biascope
from biascope.ensembles import arithmetic
from biascope.reports import figures
from biascope.reports.first_screen import first_screen
from biascope.reports.glossary import glossary
from biascope.reports.html import Html, page, stamp_of, tag, with_flags
from biascope.reports.panels import PANELS
from biascope.reports.panels.base import Panel, PanelFunction, Subject, is_shown, make_subject
from biascope.reports.panels.budget import MINUTES
from biascope.reports.panels.examples import load_examples
from biascope.reports.panels.loading import Weights, weights_name, weights_stamp
from biascope.reports.panels.pace import worthwhile_threads
from biascope.reports.panels.sources import name_of
from biascope.reports.panels.texts import text_examples
from biascope.studies.environment import device_name
from biascope.support.arguments import check_count, check_number, device_of
from biascope.support.bars import progress
from biascope.support.errors import BiascopeError, InputError
from biascope.support.files import write_text
from biascope.support.signatures import checked
from biascope.support.wording import worded, worded_errors

LEAST = 2  # networks of which directions can be told
PICTURES = (".pdf", ".png", ".svg", ".jpg", ".md")  # what a page is not


SENTENCES = 3  # of the summary
TELLING = (
    "Alignment with the labels",
    "Positions and heads",
    "What it responds to",
    "What it learns",
    "Tangent kernel",
    "Linear or not",
)


@dataclass(frozen=True)
class Sentence:
    """A finding in one plain sentence, and the panel of the page that shows it: `#anchor`."""

    text: str
    panel: str
    anchor: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Card:
    """Of which network, where the page is, what it shows, how long it took."""

    name: str
    path: Path
    panels: tuple[Panel, ...]
    seconds: float

    @property
    def summary(self) -> tuple[Sentence, ...]:
        """The most telling findings of the panels, three at most."""
        return summary(self.panels)

    def __repr__(self) -> str:
        titles = ", ".join(panel.title + " (skipped)" * panel.skipped for panel in self.panels)
        return f"Card({self.name!r}, {str(self.path)!r}, {len(self.panels)} panels: {titles}; {self.seconds:.0f} s)"

    def _repr_html_(self) -> str:
        """What each panel means and a link to the page, for notebooks."""
        rows = [tag("tr", tag("td", tag("b", panel.title)), tag("td", panel.meaning)) for panel in self.panels]
        link = tag("a", str(self.path), href=self.path.as_posix(), target="_blank")
        return tag("div", tag("table", *rows), tag("p", "The card: ", link, f" ({self.seconds:.0f} s)"))


@worded_errors()
@checked
def make_card(
    spec: str | Callable[..., nn.Module] | nn.Module,
    input_shape: Sequence[int] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    networks: int | None = None,
    panels: Sequence[PanelFunction] = PANELS,
    weights: str | Path | nn.Module | Mapping[str, Any] | None = None,
    data: Any = None,
    options: Mapping[str, Any] | None = None,
    minutes: float = MINUTES,
    text: str | Path | None = None,
) -> Card:
    """Write the bias card of a network.

    Args:
        spec: a registry name ("lenet"), "package.module:factory", "path/to/script.py:factory", "torchvision:resnet18",
            "timm:NAME", "hf:TYPE" or "hf:FOLDER"; a function that builds a new network at every call; or a network,
            whose layers are initialised anew where they can be, its own weights being the given ones.
        input_shape: shape of one input; needed for your own networks, unless `data` tell it.
        out: the HTML file, replaced if it is there; by default `runs/card-NAME.html`, which only the same card
            replaces: one with another seed, shape, weights, data or options becomes `card-NAME-2.html`.
        seed: seed of everything random on the page.
        device: where the networks are evaluated.
        networks: how many random initialisations to average over; None: what the time allows, by a short pilot.
        minutes: how long the card may take. Each panel chooses its numbers of networks, examples and trainings to fit.
        panels: the panels, in order.
        weights: to show the trained network beside the fresh one: a state dict, a network (also under
            `DistributedDataParallel` or `torch.compile`), a file, a folder of `save_pretrained`; or "pretrained" for
            those of "torchvision:NAME" and "timm:NAME" that were downloaded.
        data: a data set's name ("cifar10"), a file with x and y, (x, y) of tensors, arrays, lists or columns, a dict of
            those, a Dataset, a DataLoader. y are classes, or real numbers for a regression; inputs and labels are used
            where they matter.
        options: keyword arguments of the network, e.g. {"outputs": 10}.
        text: in the place of data, a text file for a language model "hf:FOLDER": windows of it are cut by the folder's
            tokenizer, as many tokens long as `input_shape` says, and labelled with the token that follows.

    Example:
        >>> import tempfile
        >>> card = make_card("logreg", (1, 8, 8), Path(tempfile.mkdtemp()) / "card.html", networks=32)
        >>> card.path.name
        'card.html'
        >>> make_card(lambda: nn.Linear(4, 2), (4,), card.path, networks=8).name
        '<lambda>'
        >>> net, x, y = nn.Linear(4, 2), torch.randn(32, 4), torch.arange(32) % 2
        >>> make_card(net, data=(x, y), out=card.path, networks=8).name
        'Linear'
    """
    figures.require_matplotlib()  # say so now, not after the computation
    if networks is not None:
        check_count(networks, "networks", LEAST)
    check_number(minutes, "minutes", above=0)
    device_of(device)
    name, examples = name_of(spec), None if data is None else load_examples(data, seed)
    if text is not None:
        if data is not None:
            raise InputError("data and text are both given: the inputs are those of one of them")
        data = examples = text_examples(spec, text, input_shape[0] if input_shape else None, seed)
        input_shape = None
    known = data if examples is None or isinstance(data, str | Path) else examples.stamp
    built = weights_stamp(spec) if isinstance(spec, nn.Module) else spec
    timed = () if minutes == MINUTES else (minutes,)
    stamp = stamped(built, input_shape, seed, networks, weights_stamp(weights), known, options, *timed)
    path = page_path(out, default_page(name), stamp)
    begin = time.perf_counter()
    subject = make_subject(spec, input_shape, seed, device, networks, weights, examples, options)
    subject = replace(subject, minutes=minutes)
    shown = [panel for panel in panels if is_shown(panel, subject)]
    full = arithmetic(torch.device(device), "float32")  # torch's own default on a GPU is tf32 in convolutions
    with full, worthwhile_threads(subject.network, subject.inputs(64)):
        made = tuple(_safely(panel, subject) for panel in progress(shown, "panels"))
    seconds = time.perf_counter() - begin
    write_text(path, card_page(subject, made, seconds, weights, stamp))
    return Card(name, path, made, seconds)


def summary(panels: Sequence[Panel]) -> tuple[Sentence, ...]:
    """The headlines of the panels, the most telling ones first and three at most; those of your own come last.

    Example:
        >>> made = [Panel("Tangent kernel", "", "", headline="K is 1."), Panel("Anatomy", "", "")]
        >>> [(sentence.text, sentence.anchor) for sentence in summary(made)]
        [('K is 1.', 'tangent-kernel')]
    """
    place = {title: i for i, title in enumerate(TELLING)}
    found = sorted((p for p in panels if p.headline), key=lambda p: place.get(p.title, len(place)))
    return tuple(Sentence(panel.headline, panel.title, panel.anchor) for panel in found[:SENTENCES])


def slug(spec: str) -> str:
    """A network's name as part of a file's name.

    Example:
        >>> slug("my/models.py:build")
        'my-models.py-build'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", spec).strip("-")


def stamped(*settings: Any) -> str:
    """A short name of what a page is made from; the same settings have the same one.

    Example:
        >>> stamped("lenet", (1, 32, 32)) == stamped("lenet", [1, 32, 32]) != stamped("lenet", None)
        True
    """
    plain = json.dumps([dict(s) if isinstance(s, Mapping) else s for s in settings], sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def default_page(spec: str) -> Path:
    """Where a network's card goes."""
    return Path("runs") / f"card-{slug(spec)}.html"


def page_path(out: str | Path | None, default: Path, stamp: str = "") -> Path:
    """The file to write; one that cannot be written is refused before the work is done.

    Without `out` it is the default, or NAME-2 and so on where there is a page with another stamp: that one stays. A
    file that is no page is never replaced.
    """
    tries = chain([default], (default.with_stem(f"{default.stem}-{i}") for i in count(2)))
    path = Path(out) if out is not None else next(p for p in tries if not p.is_file() or stamp_of(p) == stamp)
    if path.suffix.lower() in PICTURES:
        raise InputError(f"--out {path}: the page is HTML, e.g. --out {path.with_suffix('.html')}; a browser prints it")
    try:
        if path.is_dir():
            raise InputError(f"--out {path} is a folder: give the page a name, e.g. --out {path / default.name}")
        if path.is_file() and not is_page(path):
            raise InputError(f"--out {path} is there and is no page: it stays, choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, BiascopeError):
            raise
        raise InputError(f"--out {path}: its folder cannot be made ({error.strerror})") from error
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permissions do not tell of disks that are read only
            pass
    except OSError as error:
        raise InputError(f"--out {path}: nothing can be written into {path.parent} ({error.strerror})") from error
    return path


def is_page(path: Path) -> bool:
    """Whether a file is HTML, or empty."""
    with path.open(encoding="utf-8", errors="replace") as file:
        start = file.read(200).lstrip().lower()
    return not start or start.startswith(("<!doctype html", "<html"))


def card_page(
    subject: Subject, panels: Sequence[Panel], seconds: float, weights: Weights | None = None, stamp: str = ""
) -> str:
    """The page as text."""
    shape = " × ".join(str(size) for size in subject.input_shape)
    footer = (
        f"biascope {biascope.__version__}, seed {subject.seed}, {seconds:.1f} s on {device_name(subject.device)}. "
        "How many networks and examples each panel uses was chosen by timing the network here, so that the card takes "
        f"about {subject.minutes:g} minutes at most; each panel says it, and {worded('--networks N')} fixes the "
        "sampled ones. "
        "This page needs no network and holds its own data."
    )
    subtitle = f"Bias card: what this architecture is inclined to learn, before it has seen any data. Inputs {shape}."
    if weights is not None:
        subtitle += f" Compared with the weights of {weights_name(weights)}."
    if subject.data is not None:
        subtitle += f" Data: {subject.data.name}."
    sentences = [(each.text, each.panel, each.anchor) for each in summary(panels)]
    sections = [panel_section(panel) for panel in panels]
    body = [first_screen(subject.name, sentences, panels), *sections, glossary(sections)]
    return page(subject.name, body, subtitle, footer, stamp=stamp)


def panel_section(panel: Panel) -> Html:
    """A panel as markup: how to read it, what it means here, then the pictures."""
    meaning = tag("p", tag("strong", "What this means: "), with_flags(panel.meaning), class_="meaning")
    if panel.skipped:
        meaning = tag("p", with_flags(panel.meaning), class_="meaning skipped")
    words = tag("div", tag("h2", panel.title), tag("p", panel.read, class_="read"), meaning, class_="words")
    return tag("section", words, tag("div", *panel.blocks, class_="blocks"), id=panel.anchor, class_="panel")


def _safely(panel: PanelFunction, subject: Subject) -> Panel:
    """A panel that cannot be made for this network says why, and the others still appear."""
    title = str(getattr(sys.modules[panel.__module__], "TITLE", panel.__module__.rsplit(".", 1)[-1]))
    try:
        with warnings.catch_warnings():  # torch's note to its own authors, about attention under vmap
            warnings.filterwarnings("ignore", message="There is a performance drop")
            made = panel(subject)
            return replace(made, meaning=worded(made.meaning))
    except BiascopeError as error:
        return Panel(title, "", worded(f"Skipped: {error}"), skipped=True)
    except Exception as error:  # what a network of yours does in training mode or under autograd is not ours to know
        first = str(error).splitlines()[0] if str(error) else ""
        problem = f"{type(error).__name__}: {first}"
        warnings.warn(f"{subject.name}, panel {title!r}: {problem}", stacklevel=2)
        return Panel(title, "", f"Skipped: this network cannot be shown here ({problem})", skipped=True)
