"""The atlas as one page: a map, what lies near what, and a table to sort."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import biascope
from biascope.atlas.distances import ASPECTS, Distances, between, distances, noise, place, plane
from biascope.atlas.measure import EXAMPLES, Fingerprint
from biascope.atlas.probing import MEANING
from biascope.reports.html import Html, csv_link, join, page, tag

LOOK = Path(__file__)
READING = {
    "total": "the mean over the aspects that two networks share",
    "kernel": f"eigenvalues of the tangent kernel of {EXAMPLES} natural inputs",
    "learning": "how fast the kernel learns each harmonic of a circle of inputs",
    "function": "the harmonics of fresh networks on such circles",
    "geometry": "to which frequencies of the input fresh networks respond, and how far their gradients spread",
    "directions": "sensitivity to every Fourier mode and every pixel; images only",
}
COLUMNS = (
    ("network", "its name on the command line, or in biascope.atlas.networks"),
    ("family", "how it mixes its inputs"),
    ("inputs", "; ".join(f"{kind}: {meaning}" for kind, meaning in MEANING.items())),
    ("parameters", "how many numbers are trained"),
    ("kernel rank", f"exp(entropy) of the centred tangent kernel's eigenvalues at {EXAMPLES} inputs; at most 63"),
    ("shared", "share of the kernel's trace that all inputs have in common: large, and the network sees them as alike"),
    ("learns", "mean harmonic on a circle of inputs that the kernel learns; 1: linear functions only"),
    ("roughness", "mean harmonic of fresh networks on such a circle"),
    ("low frequencies", "sensitivity to the lowest eighth of frequencies relative to white gradients, as log2"),
    ("spread", "participation ratio of the eigenvalues of G = E[g gᵀ] as a share of the input's dimension"),
)


def atlas_page(found: Sequence[Fingerprint], placed: Fingerprint | None = None) -> str:
    """The page as text; `placed` is a network that is not in the atlas, shown where it would lie."""
    known = distances(found)
    everyone = [*found, *([placed] if placed else [])]
    data = map_data(found, known, placed)
    body = [_map_section(data, placed), _table_section(everyone), _method(found, known, data)]
    script = LOOK.with_name("atlas.js").read_text(encoding="utf-8")
    style = LOOK.with_name("atlas.css").read_text(encoding="utf-8")
    payload = json.dumps(data).replace("<", "\\u003c")
    extra = Html(
        f'<style>{style}</style><script type="application/json" id="atlas">{payload}</script><script>{script}</script>'
    )
    subtitle = (
        f"What {len(found)} architectures are inclined to learn before they have seen any data, measured alike. "
        "Near on the map: alike in what their tangent kernels learn, in what fresh networks look like and in what they "
        "respond to."
    )
    footer = f"biascope {biascope.__version__}. This page needs no network and holds its own data."
    return page("Atlas of inductive biases", [*body, extra], subtitle, footer)


def map_data(found: Sequence[Fingerprint], known: Distances, placed: Fingerprint | None) -> dict[str, Any]:
    """What the page's script draws: points per aspect, distances, spectra."""
    maps: dict[str, Any] = {}
    n = len(found)
    all_distances: dict[str, Any] = {"total": known.total}
    all_distances.update({str(aspect): D for aspect, D in known.aspects.items()})
    for aspect in all_distances:
        D = all_distances[aspect]
        inside = [i for i in range(n) if np.isfinite(D[i]).sum() > 1]  # the others cannot be compared in this aspect
        points, stress = plane(D[np.ix_(inside, inside)])
        at: list[list[float] | None] = [None] * n
        for i, point in zip(inside, points):
            at[i] = [round(float(v), 4) for v in point]
        away = [[None if not np.isfinite(v) else round(float(v), 3) for v in row] for row in D]
        if placed:
            to = _to(placed, found, known, aspect)
            usable = np.isfinite(to[inside])
            far = [None if not np.isfinite(v) else round(float(v), 3) for v in to]
            spot = place(points[usable], to[inside][usable]) if usable.any() else None
            at.append(None if spot is None else [round(float(v), 4) for v in spot])
            away = [[*row, v] for row, v in zip(away, far)] + [[*far, 0.0]]
        maps[aspect] = {"points": at, "distances": away, "stress": round(stress, 4), "what": READING[aspect]}
    networks = [_network(one, known) for one in found]
    if placed:
        networks.append({**_network(placed, known), "placed": True})
    return {"networks": networks, "maps": maps}


def _to(one: Fingerprint, found: Sequence[Fingerprint], known: Distances, aspect: str) -> Any:
    rows = np.array([[between(one, other, a) / known.scale[a] for other in found] for a in ASPECTS])
    return np.nanmean(rows, 0) if aspect == "total" else rows[[*ASPECTS].index(aspect)]  # type: ignore[arg-type]


