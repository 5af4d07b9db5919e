"""Several networks side by side: which input directions they share (`spans`), their spectra, their maps."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import biascope
from biascope.ensembles import arithmetic
from biascope.reports import figures
from biascope.reports.card import page_path, slug, stamped
from biascope.reports.html import Html, figure, join, page, table, tag
from biascope.reports.panels.base import Subject, make_subject
from biascope.reports.panels.frames import frame, slider
from biascope.reports.panels.input_geometry import (
    InputSpectrum,
    entries,
    gradients,
    image_shape,
    input_spectrum,
    is_image,
    mean_frequency,
    pixels_and_fourier,
)
from biascope.reports.panels.pace import worthwhile_threads
from biascope.reports.panels.sources import name_of
from biascope.reports.panels.tangent_kernel import KernelFacts, kernel_facts, samples
from biascope.reports.spans import Overlaps, overlaps
from biascope.studies.environment import device_name
from biascope.support.arguments import check_count, device_of
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.files import write_text
from biascope.support.signatures import checked
from biascope.support.tables import number, one_line
from biascope.support.wording import worded_errors

BRIEF = 24  # letters of a name in a drawing
LEAST = 4  # networks of each, for the two halves of a sample
COMPARED, SHOWN = 8, 16  # directions whose spans are compared; directions that are shown


@dataclass(frozen=True)
class Comparison:
    """Names of m networks, where the page is, overlaps [m, m] and their errors, what they mean, how long it took."""

    names: tuple[str, ...]
    path: Path
    overlaps: np.ndarray[Any, Any]
    errors: np.ndarray[Any, Any]
    meaning: str
    seconds: float
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """The overlaps and a link to the page, for notebooks."""
        rows = [tag("tr", tag("th", ""), *(tag("th", name) for name in self.names))]
        for name, values, errors in zip(self.names, self.overlaps, self.errors):
            cells = [tag("td", number(value, error)) for value, error in zip(values, errors)]
            rows.append(tag("tr", tag("th", name), *cells))
        link = tag("a", str(self.path), href=self.path.as_posix(), target="_blank")
        return tag("div", tag("p", self.meaning), tag("table", *rows), tag("p", "The page: ", link))


@dataclass(frozen=True)
class _One:
    subject: Subject
    spectrum: InputSpectrum
    equal: InputSpectrum  # of as many networks as the others have: fewer make any spectrum steeper
    kernel: KernelFacts
    parameters: int

    @property
    def above(self) -> int:
        """How many eigenvalues lie above the band of an isotropic network."""
        return int((self.spectrum.values > self.spectrum.band[1]).sum())


@worded_errors()
@checked
def make_compare(
    specs: Sequence[str | Callable[..., nn.Module]],
    input_shape: Sequence[int] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    networks: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Write a page that compares two or more networks on inputs of one shape (the first network's by default).

    Networks are named, or given as functions that build them, as in `make_card`.

    Example:
        >>> import tempfile
        >>> page = Path(tempfile.mkdtemp()) / "c.html"
        >>> make_compare(["logreg", "mlp"], (1, 4, 4), page, networks=16).overlaps.shape
        (2, 2)
    """
    figures.require_matplotlib()
    if len(specs) < 2:
        raise InputError("compare needs two or more networks, e.g. biascope compare lenet resnet18")
    if networks is not None:
        check_count(networks, "networks", LEAST)
    device_of(device)
    stamp = stamped(specs, input_shape, seed, networks, options)
    path = page_path(out, Path("runs") / f"compare-{slug('-'.join(map(name_of, specs)))[:80]}.html", stamp)
    begin = time.perf_counter()
    first = make_subject(specs[0], input_shape, seed, device, networks, options=options)
    rest = [make_subject(spec, first.input_shape, seed, device, networks, options=options) for spec in specs[1:]]
    for one in (first, *rest):
        if one.single:
            raise InputError(f"{one.name}: {one.notes[-1]}")
    names = unique(without_folders([subject.name for subject in (first, *rest)]))
    with arithmetic(torch.device(device), "float32"), worthwhile_threads(first.network, first.inputs(64)):
        found, shared = _measure([first, *rest])
    meaning = in_words(names, shared, min(one.spectrum.n for one in found), [one.above for one in found])
    seconds = time.perf_counter() - begin
    write_text(path, _page(names, found, shared, meaning, seconds, stamp))
    return Comparison(tuple(names), path, shared.values, shared.errors, meaning, seconds)


