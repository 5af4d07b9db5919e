"""The claims of the documents: every statement that a study can test, with its rule, read from `claims.toml` files.

A package of studies (an entry point of the group `biascope.studies`) holds one `documents.toml` and, in each of its
folders, one `claims.toml`. They are the only home of a claim: its wording, its quotation, its published numbers, and
the rule that judges it. Studies return numbers.
"""

import functools
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from biascope.studies.conditions import Condition, judge
from biascope.studies.result import Estimate, StudyResult, Verdict
from biascope.support.errors import CorruptError, InputError

GROUP = "biascope.studies"  # the entry points under which packages of studies are found
OWN = "biascope_papers"
_NOTHING: Mapping[str, Estimate] = {}


@dataclass(frozen=True)
class Document:
    """A paper or thesis whose figures are studies."""

    key: str
    title: str
    authors: str = ""
    year: int | None = None
    venue: str = ""
    arxiv: str = ""


@dataclass(frozen=True)
class Claim:
    """What a document says in one figure or table, which studies test it, and the rule on their numbers."""

    id: str
    paper: str
    figure: str
    claim: str
    studies: tuple[str, ...]
    data: str
    also: str = ""  # the same figure in another document
    quote: str = ""  # the document's own words
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)  # options a run must have to test this claim
    why: str = ""  # why it cannot be tested as published, where it cannot
    rule: tuple[Condition, ...] = ()  # on numbers of its studies' runs; they must all hold
    gate: tuple[Condition, ...] = ()  # what must hold for a run to test anything (the networks learned)
    rule_set: Literal["before", "after"] = "before"  # was the rule written before or after its runs were seen?
    published: Mapping[str, Any] = field(default_factory=dict, hash=False)  # {number: value, or [value, error]}
    stand_in: str = ""  # what its studies run on instead; such a run says nothing sure about the document's own claim

    def tested_by(self, study: str, options: Mapping[str, Any], numbers: Mapping[str, Estimate] = _NOTHING) -> bool:
        """Whether a run of that study with those options, which has these numbers, tests this claim."""
        mine = study in self.studies and all(options.get(key) == value for key, value in self.where.items())
        return mine and not any(condition.missing(numbers) for condition in (*self.rule, *self.gate))

    def judge(self, result: StudyResult) -> tuple[Verdict, str]:
        """The verdict of the rule on a run, and what was measured; without a rule, what the study itself says."""
        if not self.rule:
            return result.verdict, result.measured
        return judge(self.rule, result.numbers, self.gate)


def packages() -> tuple[str, ...]:
    """Names of the installed packages that hold studies.

    A checkout that is on the path without being installed has no entry points; its papers are found by their name.
    """
    found = dict.fromkeys(point.value for point in entry_points(group=GROUP))
    if OWN not in found and find_spec(OWN) is not None:
        found[OWN] = None
    return tuple(found)


@functools.cache
def documents() -> dict[str, Document]:
    """The documents whose claims are known, in order, by their key."""
    found: dict[str, Document] = {}
    for file in _homes("documents.toml"):
        found |= {key: Document(key, **row) for key, row in _read(file).items()}
    return found


@functools.cache
def claims(file: Path | None = None) -> tuple[Claim, ...]:
    """Every claim of the installed papers (of one catalogue, where a file is given), in the order of the documents."""
    homes = _homes("claims.toml") if file is None else [file]
    made = tuple(claim for home in homes for claim in _claims_of(home))
    where = file or ", ".join(map(str, homes))
    twice = [name for name, count in Counter(claim.id for claim in made).items() if count > 1]
    foreign = [claim.id for claim in made if claim.paper not in documents()]
    untested = [claim.id for claim in made if not claim.studies and not claim.why]
    problems = (("more than once", twice), ("of an unknown paper", foreign), ("no study, no reason", untested))
    for problem, ids in problems:
        if ids:
            raise CorruptError(f"{where}: {problem}: {', '.join(ids)}")
    order = list(documents())
    return tuple(sorted(made, key=lambda claim: order.index(claim.paper)))


def claims_of(study: str, options: Mapping[str, Any] | None = None) -> tuple[Claim, ...]:
    """The claims that name a study, the one it is about first; with options, only those that such a run can test."""
    mine = [claim for claim in claims() if study in claim.studies]
    if options is not None:
        mine = [claim for claim in mine if all(options.get(key) == value for key, value in claim.where.items())]
    return tuple(mine)


def judged(study: str, options: Mapping[str, Any], result: StudyResult) -> StudyResult:
    """A result with the verdict and the wording of the first claim that its run tests, where that claim has a rule."""
    for claim in claims_of(study, options):
        if claim.rule and claim.tested_by(study, options, result.numbers):
            verdict, _ = claim.judge(result)
            return StudyResult(verdict, claim.claim, result.measured, result.numbers, result.figures)
    return result


def _homes(name: str) -> list[Path]:
    roots = [Path(str(files(package))) for package in packages()]
    return [file for root in roots for file in sorted(root.rglob(name))]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CorruptError(f"{file} is not TOML: {error}") from error


def _claims_of(file: Path) -> list[Claim]:
    try:
        return [_claim(row) for row in _read(file)["claim"]]
    except (KeyError, TypeError, InputError) as error:
        raise CorruptError(f"{file} is not a catalogue of claims: {error}") from error


def _claim(row: Mapping[str, Any]) -> Claim:
    conditions = {key: tuple(Condition(**each) for each in row.get(key, ())) for key in ("rule", "gate")}
    return Claim(**{**row, "studies": tuple(row["studies"]), **conditions})
