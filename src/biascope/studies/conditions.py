"""Rules: what a claim says of the numbers of a run, as data.

A rule is a list of conditions that must all hold; a gate is a list of conditions without which the run tests nothing
(the networks learned, the control succeeded). Each condition names a number of the run, or a pattern that stands for
several, and is answered by yes, no, or left open by the errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from biascope.studies.estimates import above, below, difference
from biascope.studies.result import Estimate
from biascope.support.errors import InputError


@dataclass(frozen=True)
class Condition:
    """One number of a run, and where a claim puts it; a bar is a value, or the name of another number of the run.

    `above` and `below`: yes if surely beyond the bar, no if surely on the other side of it. With `margin`, the smallest
    effect worth the name, no if the number is surely less than that beyond the bar. `at` with `within`: yes if surely
    no farther than that from the bar, no if surely farther. `not_below` and `not_above`: no if surely more than
    `within` beyond the bar; else yes, but open where `within` is given and the number might lie farther. Sure is by
    Student's t for the repeats behind an error, 97.7 % on one side: two standard errors of many; `errors` asks for more
    of them where many numbers are asked at once.

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
    margin: float = 0.0
    least: int | None = None
    exact: bool = False
    errors: float = 2.0
    but: str = ""
    optional: bool = False

    def __post_init__(self) -> None:
        if len([bar for bar in self._bars if bar is not None]) != 1:
            raise InputError(f"a condition on {self.number!r} needs one of above, below, at, not_below, not_above")
        plain = self.above is not None or self.below is not None
        if (self.at is not None and self.within <= 0) or (plain and self.within > 0) or (self.margin and not plain):
            raise InputError(
                f"a condition on {self.number!r}: at needs within > 0; above and below have no within but a margin"
            )

    @property
    def _bars(self) -> tuple[float | str | None, ...]:
        return self.above, self.below, self.at, self.not_below, self.not_above

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbers, or patterns of numbers, that it uses."""
        return (self.number, *(bar for bar in self._bars if isinstance(bar, str)))

    def of(self, network: str) -> "Condition":
        """The condition on one network: its name in place of `{net}`."""
        named = {
            key: value.replace("{net}", network)
            for key in ("number", "above", "below", "at", "not_below", "not_above", "but")
            if isinstance(value := getattr(self, key), str)
        }
        return replace(self, **named)  # type: ignore[arg-type]

    def missing(self, numbers: Mapping[str, Estimate]) -> list[str]:
        """What it needs and a run does not have."""
        if self.optional and not self.matches(numbers):
            return []
        return [name for name in self.needs if not _matches(name, numbers)]

    def matches(self, numbers: Mapping[str, Estimate]) -> list[str]:
        """The numbers of a run that it is about."""
        return [name for name in _matches(self.number, numbers) if not (self.but and fnmatchcase(name, self.but))]

    def holds(self, numbers: Mapping[str, Estimate]) -> bool | None:
        """Whether it surely holds (two numbers are taken as independent); None: it is left open."""
        found = [self._one(numbers[name], numbers) for name in self.matches(numbers)]
        if self.least is not None:
            if found.count(True) >= self.least:
                return True
            return None if found.count(False) <= len(found) - self.least else False
        return False if False in found else None if None in found else True

    def _one(self, number: Estimate, numbers: Mapping[str, Estimate]) -> bool | None:
        bar = next(bar for bar in self._bars if bar is not None)
        other = numbers[bar] if isinstance(bar, str) else Estimate(float(bar), 0.0)
        if self.exact:
            number, other = Estimate(number.value, 0.0), Estimate(other.value, 0.0)
        apart = difference(number, other)
        if apart.standard_error is None:
            return None
        apart = replace(apart, standard_error=apart.standard_error * self.errors / 2)
        if self.below is not None:  # the same as above, seen from the other side
            apart = replace(apart, value=-apart.value)
        room = self.within
        if self.above is not None or self.below is not None:
            if above(apart):
                return True
            beaten = self.exact and apart.value <= self.margin
            return False if beaten or below(apart, self.margin) else None
        low, high = self.not_above is None, self.not_below is None  # sides on which it is bounded
        if (low and below(apart, -room)) or (high and above(apart, room)):
            return False
        near = (not low or not_below(apart, -room)) and (
            not high or not_below(replace(apart, value=-apart.value), -room)
        )
        return True if room == 0 or near else None

    def describe(self, numbers: Mapping[str, Estimate]) -> str:
        """What was measured, what is asked, and whether it is so.

        Example:
            >>> Condition("loss", below=1.0).describe({"loss": Estimate(2.0, 0.1)})
            'loss: 2.00 ± 0.10, required below 1: no'
        """
        names = self.matches(numbers)
        measured = ", ".join(f"{name}: {numbers[name]}" for name in names)
        return f"{measured}, required {self._asked(numbers)}"

    def brief(self, numbers: Mapping[str, Estimate]) -> str:
        """Whether it is so, as a sentence without the numbers.

        Example:
            >>> Condition("loss", below=1.0).brief({"loss": Estimate(2.0, 0.1)})
            '“loss” is not below 1'
            >>> Condition("gain *", above=0.0).brief({"gain a": Estimate(2.0, 0.1), "gain b": Estimate(0.1, 0.1)})
            'whether each of 2 “gain *” is above 0 is left open by the errors'
        """
        names, holds = self.matches(numbers), self.holds(numbers)
        bar = next(bar for bar in self._bars if bar is not None)
        to = f"“{bar}”" if isinstance(bar, str) else f"{bar:g}"
        yes, no = self._words(to)
        who = f"“{names[0]}”" if len(names) == 1 else f"each of {len(names)} “{self.number}”"
        if self.least is not None:
            who = f"at least {self.least} of {len(names)} “{self.number}”"
        if holds is None:
            return f"whether {who} {yes} is left open by the errors"
        if not holds and len(names) > 1:
            return f"not {who} {yes}"
        return f"{who} {yes if holds else no}"

    def _words(self, bar: str) -> tuple[str, str]:
        """What is asked of a number, and the contrary."""
        if self.at is not None:
            return f"is within {self.within:g} of {bar}", f"is not within {self.within:g} of {bar}"
        for way, asked in (("above", self.above), ("below", self.below)):
            if asked is not None:
                return f"is {way} {bar}", f"is not {way} {bar}"
        way = "below" if self.not_below is not None else "above"
        if self.within:
            return f"is at most {self.within:g} {way} {bar}", f"is more than {self.within:g} {way} {bar}"
        return f"is not {way} {bar}", f"is {way} {bar}"

    def _asked(self, numbers: Mapping[str, Estimate]) -> str:
        far = f"no more than {self.within:g}" if self.within else "not surely"
        ways = ("above", "below", f"within {self.within:g} of", f"{far} below", f"{far} above")
        way, bar = next((way, bar) for way, bar in zip(ways, self._bars) if bar is not None)
        asked = f"{bar}: {numbers[bar]}" if isinstance(bar, str) else f"{bar:g}"
        count = "" if self.least is None else f" by at least {self.least} of {len(self.matches(numbers))}"
        answer = {True: "yes", False: "no", None: "left open by the errors"}[self.holds(numbers)]
        return f"{way} {asked}{count}: {answer}"


def not_below(estimate: Estimate, bar: float) -> bool:
    """Whether an estimate surely does not lie below a bar; on the bar counts, as exact numbers may lie there."""
    return above(estimate, bar) or (estimate.standard_error == 0.0 and estimate.value == bar)


def _matches(name: str, numbers: Mapping[str, Estimate]) -> list[str]:
    return [name] if name in numbers else [each for each in numbers if fnmatchcase(each, name)]


def all_hold(
    conditions: Sequence[Condition], numbers: Mapping[str, Estimate], brief: bool = False
) -> tuple[bool | None, str]:
    """Whether all conditions that find numbers hold (None: left open, or nothing is asked), and each in words."""
    missing = [name for condition in conditions for name in condition.missing(numbers)]
    if missing:
        raise InputError(f"the run has no number called {missing[0]!r}; it has {', '.join(numbers)}")
    asked = [each for each in conditions if each.matches(numbers)]  # without optional ones
    found = [condition.holds(numbers) for condition in asked]
    text = "; ".join(each.brief(numbers) if brief else each.describe(numbers) for each in asked)
    return (False if False in found else None if None in found or not found else True), text