def without_folders(names: Sequence[str]) -> list[str]:
    """Names of networks without the folders of their scripts, where that leaves different names different.

    Example:
        >>> without_folders(["lenet", "/home/me/own.py:build"]), without_folders(["a/own.py:net", "b/own.py:net"])
        (['lenet', 'own.py:build'], ['a/own.py:net', 'b/own.py:net'])
    """
    cut = [re.sub(r"^.*[/\\](?=[^:/\\]*:[^:/\\]*$)", "", name) for name in names]
    return cut if len(set(cut)) == len(set(names)) else list(names)


def brief(names: Sequence[str]) -> list[str]:
    """Names for legends and axes, which a long one would squeeze: their ends, numbered where these are the same.

    Example:
        >>> brief(["lenet", "a_package_of_mine.with_models:build"])
        ['lenet', '…_mine.with_models:build']
        >>> brief([f"{letter}_package_of_mine.with_models:build" for letter in "ab"])
        ['1: …_mine.with_models:build', '2: …_mine.with_models:build']
    """
    cut = [name if len(name) <= BRIEF else f"…{name[1 - BRIEF :]}" for name in names]
    return cut if len(set(cut)) == len(cut) else [f"{i}: {name}" for i, name in enumerate(cut, start=1)]


def unique(names: Sequence[str]) -> list[str]:
    """Names with a number where one comes twice."""
    return [
        name if names[:i].count(name) == 0 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)
    ]


