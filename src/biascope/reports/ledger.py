"""The ledger of claims: one row per study, filled from finished run folders and never typed by hand."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from biascope.errors import BiascopeError, InputError
from biascope.reports.html import page, table, tag
from biascope.studies import load_result, studies
from biascope.studies.registry import PAPERS


@dataclass(frozen=True)
class Claim:
    """One row: what the paper says, what was measured, the verdict, and the run that shows it."""

    study: str
    paper: str
    figure: str
    claim: str
    size: str
    measured: str
    verdict: str
    device: str
    run: Path | None


SIZES = ("smoke", "laptop", "paper")


def ledger(folder: str | Path = "reproductions") -> tuple[Claim, ...]:
    """A row per registered study: from its run of the largest size in `folder`, or "not tested" where there is none.

    Example:
        >>> ledger("a-folder-that-does-not-exist")[0].verdict
        'not tested'
    """
    best: dict[str, Claim] = {}
    for path in sorted(Path(folder).glob("*/")) if Path(folder).is_dir() else []:
        row = _row(path)
        old = best.get(row.study)
        if old is None or SIZES.index(row.size) >= SIZES.index(old.size):
            best[row.study] = row
    rows = []
    for study in studies().values():
        nothing = Claim(
            study.name, study.paper, study.figure, study.claim, "", "no run in the folder", "not tested", "", None
        )
        rows.append(best.get(study.name, nothing))
    return tuple(rows)


def _row(path: Path) -> Claim:
    try:
        run, result, raw = load_result(path)
    except BiascopeError as error:
        raise InputError(f"the ledger cannot read {path}: {error}") from error
    study = studies().get(str(raw.get("study")))
    if study is None:
        raise InputError(f"{path} is a run of {raw.get('study')!r}, which is not a study of this version")
    size = str(run.config.get("size"))
    if size not in SIZES:
        raise InputError(f"{path / 'config.json'}: size {size!r} is not one of {', '.join(SIZES)}")
    device = str(run.environment.get("device_name", ""))
    return Claim(
        study.name, study.paper, study.figure, study.claim, size, result.measured, result.verdict, device, path
    )


HEADER = ("Study", "Claim", "Size", "Measured", "Verdict", "Run")


def ledger_markdown(rows: Sequence[Claim], relative_to: Path | None = None) -> str:
    """The ledger as Markdown, by paper."""
    lines = ["# Ledger of claims", "", "Written by `biascope ledger` from run folders. Do not edit.", ""]
    for paper, title in PAPERS.items():
        mine = [row for row in rows if row.paper == paper]
        if not mine:
            continue
        lines += [f"## {title}", "", f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
        for row in mine:
            where = f"[{row.run.name}]({_link(row.run, relative_to)})" if row.run else ""
            cells = (f"`{row.study}`", row.claim, row.size, row.measured, row.verdict, where)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def ledger_page(rows: Sequence[Claim], relative_to: Path | None = None) -> str:
    """The ledger as a page."""
    body = []
    for paper, title in PAPERS.items():
        cells = [
            (
                row.study,
                row.claim,
                row.size,
                row.measured,
                tag("span", row.verdict, class_=f"verdict {row.verdict.replace(' ', '-')}"),
                tag("a", row.run.name, href=f"{_link(row.run, relative_to)}/index.html") if row.run else "",
            )
            for row in rows
            if row.paper == paper
        ]
        if cells:
            body.append(tag("section", tag("h2", title), table(list(HEADER), cells, f"ledger-{paper}", limit=500)))
    return page("Ledger of claims", body, "What the papers say, what was measured, and the run that shows it.")


def _link(run: Path, relative_to: Path | None) -> str:
    return Path(os.path.relpath(run, relative_to)).as_posix() if relative_to else run.as_posix()
