"""The ledger: every claim of the papers joined with the finished runs that test it, never typed by hand.

A claim with several runs (sizes, networks, devices) has one row per run, the largest size first; a claim without any
says why: no study exists yet, nobody has committed a run, or the published setting cannot be had. What a run on a
stand-in found is told in its row; the claim itself stays "not tested". A claim that no study judges but whose numbers
a run has is held against those numbers (`biascope.studies.conditions`).
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from biascope.reports.html import Html, csv_link, join, page, table, tag
from biascope.reports.study_page import changed_options, finished
from biascope.studies import studies
from biascope.studies.claims import Claim, claims, documents
from biascope.studies.registry import Study
from biascope.studies.result import Estimate, StudyResult, Verdict
from biascope.studies.runs import MARKER
from biascope.support.errors import BiascopeError, InputError
from biascope.support.signatures import checked

SIZES = ("paper", "laptop", "smoke")
VERDICTS = ("confirmed", "not confirmed", "not tested")
SCOPE = ("nets", "boundaries", "rates")  # options that say for what a claim is judged
COUNTED = (
    "A claim counts by its runs of the largest size; mixed: they differ, by network or setting. Sizes and settings are "
    "those of the run."
)
HEADER = ("Figure", "Claim", "Study", "Size", "Device", "Measured", "Verdict", "Run")


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a claim, and one run that tests it (or why there is none)."""

    claim: Claim
    verdict: str
    measured: str
    study: str = ""
    size: str = ""
    settings: str = ""
    device: str = ""
    run: Path | None = None

    @property
    def figure(self) -> str:
        """The figure, and where else it appears."""
        return self.claim.figure + (f" (also {self.claim.also})" if self.claim.also else "")


class Ledger(tuple[Row, ...]):
    """The rows of a ledger: a tuple that notebooks show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """How many claims of each paper hold, and the rows behind it, for notebooks."""
        papers = [(title, [row for row in self if row.claim.paper == paper]) for paper, title in _titles()]
        counts = [tag("tr", tag("td", title), tag("td", summary(mine))) for title, mine in papers if mine]
        rows = [_cells(row, None) for row in self]
        return tag(
            "div", tag("p", summary(self)), tag("table", *counts), table(HEADER, rows, "ledger", len(rows), True)
        )


@dataclass(frozen=True)
class _Finished:
    study: str
    size: str
    settings: str
    device: str
    measured: str
    verdict: str
    path: Path
    options: Mapping[str, Any]
    numbers: Mapping[str, Estimate]


@checked
def ledger(folder: str | Path = "reproductions") -> Ledger:
    """The rows of all claims, from the run folders in `folder`.

    Files, folders named .NAME or __NAME, and the queue (a folder of TOML files) are left out.

    Example:
        >>> ledger("a-folder-that-does-not-exist")[0].verdict
        'not tested'
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: the ledger reads a folder of run folders, e.g. reproductions")
    if (folder / MARKER).exists():
        raise InputError(f"{folder} is one run: the ledger reads the folder above, {folder.resolve().parent}")
    here = folder.glob("*/") if folder.is_dir() else []
    here = (path for path in here if not any(path.glob("*.toml")))  # the queue of runs
    paths = sorted(path for path in here if not path.name.startswith((".", "__")))  # what editors and Python leave
    runs = sorted((_finished(path) for path in paths), key=lambda run: (SIZES.index(run.size), run.path.name))
    rows: list[Row] = []
    for claim in _all_claims():
        mine = [run for run in runs if claim.tested_by(run.study, run.options, run.numbers)]
        rows += [
            Row(claim, *_judged(claim, run), run.study, run.size, run.settings, run.device, run.path) for run in mine
        ] or [Row(claim, "not tested", _why(claim), claim.studies[0] if claim.studies else "")]
    return Ledger(rows)


def _titles() -> list[tuple[str, str]]:
    return [(key, document.title) for key, document in documents().items()]


def _all_claims() -> list[Claim]:
    """The catalogue, then the claims of studies that it does not name, so that no run is ever hidden."""
    known = {name for claim in claims() for name in claim.studies}
    extra = [
        Claim(name, study.paper, study.figure, study.claim, (name,), "")
        for name, study in studies().items()
        if name not in known
    ]
    order = list(documents())
    return sorted([*claims(), *extra], key=lambda claim: order.index(claim.paper))


def _judged(claim: Claim, run: _Finished) -> tuple[str, str]:
    """Verdict and measurement. A run on a stand-in does not test the claim: what it found is told, and not counted."""
    verdict: str
    verdict, measured = claim.judge(StudyResult(cast(Verdict, run.verdict), "", run.measured, run.numbers))
    if claim.rule_set == "after":
        measured = f"{measured} (By two standard errors; asked when the run was known.)"
        if run.verdict == "not tested":  # it did not learn, or has one seed: its numbers judge nothing else
            verdict, measured = run.verdict, f"{measured} The run itself tests nothing: its page says why."
    elif claim.rule:
        measured = run.measured
    if not claim.stand_in:
        return verdict, measured
    return "not tested", f"On a stand-in ({claim.stand_in}): {verdict}. {measured}"


def _why(claim: Claim) -> str:
    if claim.why:
        return claim.why
    here = [name for name in claim.studies if name in studies()]
    if here:
        how = "".join(f" --set {key}={value}" for key, value in claim.where.items())
        return f"no run kept yet: biascope run {here[0]} --size paper{how}"
    return "no study yet"