def _measure(subjects: Sequence[Subject]) -> tuple[list[_One], Overlaps]:
    """Every network, with spans and kernels of one size: what the one with the smallest sample allows."""
    sampled = [gradients(subject)[0] for subject in progress(subjects, "networks")]
    k = max(1, min(COMPARED, *(min(len(sample), sample.shape[1]) // 4 for sample in sampled)))
    n, least = min(samples(subject) for subject in subjects), min(map(len, sampled))
    found = []
    for subject, sample in zip(subjects, sampled):
        kernel = kernel_facts(subject.network, subject.inputs(n))
        parameters = sum(p.numel() for p in subject.network.parameters())
        spectrum = input_spectrum(sample)
        equal = spectrum if len(sample) == least else input_spectrum(sample[:least])
        found.append(_One(subject, spectrum, equal, kernel, parameters))
    return found, overlaps(sampled, k)


def in_words(names: Sequence[str], shared: Overlaps, n: int, above: Sequence[int] = ()) -> str:
    """What the overlaps of networks, each seen through n or more initialisations, say and what they cannot say.

    `above` are the eigenvalues above the band: of a network whose halves do not agree they need an explanation.
    """
    pairs = [(i, j) for i in range(len(names)) for j in range(i) if np.isfinite(shared.shares[i, j])]
    text = ""
    if pairs:
        best, worst = (choose(pairs, key=lambda pair: shared.shares[pair]) for choose in (max, min))
        text = f"{'The most alike are ' if len(pairs) > 1 else ''}{_pair(names, shared, best)}"
        if len(pairs) > 1:
            text += f"; the least {_pair(names, shared, worst)}"
            gap = shared.shares[best] - shared.shares[worst]
            if not gap > 2 * np.hypot(shared.share_errors[best], shared.share_errors[worst]):
                text += ", which is the same within the errors"
        text += ". "
    own, errors = np.diag(shared.values), np.diag(shared.errors)
    unsure = [f"{names[i]} ({number(own[i], errors[i])})" for i in range(len(names)) if not shared.known[i]]
    if unsure:
        text += (
            f"What the directions of {', '.join(unsure)} are cannot be told from {n} networks: two halves of a sample "
            f"overlap no more than chance ({shared.chance:.2g}) within two standard errors. No direction is preferred, "
            "or more networks are needed to see it."
        )
        many = [f"{above[i]} of {names[i]}" for i in range(len(above)) if above[i] and not shared.known[i]]
        if many:
            text += (
                f" The eigenvalues above the band ({', '.join(many)}) do not settle it: gradients whose lengths differ "
                "between networks lift them as a preference does."
            )
    return text.strip()


def _pair(names: Sequence[str], shared: Overlaps, pair: tuple[int, int]) -> str:
    """Two networks, their overlap and its share of that of two samples of one network, with errors."""
    i, j = pair
    share, error = max(0.0, min(1.0, shared.shares[pair])), shared.share_errors[pair]
    known = f"{share:.0%} ± {error:.0%}" if np.isfinite(error) else f"{share:.0%} (error unknown)"
    return (
        f"{names[i]} and {names[j]}: overlap {number(shared.values[pair], shared.errors[pair])}, "
        f"{known} of what two samples of one network share"
    )


def _page(names: list[str], found: list[_One], shared: Overlaps, meaning: str, seconds: float, stamp: str) -> str:
    shape = " × ".join(str(size) for size in found[0].subject.input_shape)
    seen = (
        "pixels and in frequency (slow variation central)" if is_image(found[0].subject) else "the entries of the input"
    )
    k = shared.k
    rows = [
        (
            name,
            one.parameters,
            one.spectrum.n,
            one.above,
            "yes" if sure else "no",
            float(one.equal.values[0]),
            mean_frequency(one.subject, one.spectrum.vectors[:k])[0] if is_image(one.subject) else "no images",
            one.kernel.rank,
            float(one.kernel.share[0]),
        )
        for name, one, sure in zip(names, found, shared.known)
    ]
    header = [
        "network",
        "parameters",
        "networks sampled",
        "eigenvalues above the band",
        "halves agree",
        "first eigenvalue / mean",
        f"mean frequency of the first {k}, cycles per pixel",
        "kernel effective rank",
        "kernel first share",
    ]
    left = _spectra(names, found, lambda one: one.equal.values, "input", "eigenvalue / mean", True)
    right = _spectra(names, found, lambda one: one.kernel.share, "kernel", "share of the trace", False)
    numbers = (shared.values, shared.errors, shared.shares, shared.share_errors)
    pairs = [
        (a, b, *(float(each[i, j]) for each in numbers))
        for i, a in enumerate(names)
        for j, b in enumerate(names[: i + 1])
    ]
    body = [
        _section(
            "In numbers",
            "One row per network; below is where they come from. Eigenvalues above the band are more than isotropic "
            "Gaussian gradients would give; whether they stand for directions that other initialisations share is said "
            "by the halves of the sample: they agree or not.",
            table(header, rows, "networks"),
        ),
        _section(
            "Shared directions",
            f"Overlap of the spans of the first {k} anisotropy directions: 1 the same, {shared.chance:.3f} unrelated. "
            "The diagonal compares two halves of one network's sample: it says how well the span is known. "
            "Standard errors are over random networks (one group of them left out at a time).",
            _matrix(names, shared.values),
            table(
                ["network", "with", "overlap", "standard error", "corrected", "its standard error"],
                pairs,
                "overlaps",
                limit=60,
                fold=True,
            ),
            meaning=meaning,
        ),
        _section("Maps", f"Every network in {seen}.", _maps(names, found)),
        _section(
            "Spectra",
            f"Left: response to the input by direction, of {found[0].equal.n} networks each (a smaller sample is "
            "steeper by itself); the steeper, the more anisotropic. Right: tangent kernels; the steeper, the fewer "
            "functions are easy.",
            tag("div", left, right, class_="columns"),
        ),
    ]
    footer = (
        f"biascope {biascope.__version__}, seed {found[0].subject.seed}, {seconds:.1f} s on "
        f"{device_name(found[0].subject.device)}. This page needs no network and holds its own data."
    )
    full = [one.subject.name for one in found]
    if any("/" in name for name in full):  # where the short names come from
        footer = f"Networks: {', '.join(full)}. {footer}"
    subtitle = f"Networks side by side, before they have seen any data. Inputs {shape}."
    return page(" · ".join(names), body, subtitle, footer, stamp=stamp)


def _section(title: str, read: str, *blocks: Html, meaning: str = "") -> Html:
    means = tag("p", tag("strong", "What this means: "), meaning, class_="meaning") if meaning else ""
    return tag("section", tag("h2", title), tag("p", read, class_="read"), means, *blocks)


def _matrix(names: list[str], matrix: np.ndarray[Any, Any]) -> Html:
    size, count = min(5.0, 2.0 + 0.5 * len(names)), len(names)
    top = float(matrix.max())
    with figures.style():
        drawing, axes = figures.new_figure(size + 0.8, size)
        shown = axes.imshow(matrix, vmin=0, vmax=top, cmap="viridis", interpolation="nearest")
        axes.set_xticks(range(count), brief(names), rotation=30, ha="right")
        axes.set_yticks(range(count), brief(names))
        axes.grid(False)
        for (row, column), value in np.ndenumerate(matrix):
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                color="#ffffff" if value < 0.6 * top else "#000000",
            )
        drawing.colorbar(shown, ax=axes, label="overlap", shrink=0.8)
    words = "; ".join(f"{names[i]} with {names[j]} {matrix[i, j]:.2f}" for i in range(count) for j in range(i + 1))
    points = [
        (f"{names[i]}, {names[j]}: overlap {matrix[i, j]:.3f}", [j], [i]) for i in range(count) for j in range(count)
    ]
    svg = figures.inline_svg(drawing, "overlap")
    return figure(svg, f"Matrix of overlaps: {words}.", hover=figures.hover(axes, points))


def _maps(names: list[str], found: list[_One]) -> Html:
    channels, height, width = image_shape(found[0].subject)
    if height == 1:
        return tag("p", "The inputs are vectors: there is no map to show.", class_="note")
    count = min(SHOWN, *(len(one.spectrum.values) for one in found))
    frames = []
    for i in range(count):
        cells = []
        for name, one in zip(names, found):
            vector = one.spectrum.vectors[i].reshape(channels, height, width)
            drawn = (pixels_and_fourier if is_image(one.subject) else entries)(vector, f"{name}, direction {i + 1}")
            share = f": eigenvalue {one.spectrum.values[i]:.3g} times the mean"
            words = tag("p", tag("strong", name), share, class_="note", style="overflow-wrap:anywhere")
            cells.append(tag("div", words, drawn))
        frames.append(tag("div", *cells, class_="columns", **frame("maps", i)))
    return tag("div", slider("maps", count), join(frames))


def _spectra(
    names: list[str], found: list[_One], values: Callable[[_One], Any], name: str, y_label: str, log_x: bool
) -> Html:
    lines, rows = [], []
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        for i, (label, short, one) in enumerate(zip(names, brief(names), found)):
            y = np.asarray(values(one))
            y = y[y > y[0] * 1e-9]
            axes.plot(np.arange(1, len(y) + 1), y, "-", color=f"C{i % 7}", label=short)
            lines.append((label, range(1, len(y) + 1), y))
            rows += [(label, k + 1, float(value)) for k, value in enumerate(y)]
        axes.set(xlabel="index", ylabel=y_label)
        figures.log_scale(axes, "xy" if log_x else "y")
        axes.legend()
    alt = "; ".join(f"{label} from {y[0]:.3g} to {y[-1]:.3g}" for label, _, y in lines)
    svg = figures.inline_svg(drawing, name)
    drawn = figure(svg, f"Spectra ({name}): {alt}.", hover=figures.hover(axes, lines))
    return tag("div", drawn, table(["network", "index", y_label], rows, f"{name}-spectra", fold=True))
