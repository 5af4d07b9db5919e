"""The ledger: one row per claim, joined with every finished run that tests it, never typed by hand.

A row gives two judgements: whether the claim is supported, contradicted or undecided, and whether the published numbers
came out again. For each network the run that is largest in the document's own terms decides (`Scope.share`); a run of
the published size goes before all others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from biascope.reports.html import join, tag
from biascope.reports.study_page import finished
from biascope.studies import Run, studies
from biascope.studies.claims import Claim, claims, documents, experiment_of
from biascope.studies.judging import (
    Compared,
    Judgement,
    Part,
    Replication,
    Verdict,
    judge_claim,
    narrowed,
    options_of_run,
)
from biascope.studies.result import Estimate
from biascope.studies.runs import MARKER
from biascope.studies.scope import Scope, Share
from biascope.support.errors import BiascopeError, InputError
from biascope.support.signatures import checked

LEVELS = ("published size", "reduced size", "stand-in", "not counted")
VERDICTS = ("supported", "contradicted", "undecided")
REPLICATIONS = ("agree", "differ", "in part", "not measured", "none published")


@dataclass(frozen=True)
class Decided:
    """What is known of a claim for one network (or a set that was run together): the verdict and what it rests on."""

    network: str
    verdict: Verdict
    judgement: Judgement
    part: Part


@dataclass(frozen=True)
class Row:
    """A claim, what is decided for each network, and every judgement behind it, the largest run first."""

    claim: Claim
    decided: tuple[Decided, ...] = ()
    judgements: tuple[Judgement, ...] = field(default=(), repr=False)
    lacking: str = ""  # what kept runs of its studies do not have

    @property
    def verdict(self) -> Verdict:
        """Contradicted if it is for any network that it speaks of, else supported if it is for any."""
        found = {each.verdict for each in self.decided}
        return "contradicted" if "contradicted" in found else "supported" if "supported" in found else "undecided"

    @property
    def deciding(self) -> tuple[Decided, ...]:
        """What the verdict rests on."""
        return tuple(each for each in self.decided if each.verdict == self.verdict)

    @property
    def level(self) -> str:
        """The best size at which the verdict was reached; "" where there is no run."""
        found = [each.judgement.level for each in self.deciding] or [each.level for each in self.judgements]
        return min(found, key=LEVELS.index, default="")

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """What was run of the published setting by the runs that decide; their networks are counted together."""
        found: dict[str, Scope] = {}
        for each in self.deciding:
            scope = each.judgement.scope
            if share := self._networks(each):
                scope = replace(scope, parts={**scope.parts, share[0]: share[1]})
            found.setdefault(str(scope), scope)
        return tuple(found.values())

    def _networks(self, one: Decided) -> tuple[str, Share] | None:
        """The option that holds networks, and how many of those that the claim speaks of the verdict is about."""
        published = experiment_of(str(one.judgement.run.config.get("study")))
        if published is None or published.networks not in one.judgement.scope.parts:
            return None
        key = published.networks
        wanted = narrowed(self.claim, published.parts, key).get(key) or published.parts.get(key, ())
        names = {name for other in self.deciding for name in other.network.split(", ")} & set(wanted)
        return key, Share(len(names), len(wanted), len(names) / max(len(wanted), 1))

    @property
    def partly(self) -> str:
        """For how many of its networks the claim is decided, where not for all: "2 of 4 networks"."""
        shares = [share for each in self.deciding if (share := self._networks(each))]
        few = [share for _, share in shares if share.share < 1]
        return f"{few[0].have:g} of {few[0].want:g} networks" if few and self.verdict != "undecided" else ""

    @property
    def scope(self) -> str:
        """`scopes` in words."""
        return "; ".join(str(scope) for scope in self.scopes[:3])

    @property
    def compared(self) -> tuple[Compared, ...]:
        """Every published number beside ours, each from the largest run that has it."""
        found: dict[str, Compared] = {}
        for judgement in self.judgements:
            for each in judgement.compared if judgement.level != "not counted" else ():
                found.setdefault(each.published.number, each)
        return tuple(found.values())

    @property
    def replication(self) -> Replication | Literal["not measured"]:
        """Whether the published numbers came out."""
        found = {each.agree for each in self.compared}
        if not found:
            return "not measured" if self.claim.published else "none published"
        return "in part" if len(found) > 1 else "agree" if found == {True} else "differ"

    @property
    def at_odds(self) -> bool:
        """Whether a run's numbers agree with the document although the rule fails."""
        return any(judgement.at_odds for judgement in self.judgements)

    @property
    def fails_as_far_as_printed(self) -> bool:
        """Whether the rule fails with everything that the document gives of its setting, which is not all."""
        return self.verdict == "undecided" and any(each.judgement.fails_as_far_as_printed for each in self.decided)

    @property
    def stand_in(self) -> str:
        """What the deciding run was made on instead of the document's data or networks."""
        return next((each.judgement.scope.stand_in for each in self.deciding), "")

    @property
    def provenance(self) -> str:
        """What is wrong with the commits of the runs that decide; "" if nothing is."""
        commits = [provenance(each.judgement.run.environment) for each in self.deciding]
        return next((each for each in commits if " " in each), "")

    @property
    def rule_set(self) -> str:
        """Whether the rule was written before or after the run that decides began."""
        found = {each.judgement.rule_before_run for each in self.deciding}
        words: Mapping[bool | None, str] = {True: "before the run", False: "after the run", None: "at an unknown time"}
        return " and ".join(words[each] for each in (True, False, None) if each in found)

    @property
    def sentence(self) -> str:
        """Why the verdict is what it is."""
        if not self.judgements:
            return self.lacking or _why(self.claim)
        if self.verdict == "undecided":
            return self.judgements[0].explain(brief=True)
        kinds = [(verdict, [each.network for each in self.decided if each.verdict == verdict]) for verdict in VERDICTS]
        texts = [f"{verdict} for {', '.join(map(str, names))}" for verdict, names in kinds if names]
        mixed = f"{'; '.join(texts)}. " if len(self.decided) > 1 else ""
        first = self.deciding[0]
        return mixed + first.judgement.explain(brief=True, only=first.part.network)

    @property
    def measured(self) -> tuple[tuple[str, Estimate], ...]:
        """The numbers that the rule looks at, from the run that decides."""
        if not self.judgements:
            return ()
        judgement = self.deciding[0].judgement if self.deciding else self.judgements[0]
        numbers = judgement.numbers
        rules = [each.of(part.network) for part in judgement.parts for each in self.claim.rule]
        return tuple(
            (name, numbers[name]) for name in dict.fromkeys(n for rule in rules for n in rule.matches(numbers))
        )

    def to_json(self) -> dict[str, Any]:
        """What `ledger.json` holds of it."""
        return {
            "id": self.claim.id,
            "document": self.claim.paper,
            "figure": self.claim.figure,
            "place": self.claim.place,
            "statement": self.claim.statement,
            "quote": self.claim.quote,
            "claim": self.verdict,
            "level": self.level,
            "part_of_networks": self.partly,
            "networks": {each.network: each.verdict for each in self.decided if each.network},
            "replication": self.replication,
            "numbers_agree_but_rule_fails": self.at_odds,
            "fails_as_far_as_printed": self.fails_as_far_as_printed,
            "published": {each.number: each.value for each in self.claim.published},
            "published_error": {each.number: each.error for each in self.claim.published if each.error is not None},
            "ours": {each.published.number: each.ours.value for each in self.compared},
            "measured": {name: estimate.value for name, estimate in self.measured},
            "error": {name: estimate.standard_error for name, estimate in self.measured},
            "no_error": {name: why for name, estimate in self.measured if (why := without_error(estimate))},
            "repeats": {name: estimate.n for name, estimate in self.measured},
            "scope": self.scope,
            "stand_in": self.stand_in,
            "rule_set": self.rule_set,
            "provenance": self.provenance,
            "why": self.sentence,
            "runs": [
                {
                    "name": each.run.path.name,
                    "study": each.run.config.get("study"),
                    "level": each.level,
                    "scope": str(each.scope),
                    "claim": each.verdict,
                    "networks": {part.network: each.verdict_of(part) for part in each.parts if part.network},
                    "rule_holds": [part.holds for part in each.parts],
                    "gate_holds": [part.gate for part in each.parts],
                    "rule_before_run": each.rule_before_run,
                    "provenance": provenance(each.run.environment),
                }
                for each in self.judgements
            ],
        }