def _network(one: Fingerprint, known: Distances) -> dict[str, Any]:
    def short(values: Any) -> list[float]:
        return [float(f"{float(v):.3g}") if np.isfinite(float(v)) else 0.0 for v in values]

    own = [noise(one, aspect) / known.scale[aspect] for aspect in ASPECTS]
    return {
        "name": one.name,
        "kind": one.kind,
        "family": one.about.get("family", "yours"),
        "learning": short(one.learning.mean(0)),
        "function": short(one.function.mean(0)),
        "kernel": short(one.kernel.mean(0)),
        "noise": float(f"{np.nanmean(own):.2g}"),
    }


def _map_section(data: dict[str, Any], placed: Fingerprint | None) -> Html:
    options = join(tag("option", "everything" if key == "total" else key, value=key) for key in data["maps"])
    controls = tag(
        "div",
        tag("label", "Map by ", tag("select", options, id="aspect")),
        tag("label", "Find ", tag("input", type="search", id="find", placeholder="e.g. resnet")),
        class_="controls",
    )
    yours = f" {placed.name}, the large ring, is yours." if placed else ""
    return tag(
        "section",
        tag("h2", "The map"),
        tag("p", "Colour is the family, shape the kind of input. Choose a network to see its neighbours." + yours,
            class_="read"),
        controls,
        tag("p", id="reading", class_="note", aria_live="polite"),
        tag("div", tag("div", id="map"), tag("div", id="near", aria_live="polite"), class_="atlas"),
    )  # fmt: skip


def row_of(one: Fingerprint) -> list[Any]:
    """A network's row of the table, in the order of COLUMNS."""
    return [
        one.name,
        one.about.get("family", "yours"),
        one.kind,
        one.parameters,
        _rounded(one.effective_rank, 1),
        _rounded(one.constant, 3),
        _rounded(one.mean_harmonic, 2),
        _rounded(one.roughness, 2),
        _rounded(float(one.bands.mean(0)[1]), 2) if one.bands.numel() else "",
        _rounded(float(one.spread.mean()), 3),
    ]


def _rounded(value: float, digits: int) -> float | str:
    return round(value, digits) + 0.0 if np.isfinite(value) else ""  # no -0.0


def _cell(column: int, value: Any) -> Html:
    text = f"{value:,}" if isinstance(value, int) else value
    return tag("td", text, data_value=value, class_="number" if column > 2 else None)


def _table_section(everyone: Sequence[Fingerprint]) -> Html:
    rows = [row_of(one) for one in everyone]
    heads = [
        tag("th", tag("button", name, type="button", title=meaning), scope="col", aria_sort="none",
            class_="number" if i > 2 else None)
        for i, (name, meaning) in enumerate(COLUMNS)
    ]  # fmt: skip
    body = join(tag("tr", join(_cell(i, value) for i, value in enumerate(row))) for row in rows)
    grid = tag("table", tag("thead", tag("tr", join(heads))), tag("tbody", body), id="networks")
    meanings = join(join([tag("dt", name), tag("dd", meaning)]) for name, meaning in COLUMNS)
    return tag(
        "section",
        tag("h2", "The table"),
        tag("p", "A click on a heading sorts.", class_="read"),
        tag("div", grid, class_="scroll", tabindex=0),
        tag("p", csv_link([name for name, _ in COLUMNS], rows, "atlas"), class_="note"),
        tag("details", tag("summary", "What the columns mean"), tag("dl", meanings, class_="meanings")),
    )


def _method(found: Sequence[Fingerprint], known: Distances, data: dict[str, Any]) -> Html:
    typical = np.median([_network(one, known)["noise"] for one in found])
    stress = data["maps"]["total"]["stress"]
    text = [
        "Inputs are natural ones of each kind: " + "; ".join(f"{k}: {m}" for k, m in MEANING.items()) + ".",
        "A circle of inputs is a cos t + b sin t for two such inputs a and b; functions on it have harmonics whatever "
        "the inputs are, so that networks on images, tables and texts can be compared.",
        "The distance in one aspect is the root mean square difference of logarithms, in units of its median over the "
        f"atlas. Every fingerprint is measured twice: two measurements of one network are {typical:.2g} apart.",
        f"The plane keeps the distances up to a stress of {stress:.1%} (squares missed, metric scaling); neighbours in "
        "the list are by the distances themselves.",
        "All networks are fresh, in eval mode and in one random combination of their outputs. BatchNorm layers have "
        "the statistics of a batch of these inputs. What is below 1e-6 of a kernel's trace is rounding and left out.",
        "Image networks made for 224 pixels are measured at 32.",
    ]
    return tag("section", tag("h2", "How it is measured"), tag("ul", join(tag("li", line) for line in text)))
