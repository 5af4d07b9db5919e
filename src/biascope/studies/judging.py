"""Two judgements of a claim by one run: whether its rule holds, and whether the published numbers come out again.

Only a run at the published size can contradict. A reduced run or a stand-in can support, and says at what size; a run
that did not learn, a diagnostic run, and errors that leave the rule open leave the claim undecided.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from biascope.studies.claims import Claim, Published, claims_of, experiment_of, selects
from biascope.studies.conditions import all_hold
from biascope.studies.estimates import sure
from biascope.studies.registry import studies
from biascope.studies.result import Estimate
from biascope.studies.runs import Run
from biascope.studies.scope import Level, Scope
from biascope.support.errors import InputError

Verdict = Literal["supported", "contradicted", "undecided"]
Replication = Literal["agree", "differ", "in part", "none published"]


@dataclass(frozen=True)
class Compared:
    """A published number beside ours."""

    published: Published
    ours: Estimate

    @property
    def room(self) -> float:
        """How far the two may lie apart: the tolerance, and what is sure of both errors."""
        errors = [(self.ours.standard_error or 0.0) * sure(self.ours.n), 2.0 * (self.published.error or 0.0)]
        return self.published.tolerance + math.hypot(*errors)

    @property
    def agree(self) -> bool:
        """Whether they are no farther apart than that."""
        return abs(self.ours.value - self.published.value) <= self.room


@dataclass(frozen=True)
class Part:
    """What a rule gives for one network of a run (or for the whole run, with the name "")."""

    network: str
    holds: bool | None  # the rule; None: left open by the errors
    gate: bool | None  # what has to hold for anything to be tested; None: left open
    text: str  # what was measured and asked
    brief: str = ""  # whether it is so, without numbers
    missed: str = ""  # what of the gate does not hold, or may not


@dataclass(frozen=True)
class Judgement:
    """A claim judged by one run."""

    claim: Claim
    run: Run = field(repr=False)
    scope: Scope
    parts: tuple[Part, ...]
    compared: tuple[Compared, ...] = ()
    numbers: Mapping[str, Estimate] = field(default_factory=dict, repr=False)  # of the run

    def verdict_of(self, part: Part) -> Verdict:
        """What the run says of the claim for one network."""
        if part.holds is None or part.gate is not True or self.level == "not counted":
            return "undecided"
        if part.holds:
            return "supported"
        return "contradicted" if self.level == "published size" and not self.scope.silent else "undecided"

    @property
    def fails_as_far_as_printed(self) -> bool:
        """Whether the rule fails in a run that has all that the document gives of its setting, which is not all."""
        failed = any(part.holds is False and part.gate is True for part in self.parts)
        return failed and self.level == "published size" and bool(self.scope.silent)

    @property
    def level(self) -> Level:
        """What a run of this scope can say."""
        return self.scope.level

    @property
    def verdict(self) -> Verdict:
        """Contradicted if any of its networks contradicts it, else supported if any supports it."""
        found = {self.verdict_of(part) for part in self.parts}
        return "contradicted" if "contradicted" in found else "supported" if "supported" in found else "undecided"

    @property
    def replication(self) -> Replication:
        """Whether the published numbers came out."""
        if not self.compared:
            return "none published"
        found = {each.agree for each in self.compared}
        return "in part" if len(found) > 1 else "agree" if found == {True} else "differ"

    @property
    def at_odds(self) -> bool:
        """Whether the numbers agree with the document although the rule fails: then the rule deserves a second look."""
        failed = any(part.holds is False and part.gate is True for part in self.parts)
        return failed and self.replication == "agree"

    @property
    def rule_before_run(self) -> bool | None:
        """Whether the rule was written before the run began; None where nobody knows."""
        if self.claim.set_at is None:
            return {"before": True, "after": False}.get(str(self.claim.rule_set))
        try:
            began = datetime.fromisoformat(str(self.run.environment.get("started")))
        except ValueError:
            return None
        return self.claim.set_at < (began if began.tzinfo else began.replace(tzinfo=UTC))

    @property
    def reason(self) -> str:
        """What the verdict rests on, with the numbers."""
        return self.explain()

    def explain(self, brief: bool = False, only: str | None = None) -> str:
        """What the verdict rests on: with the numbers or without, of all networks or of one only."""
        lines = []
        for part in self.parts:
            if only is not None and part.network != only:
                continue
            verdict = self.verdict_of(part)
            name = f"{part.network}: " if part.network and len(self.parts) > 1 else ""
            why = ""
            if self.level == "not counted":
                why = f" Not counted: {self.scope.diagnostic}."
            elif part.gate is not True:
                first = "does not" if part.gate is False else "may not"
                why = f" What has to hold first {first}: {part.missed}." if part.missed else f" The gate {first} hold."
            elif part.holds is False and self.level == "published size" and self.scope.silent:
                why = f" The rule fails, in a setting that is partly ours: {self.scope.silent} are not printed."
            elif part.holds is False and verdict == "undecided":
                why = f" The rule fails, but not at the published size ({self.scope}): that contradicts nothing."
            lines.append(f"{name}{part.brief if brief else part.text}.{why}")
        return " ".join(lines)

    def __str__(self) -> str:
        level = "" if self.level == "published size" else f", {self.level}"
        return f"{self.claim.id}: {self.verdict}{level} ({self.scope}). {self.reason}"


def judge_claim(claim: Claim, run: Run, numbers: Mapping[str, Estimate]) -> Judgement:
    """A claim judged by the numbers of a run that tests it (`Claim.tested_by`)."""
    study, options = str(run.config.get("study")), options_of_run(run)
    published = experiment_of(study)
    scope = Scope(known=False)
    if published:
        scope = published.scope(options, narrowed(claim, published.parts, published.networks))
    if claim.stand_in and not scope.stand_in:
        scope = replace(scope, stand_in=claim.stand_in)
    names = claim.networks_of(study, options) if claim.per_network else ("",)
    asked = {name: found for name in names if (found := claim.conditions(name, numbers)) is not None}
    if not asked:
        raise InputError(f"{run.path} has not the numbers that {claim.id!r} needs; it has {', '.join(numbers)}")
    parts = tuple(_part(name, *both, numbers) for name, both in asked.items())
    compared = tuple(
        Compared(each, numbers[each.number])
        for each in claim.published
        if each.number in numbers and selects(each.where, options)
    )
    return Judgement(claim, run, scope, parts, compared, numbers)


def options_of_run(run: Run) -> dict[str, Any]:
    """The options of a run; those that its study has got since then have the default, which is what it used to do."""
    known = studies().get(str(run.config.get("study")))
    defaults = {option.name: option.default for option in known.options} if known else {}
    return {**defaults, **run.config.get("options", {})}


def judgements(run: Run, numbers: Mapping[str, Estimate]) -> tuple[Judgement, ...]:
    """Every claim that a run tests, judged; the claim that its study is about first.

    Example:
        >>> import tempfile
        >>> from biascope.studies import configure, execute
        >>> run = Run.create(tempfile.mkdtemp() + "/r", configure("nad/fig4a"))
        >>> judgements(run, execute(run).numbers)[0].verdict
        'supported'
    """
    study, options = str(run.config.get("study")), options_of_run(run)
    found = [claim for claim in claims_of(study) if claim.rule and claim.tested_by(study, options, numbers)]
    return tuple(judge_claim(claim, run, numbers) for claim in found)


def _part(name: str, rule: Any, gate: Any, numbers: Mapping[str, Estimate]) -> Part:
    holds, text = all_hold(rule, numbers)
    learned, asked = all_hold(gate, numbers) if any(each.matches(numbers) for each in gate) else (True, "")
    brief = all_hold(rule, numbers, brief=True)[1]
    short = [each for each in gate if each.matches(numbers) and each.holds(numbers) is not True]
    missed = "; ".join(each.brief(numbers) for each in short)
    return Part(name, holds, learned, text if learned is True else f"{text}; gate: {asked}", brief, missed)


def narrowed(claim: Claim, parts: Mapping[str, Any], networks: str) -> dict[str, Any]:
    """The document's lists, as far as the claim speaks of them."""
    mine = {key: value if isinstance(value, list | tuple) else [value] for key, value in claim.where.items()}
    found = {key: mine[key] for key in parts if key in mine}
    return {**found, **({networks: list(claim.networks)} if networks and claim.networks else {})}