class Ledger(tuple[Row, ...]):
    """The rows of a ledger: a tuple that notebooks show as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """How many claims of each paper hold, for notebooks."""
        papers = [(each.title, [row for row in self if row.claim.paper == key]) for key, each in documents().items()]
        counts = [tag("tr", tag("td", title), tag("td", summary(mine))) for title, mine in papers if mine]
        return tag("div", tag("p", summary(self)), tag("table", join(counts)))


@checked
def ledger(folder: str | Path = "reproductions") -> Ledger:
    """The rows of all claims, from the run folders in `folder`; files, and folders named .NAME or __NAME, are left out.

    Example:
        >>> ledger("a-folder-that-does-not-exist")[0].verdict
        'undecided'
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: the ledger reads a folder of run folders, e.g. reproductions")
    if (folder / MARKER).exists():
        raise InputError(f"{folder} is one run: the ledger reads the folder above, {folder.resolve().parent}")
    runs: dict[str, list[_Finished]] = {}
    for path in run_folders(folder):
        found = _finished(path)
        runs.setdefault(found.study, []).append(found)
    rows = []
    for claim in claims():
        of_claim = [run for study in claim.studies for run in runs.get(study, ())]
        mine = [
            judge_claim(claim, each.run, each.numbers)
            for each in of_claim
            if claim.rule and claim.tested_by(each.study, each.options, each.numbers)
        ]
        mine.sort(key=_rank)
        lacking = "" if mine or claim.why else _lacking(claim, of_claim)
        rows.append(Row(claim, _decided(mine), tuple(mine), lacking))
    return Ledger(rows)


def _rank(judgement: Judgement) -> tuple[int, float, bool, str]:
    """The largest run first; of equals one of committed code."""
    unclear = " " in provenance(judgement.run.environment)
    return LEVELS.index(judgement.level), -judgement.scope.share, unclear, judgement.run.path.name


