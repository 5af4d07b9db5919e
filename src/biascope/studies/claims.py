"""The claims of the documents: every statement that a study can test, with its rule, read from `claims.toml` files.

A package of studies (an entry point of the group `biascope.studies`) holds one `documents.toml` and, in each of its
folders, one `claims.toml`. They are the only home of a claim: its wording, its quotation, its published numbers, the
rule that judges it, and the published setting of each study. Studies return numbers.
"""

import functools
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from biascope.studies.conditions import Condition
from biascope.studies.result import Estimate
from biascope.studies.scope import Experiment
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
    main: tuple[str, ...] = ()  # the claims by which it stands or falls


@dataclass(frozen=True)
class Published:
    """A number that a document prints, and how far ours may lie from it beyond both errors."""

    number: str  # its name in a run
    value: float
    tolerance: float
    error: float | None = None
    setting: str = ""
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)  # options of the runs it is meant for
    rule: bool = True  # whether it takes part in the test that the claim's rule accepts the published data


@dataclass(frozen=True)
class Claim:
    """One statement of a document, which studies test it, and the rule on their numbers."""

    id: str
    paper: str
    figure: str
    statement: str
    studies: tuple[str, ...]
    data: str = ""
    also: str = ""  # the same figure in another document
    place: str = ""  # where in the document
    quote: str = ""  # the document's own words
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)  # options a run must have to test this claim
    networks: tuple[str, ...] = ()  # the networks it speaks of, where not all of the experiment's
    per_network: bool = False  # whether `{net}` in the rule stands for each network of a run, judged apart
    why: str = ""  # why it cannot be tested as published, where it cannot
    rule: tuple[Condition, ...] = ()  # on numbers of its studies' runs; they must all hold
    gate: tuple[Condition, ...] = ()  # what must hold for a run to test anything (the networks learned)
    rule_set: Any = "before"  # when the rule was written (a gate may be younger); or "before", "after" its runs
    why_rule: str = ""  # what the rule takes from the text
    published: tuple[Published, ...] = ()
    stand_in: str = ""  # what all its studies run on instead

    def selects(self, options: Mapping[str, Any]) -> bool:
        """Whether a run with these options is one that the claim is about."""
        return selects(self.where, options)

    def tested_by(self, study: str, options: Mapping[str, Any], numbers: Mapping[str, Estimate] = _NOTHING) -> bool:
        """Whether a run of that study with those options, which has these numbers, tests this claim."""
        if study not in self.studies or not self.selects(options):
            return False
        if self.per_network:
            return any(self.conditions(net, numbers) is not None for net in self.networks_of(study, options))
        return self.conditions("", numbers) is not None

    def networks_of(self, study: str, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The networks of a run that it speaks of."""
        experiment = experiment_of(study)
        found = experiment.networks_of(options) if experiment else ()
        return tuple(net for net in found if not self.networks or net in self.networks)

    def conditions(
        self, network: str, numbers: Mapping[str, Estimate]
    ) -> tuple[tuple[Condition, ...], tuple[Condition, ...]] | None:
        """Rule and gate on one network (of all, where it is ""); None if the numbers they need are not there."""
        rule, gate = (tuple(each.of(network) for each in part) for part in (self.rule, self.gate))
        return None if any(each.missing(numbers) for each in (*rule, *gate)) else (rule, gate)

    def printed(self, number: str) -> float:
        """A published number.

        Example:
            >>> Claim("a", "nad", "1", "x.", (), published=(Published("loss", 0.5, 0.1),)).printed("loss")
            0.5
        """
        return next(each.value for each in self.published if each.number == number)

    @property
    def set_at(self) -> datetime | None:
        """When the rule was written, where that is known."""
        moment = self.rule_set
        if isinstance(moment, datetime):
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return None


def selects(where: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether options have the wanted values; where an option has several, the wanted one must be among them."""
    for key, want in where.items():
        have = options.get(key)
        inside = isinstance(have, list | tuple) and want in have
        if not inside and (list(have) if isinstance(have, tuple) else have) != want:
            return False
    return True


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
        found |= {key: Document(key, **{**row, "main": tuple(row.get("main", ()))}) for key, row in _read(file).items()}
    return found


@functools.cache
def symbols() -> dict[str, dict[str, str]]:
    """What the symbols on the pages of studies mean, by the folder of the study."""
    found: dict[str, dict[str, str]] = {}
    for file in _homes("symbols.toml"):
        for folder, table in _read(file).items():
            found.setdefault(folder, {}).update(table)
    return found


@functools.cache
def experiments() -> dict[str, Experiment]:
    """The published setting of every study that has one in a catalogue."""
    rows = [(file, row) for file in _homes("claims.toml") for row in _read(file).get("experiment", ())]
    found: dict[str, Experiment] = {}
    for file, row in rows:
        try:
            made = Experiment(**{**row, **{key: tuple(row.get(key, ())) for key in ("all", "silent")}})
        except TypeError as error:
            raise CorruptError(f"{file}: not an experiment: {error}") from error
        if made.study in found:
            raise CorruptError(f"{file}: two experiments for {made.study}")
        found[made.study] = made
    return found


def experiment_of(study: str) -> Experiment | None:
    """The published setting of a study; None where no catalogue has one."""
    return experiments().get(study)


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


def claims_of(study: str) -> tuple[Claim, ...]:
    """The claims that name a study, the one it is about first."""
    return tuple(claim for claim in claims() if study in claim.studies)


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
    published = tuple(Published(**each) for each in row.get("published", ()))
    lists = {key: tuple(row.get(key, ())) for key in ("studies", "networks")}
    return Claim(**{**row, **lists, **conditions, "published": published})
