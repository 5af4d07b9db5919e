"""The gallery on the home page: kept runs as thumbnails, by document, narrowed by verdict, size and network."""

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from biascope.reports import Row
from biascope.reports.html import Html, join, tag
from biascope.reports.ledger_rows import LEVELS, VERDICTS
from biascope.reports.study_page import finished
from biascope.studies import find
from biascope.studies.claims import documents, experiment_of
from biascope.studies.judging import Judgement, options_of_run
from biascope.studies.runs import MARKER, Run

WIDTH = 300  # pixels of a thumbnail
UNJUDGED = "no claim"  # runs that none of the claims is tested by


@dataclass(frozen=True)
class Shown:
    """A kept run in the gallery."""

    run: Run
    document: str
    title: str
    place: str
    networks: tuple[str, ...]
    judgements: tuple[Judgement, ...]
    picture: Path | None

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdicts of its claims, each once."""
        found = {each.verdict for each in self.judgements}
        return tuple(each for each in VERDICTS if each in found) or (UNJUDGED,)

    @property
    def level(self) -> str:
        """The best size at which one of its claims is judged."""
        return min((each.level for each in self.judgements), key=LEVELS.index, default=UNJUDGED)


def gallery(rows: Sequence[Row], runs: Path) -> tuple[Html, dict[str, Path]]:
    """The gallery as HTML, and the picture behind every thumbnail, by the name of its run."""
    judged: dict[Path, list[Judgement]] = {}
    for row in rows:
        for each in row.judgements:
            judged.setdefault(each.run.path, []).append(each)
    shown = [_shown(marker.parent, judged) for marker in sorted(runs.glob(f"*/{MARKER}"))]
    networks = Counter(name for each in shown for name in each.networks)
    picks = [
        _pick("Verdict", "verdict", (*VERDICTS, UNJUDGED)),
        _pick("Size", "level", (*LEVELS, UNJUDGED)),
        _pick("Network", "network", sorted(networks)),
        tag("label", "Words ", tag("input", type="search", data_pick="words", placeholder="e.g. frequency")),
    ]
    body = [tag("div", join(picks), tag("output", f"{len(shown)} runs", aria_live="polite"), class_="picks")]
    for key, document in documents().items():
        mine = sorted((each for each in shown if each.document == key), key=_order)
        first, _, others = document.authors.partition(",")
        head = f"{document.title} ({first}{' et al.' if others else ''}, {document.year})"
        if mine:
            body.append(
                tag("section", tag("h3", head), tag("div", join(map(_card, mine)), class_="runs"), class_="runs-of")
            )
    return tag("div", join(body), class_="gallery"), {
        each.run.path.name: each.picture for each in shown if each.picture
    }


def _shown(folder: Path, judged: dict[Path, list[Judgement]]) -> Shown:
    run, result, raw = finished(folder)
    study = find(raw["study"])
    experiment = experiment_of(study.name)
    networks = experiment.networks_of(options_of_run(run)) if experiment else ()
    drawn = [folder / "figures" / f"{chart.name}.png" for chart in result.figures]
    pictures = [file for file in (*sorted((folder / "pictures").glob("*.png")), *drawn) if file.exists()]
    place = study.place.rpartition(", ")[2]
    return Shown(
        run,
        study.paper,
        study.summary.rstrip("."),
        place[0].upper() + place[1:],
        networks,
        tuple(judged.get(folder, ())),
        next(iter(pictures), None),
    )


def _order(shown: Shown) -> tuple[object, ...]:
    """Figures before tables and theorems, in the order of their numbers (4.2 before 4.10), the largest run first."""
    kind, _, number = shown.place.partition(" ")
    parts = [(int(digits or 0), letters) for digits, letters in re.findall(r"(\d+)|([A-Za-z]+)", number)]
    size = LEVELS.index(shown.level) if shown.level in LEVELS else len(LEVELS)
    return kind != "Figure", parts, size, shown.run.path.name


def _pick(name: str, key: str, values: Sequence[str]) -> Html:
    options = [tag("option", "all", value=""), *(tag("option", value, value=value) for value in values)]
    return tag("label", f"{name} ", tag("select", join(options), data_pick=key))


def _card(shown: Shown) -> Html:
    name = shown.run.path.name
    here = f"reproductions/{name}/index.html"
    count = Counter(each.verdict for each in shown.judgements)
    badges = [
        tag("span", f"{count[each]} {each}" if len(shown.judgements) > 1 else each, class_=f"verdict {each.split()[0]}")
        for each in shown.verdicts
    ]
    alt = f"{shown.place}: {shown.title}"
    picture = (
        tag("img", src=f"gallery/{name}.webp", alt=alt, loading="lazy", width=WIDTH, height=WIDTH * 2 // 3)
        if shown.picture
        else tag("span", "no picture", class_="none")
    )
    about = ", ".join(dict.fromkeys((*shown.networks[:3], *(["…"] if len(shown.networks) > 3 else []))))
    details = " · ".join(filter(None, (about, "" if shown.level == UNJUDGED else shown.level)))
    return tag(
        "a",
        picture,
        tag("span", tag("strong", shown.place), f" {shown.title}", class_="title"),
        tag("span", join(badges), class_="badges"),
        tag("small", details),
        href=here,
        class_="run",
        data_verdict="|".join(shown.verdicts),
        data_level=shown.level,
        data_network="|".join(shown.networks),
    )


def thumbnail(picture: Path) -> bytes:
    """A small copy of a picture, on white, as WebP."""
    with Image.open(picture) as found:
        whole = found.convert("RGBA")
        paper = Image.new("RGBA", whole.size, "white")
        paper.alpha_composite(whole)
        small = paper.convert("RGB")
        small.thumbnail((WIDTH * 3 // 2, WIDTH), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=75)
    return buffer.getvalue()
