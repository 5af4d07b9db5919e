"""Rules: what a claim says of the numbers of a run, as data.

A rule is a list of conditions that must all hold; a gate is a list of conditions without which the run tests nothing
(the networks learned, the control succeeded). Each condition names a number of the run, or a pattern that stands for
several. A number must lie where the claim puts it by two standard errors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from biascope.studies.estimates import above, below
from biascope.studies.result import Estimate, Verdict
from biascope.support.errors import InputError


@dataclass(frozen=True)
class Condition:
    """One number of a run, and where a claim puts it; a bar is a value, or the name of another number of the run.

    `above` and `below`: surely so, else it fails. `at` with `within`: it holds if the number is surely no farther than
    that from the bar, and fails if it surely is; with `strict` it fails wherever it does not hold, unless the error
    alone is as wide as `within`, which leaves it open. `not_below` and `not_above` with `within`: it may lie that far
    beyond the bar; without, it only must not surely lie beyond. Sure is by two standard errors, or as many as `errors`.

    `number` may be a pattern such as "accuracy, *": all that match it (and not `but`) must satisfy the condition, or
    `least` of them. A run without such numbers does not test the claim, unless the condition is `optional` (on networks
    that a run can leave out). With `exact`, values are compared without errors, for numbers that have none.
    """

    number: str
    above: float | str | None = None
    below: float | str | None = None
    at: float | str | None = None
    not_below: float | str | None = None
    not_above: float | str | None = None
    within: float = 0.0
    least: int | None = None
    exact: bool = False
    strict: bool = False
    errors: float = 2.0
    but: str = ""
    optional: bool = False

    def __post_init__(self) -> None:
        if len([bar for bar in self._bars if bar is not None]) != 1:
            raise InputError(f"a condition on {self.number!r} needs one of above, below, at, not_below, not_above")
        plain = self.above is not None or self.below is not None
        if (self.at is not None and self.within <= 0) or (plain and self.within > 0):
            raise InputError(f"a condition on {self.number!r}: at needs within > 0; above and below have none")

    @property
    def _bars(self) -> tuple[float | str | None, ...]:
        return self.above, self.below, self.at, self.not_below, self.not_above

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbers, or patterns of numbers, that it uses."""
        return (self.number, *(bar for bar in self._bars if isinstance(bar, str)))

    def missing(self, numbers: Mapping[str, Estimate]) -> list[str]:
        """What it needs and a run does not have."""
        if self.optional and not self.matches(numbers):
            return []
        return [name for name in self.needs if not _matches(name, numbers)]

    def matches(self, numbers: Mapping[str, Estimate]) -> list[str]:
        """The numbers of a run that it is about."""
        return [name for name in _matches(self.number, numbers) if not (self.but and fnmatchcase(name, self.but))]

    def holds(self, numbers: Mapping[str, Estimate]) -> bool | None:
        """Whether it holds by two standard errors (two numbers are taken as independent); None: it is left open."""
        found = [self._one(numbers[name], numbers) for name in self.matches(numbers)]
        if self.least is not None:
            return True if found.count(True) >= self.least else None if None in found else False
        return False if False in found else None if None in found else True

    def _one(self, number: Estimate, numbers: Mapping[str, Estimate]) -> bool | None:
        bar = next(bar for bar in self._bars if bar is not None)
        other = numbers[bar] if isinstance(bar, str) else Estimate(float(bar), 0.0)
        if self.exact:
            number, other = Estimate(number.value, 0.0), Estimate(other.value, 0.0)
        if number.standard_error is None or other.standard_error is None:
            return None
        error = math.hypot(number.standard_error, other.standard_error) * self.errors / 2
        apart, room = Estimate(number.value - other.value, error), self.within
        if self.above is not None:
            return above(apart)
        if self.below is not None:
            return below(apart)
        low, high = self.not_above is None, self.not_below is None  # sides on which it is bounded
        if (low and below(apart, -room)) or (high and above(apart, room)):
            return False
        if room == 0 or ((not low or above(apart, -room)) and (not high or below(apart, room))):
            return True
        return False if self.strict and 2 * error < room else None

    def describe(self, numbers: Mapping[str, Estimate]) -> str:
        """What was measured, what is asked, and whether it is so.

        Example:
            >>> Condition("loss", below=1.0).describe({"loss": Estimate(2.0, 0.1)})
            'loss: 2.00 ± 0.10, asked below 1: no'
        """
        far = f"no more than {self.within:g}" if self.within else "not surely"
        ways = ("above", "below", f"within {self.within:g} of", f"{far} below", f"{far} above")
        way, bar = next((way, bar) for way, bar in zip(ways, self._bars) if bar is not None)
        asked = f"{bar}: {numbers[bar]}" if isinstance(bar, str) else f"{bar:g}"
        names = self.matches(numbers)
        measured = ", ".join(f"{name}: {numbers[name]}" for name in names)
        count = "" if self.least is None else f" by at least {self.least} of {len(names)}"
        answer = {True: "yes", False: "no", None: "left open by the errors"}[self.holds(numbers)]
        return f"{measured}, asked {way} {asked}{count}: {answer}"


def _matches(name: str, numbers: Mapping[str, Estimate]) -> list[str]:
    return [name] if name in numbers else [each for each in numbers if fnmatchcase(each, name)]


def judge(
    rule: Sequence[Condition], numbers: Mapping[str, Estimate], gate: Sequence[Condition] = ()
) -> tuple[Verdict, str]:
    """The verdict on a claim, and what was measured: one condition that fails decides, one left open tests nothing.

    A gate that does not hold means that the run tests nothing, whatever the rule says.
    """
    missing = [name for condition in (*gate, *rule) for name in condition.missing(numbers)]
    if missing:
        raise InputError(f"the run has no number called {missing[0]!r}; it has {', '.join(numbers)}")
    rule, gate = ([each for each in part if each.matches(numbers)] for part in (rule, gate))  # without optional ones
    text = "; ".join(condition.describe(numbers) for condition in rule)
    closed = [condition.describe(numbers) for condition in gate if condition.holds(numbers) is not True]
    if closed:
        return "not tested", f"{text}. Nothing is tested, since {'; '.join(closed)}."
    found = [condition.holds(numbers) for condition in rule]
    verdict: Verdict = (
        "not confirmed" if False in found else "not tested" if None in found or not found else "confirmed"
    )
    return verdict, f"{text}."