def _finished(path: Path) -> _Finished:
    try:
        run, result, raw = finished(path)
    except BiascopeError as error:
        raise InputError(f"the ledger cannot read {path}: {error}") from error
    study = studies().get(str(raw.get("study")))
    if study is None:
        raise InputError(f"{path} is a run of {raw.get('study')!r}, which is not a study of this version")
    size = str(run.config.get("size"))
    if size not in SIZES:
        raise InputError(f"{path / 'config.json'}: size {size!r} is not one of {', '.join(SIZES)}")
    settings = ", ".join(f"{key}={value}" for key, value in changed_options(run).items())
    options = run.config.get("options", {})
    device = str(run.environment.get("device_name", ""))
    told = result.measured
    measured = told if "Not tested: " in told else told + untested(study, options)  # newer runs say it themselves
    return _Finished(study.name, size, settings, device, measured, result.verdict, path, options, result.numbers)


def untested(study: Study, options: Mapping[str, Any]) -> str:
    """What the paper's size has and a run with these options has not, as a sentence; empty where it has all."""
    wanted, missing = study.values("paper"), list[str]()
    for key in (key for key in SCOPE if key in wanted and key in options):
        have, want = (list(v) if isinstance(v, list | tuple) else [v] for v in (options[key], wanted[key]))
        absent = [str(each) for each in want if each not in have]
        missing += [f"{key} {', '.join(absent)}"] if absent else []
    return f" Not tested: {'; '.join(missing)}." if missing else ""


@checked
def summary(rows: Sequence[Row]) -> str:
    """How many claims there are, and how many have which verdict at their largest size.

    "mixed": runs of that size differ, one network or setting bearing the claim out and another not.

    Example:
        >>> summary(ledger("nowhere")).endswith("not tested.")
        True
    """
    largest, found = dict[str, str](), dict[str, set[str]]()
    for row in rows:
        if largest.setdefault(row.claim.id, row.size) == row.size:
            found.setdefault(row.claim.id, set()).add(row.verdict)
    count = Counter(_together(verdicts) for verdicts in found.values())
    kinds = ("confirmed", "not confirmed", "mixed", "not tested")
    return f"{len(found)} claims: " + ", ".join(f"{count[kind]} {kind}" for kind in kinds) + "."


def _together(verdicts: set[str]) -> str:
    decided = verdicts - {"not tested"}
    return "mixed" if len(decided) > 1 else next(iter(decided), "not tested")


@checked
def ledger_markdown(rows: Sequence[Row], relative_to: Path | None = None, page_name: str = "") -> str:
    """The ledger as Markdown, by paper; runs are linked relative to `relative_to`.

    Example:
        >>> ledger_markdown(ledger("nowhere")).splitlines()[0]
        '# Ledger of claims'
    """
    lines = ["# Ledger of claims", "", "Written by `biascope ledger` from run folders. Do not edit.", ""]
    lines += [summary(rows), "", COUNTED, ""]
    for paper, title in _titles():
        mine = [row for row in rows if row.claim.paper == paper]
        if not mine:
            continue
        lines += [f"## {title}", "", summary(mine), "", f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
        for row in mine:
            where = f"[{row.run.name}]({_link(row.run, relative_to)}{page_name})" if row.run else ""
            study = f"`{row.study}`" if row.study else ""
            size = f"{row.size} ({row.settings})" if row.settings else row.size
            cells = (row.figure, row.claim.claim, study, size, row.device, row.measured, row.verdict, where)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


@checked
def ledger_page(rows: Sequence[Row], relative_to: Path | None = None, look: str = "") -> str:
    """The ledger as a page: rows can be narrowed by verdict and by words. `look`: as in `page`.

    Example:
        >>> ledger_page(ledger("nowhere")).count("<h1>")
        1
    """
    choices = [tag("option", "all verdicts", value="")] + [tag("option", name, value=name) for name in VERDICTS]
    controls = tag(
        "p",
        tag("label", "Verdict ", tag("select", join(choices), data_filter="verdict")),
        " ",
        tag("label", "Words ", tag("input", type="search", data_filter="words", placeholder="e.g. resnet")),
        " ",
        csv_link(HEADER, [_cells(row, relative_to) for row in rows], "ledger"),
        class_="controls",
    )
    body: list[Html] = [controls]
    for paper, title in _titles():
        mine = [row for row in rows if row.claim.paper == paper]
        if mine:
            head = tag("tr", join(tag("th", name, scope="col") for name in HEADER))
            lines = join(_line(row, relative_to) for row in mine)
            grid = tag("table", tag("thead", head), tag("tbody", lines), class_="ledger")
            body.append(tag("section", tag("h2", title), tag("p", summary(mine), class_="read"), grid))
    subtitle = f"What the papers say, what was measured, and the run that shows it. {summary(rows)}"
    return page("Ledger of claims", body, subtitle, "Written by `biascope ledger` from run folders.", look)


def _line(row: Row, relative_to: Path | None) -> Html:
    cells = zip(HEADER, _cells(row, relative_to))
    tds = join(tag("td", cell, data_name=name, class_="empty" if cell == "" else None) for name, cell in cells)
    return tag("tr", tds, data_verdict=row.verdict, id=None)


def _cells(row: Row, relative_to: Path | None) -> tuple[object, ...]:
    verdict = tag("span", row.verdict, class_=f"verdict {row.verdict.replace(' ', '-')}")
    link = tag("a", row.run.name, href=f"{_link(row.run, relative_to)}/index.html") if row.run else ""
    size = join([row.size, tag("br"), tag("small", row.settings)]) if row.settings else row.size
    study = tag("code", row.study) if row.study else ""
    return (row.figure, row.claim.claim, study, size, row.device, row.measured, verdict, link)


def _link(run: Path, relative_to: Path | None) -> str:
    return Path(os.path.relpath(run, relative_to)).as_posix() if relative_to else run.as_posix()