def run_folders(folder: Path) -> list[Path]:
    """The run folders in a folder, without what editors and Python leave there, and the queue of those to come."""
    here = folder.glob("*/") if folder.is_dir() else []
    return sorted(path for path in here if not path.name.startswith((".", "__")) and path.name != "queue")


@dataclass(frozen=True)
class _Finished:
    study: str
    run: Run
    options: Mapping[str, Any]
    numbers: Mapping[str, Estimate]


def _finished(path: Path) -> _Finished:
    try:
        run, result, raw = finished(path)
    except BiascopeError as error:
        raise InputError(f"the ledger cannot read {path}: {error}") from error
    name = str(raw.get("study"))
    if name not in studies():
        raise InputError(f"{path} is a run of {name!r}, which is not a study of this version")
    return _Finished(name, run, options_of_run(run), result.numbers)


def _decided(judgements: Sequence[Judgement]) -> tuple[Decided, ...]:
    """For each network what the largest run that leaves nothing open says; judgements come largest first."""
    found: dict[str, list[Decided]] = {}
    for judgement in judgements:
        for part in judgement.parts:
            name = part.network or ", ".join(_networks(judgement))
            found.setdefault(name, []).append(Decided(name, judgement.verdict_of(part), judgement, part))
    return tuple(_largest(each) for each in found.values())


def _largest(known: Sequence[Decided]) -> Decided:
    """The first that is not left open; of runs of the same scope one that contradicts goes first."""
    counted = [each for each in known if each.judgement.level != "not counted"]
    settled = [each for each in counted if each.part.holds is not None and each.part.gate]
    if not settled:
        return known[0]
    sizes = [(each.judgement.level, each.judgement.scope.share) for each in settled]
    alike = [each for each, size in zip(settled, sizes) if size == sizes[0]]
    found = min(alike, key=lambda each: ("contradicted", "undecided", "supported").index(each.verdict))
    return known[0] if found.verdict == "undecided" else found  # undecided anyway: shown is the largest run


def _networks(judgement: Judgement) -> tuple[str, ...]:
    return judgement.claim.networks_of(str(judgement.run.config.get("study")), options_of_run(judgement.run))


def _lacking(claim: Claim, runs: Sequence[_Finished]) -> str:
    """Why finished runs of its studies do not test a claim: numbers that newer runs store."""
    for each in runs:
        if not claim.selects(each.options):
            continue
        names = claim.networks_of(each.study, each.options) if claim.per_network else ("",)
        asked = [condition.of(name) for name in names for condition in (*claim.rule, *claim.gate)]
        absent = [name for condition in asked for name in condition.missing(each.numbers)]
        if absent:
            return f"{each.run.path.name} has no number {absent[0]!r}, which is asked for. {_why(claim)}"
    return ""


def _why(claim: Claim) -> str:
    if claim.why:
        return claim.why
    here = [name for name in claim.studies if name in studies()]
    how = "".join(f" --set {key}={value}" for key, value in claim.where.items())
    return f"No run kept yet: biascope run {here[0]} --size paper{how}" if here else "No study yet."


def without_error(estimate: Estimate) -> str:
    """Why a number has no error; "" if it has one.

    Example:
        >>> without_error(Estimate(0.5, 0.0)), without_error(Estimate(0.5, 0.0, 3)), without_error(Estimate(0.5, 0.1))
        ('exact', 'the same in all 3', '')
    """
    if estimate.standard_error is None:
        return "one run: no error" if estimate.n == 1 else "a single value: no error"
    if estimate.standard_error > 0:
        return ""
    return "exact" if estimate.n is None else f"the same in all {estimate.n}"


def provenance(environment: Mapping[str, Any]) -> str:
    """The commit that made a run, or what is wrong with it."""
    git = environment.get("git")
    if not isinstance(git, Mapping) or not git.get("commit"):
        return "an unknown commit"
    return f"{str(git['commit'])[:10]}{' with uncommitted changes' if git.get('dirty') else ''}"


@checked
def summary(rows: Sequence[Row]) -> str:
    """How many claims there are, and how many have which verdict, at which size."""
    count = Counter((row.verdict, row.level) for row in rows)
    whole = Counter(row.verdict for row in rows)
    sizes = ", ".join(f"{count['supported', level]} {_at(level)}" for level in LEVELS if count["supported", level])
    parts = sum(row.verdict == "supported" and bool(row.partly) for row in rows)
    sizes += f"; {parts} of these for some of their networks" if parts else ""
    supported = f"{whole['supported']} supported" + (f" ({sizes})" if sizes else "")
    impossible = sum(bool(row.claim.why) and row.verdict == "undecided" for row in rows)
    rest = f" ({impossible} cannot be tested here)" if impossible else ""
    return (
        f"{len(rows)} claims: {supported}, {whole['contradicted']} contradicted, {whole['undecided']} undecided{rest}."
    )


def _at(level: str) -> str:
    return f"on a {level}" if level == "stand-in" else f"at {'the ' if level == 'published size' else ''}{level}"
