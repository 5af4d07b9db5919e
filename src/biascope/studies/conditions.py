"""What a claim says of the numbers of a run, for claims that the run's own verdict does not judge.

A study judges its main claim by a rule of its own, set before it was run. What the document says beside it is held
against the same run here: every number must lie where the claim puts it, by two standard errors. Where the errors leave
it open, nothing is tested: noise confirms nothing. These conditions were written when the kept runs were known, and the
ledger says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from biascope.errors import InputError
from biascope.studies.estimates import above, below, difference
from biascope.studies.result import Estimate, Verdict


@dataclass(frozen=True)
class Condition:
    """One number of a run, and where a claim puts it; a bar is a value, or the name of another number of the run.

    `above` and `below`: surely so, else it fails. `at` with `within`: it holds if the number is surely no farther than
    that from the bar, and fails if it surely is. `not_below` with `within`: it may lie that far below.

    Example:
        >>> Condition("accuracy", above=0.5).holds({"accuracy": Estimate(0.9, 0.1)})
        True
        >>> print(Condition("a", at="b", within=0.1).holds({"a": Estimate(1.0, 0.3), "b": Estimate(1.0, 0.1)}))
        None
    """

    number: str
    above: float | str | None = None
    below: float | str | None = None
    at: float | str | None = None
    not_below: float | str | None = None
    within: float = 0.0

    def __post_init__(self) -> None:
        if len([bar for bar in self._bars if bar is not None]) != 1:
            raise InputError(f"a condition on {self.number!r} needs one of above, below, at, not_below")
        if (self.at is not None or self.not_below is not None) != (self.within > 0):
            raise InputError(f"a condition on {self.number!r}: at and not_below need within > 0, and they alone")

    @property
    def _bars(self) -> tuple[float | str | None, ...]:
        return self.above, self.below, self.at, self.not_below

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbers of the run that it looks at."""
        return (self.number, *(bar for bar in self._bars if isinstance(bar, str)))

    def holds(self, numbers: Mapping[str, Estimate]) -> bool | None:
        """Whether it holds by two standard errors (two numbers are taken as independent); None: it is left open."""
        if any(numbers[name].standard_error is None for name in self.needs):
            return None
        bar = next(bar for bar in self._bars if bar is not None)
        other = numbers[bar] if isinstance(bar, str) else Estimate(float(bar), 0.0)
        apart, room = difference(numbers[self.number], other), self.within
        if self.above is not None:
            return above(apart)
        if self.below is not None:
            return below(apart)
        if below(apart, -room) or (self.at is not None and above(apart, room)):
            return False
        sure = above(apart, -room) and (self.at is None or below(apart, room))
        return True if sure else None

    def told(self, numbers: Mapping[str, Estimate]) -> str:
        """What was measured, what is asked, and whether it is so.

        Example:
            >>> Condition("loss", below=1.0).told({"loss": Estimate(2.0, 0.1)})
            'loss: 2.00 ± 0.10, asked below 1: not so'
        """
        ways = ("above", "below", f"within {self.within:g} of", f"no more than {self.within:g} below")
        way, bar = next((way, bar) for way, bar in zip(ways, self._bars) if bar is not None)
        asked = f"{bar}: {numbers[bar]}" if isinstance(bar, str) else f"{bar:g}"
        so = {True: "so", False: "not so", None: "left open by the errors"}[self.holds(numbers)]
        if any(numbers[name].standard_error is None for name in self.needs):
            so = "left open, there is no error"
        return f"{self.number}: {numbers[self.number]}, asked {way} {asked}: {so}"


def judge(conditions: Sequence[Condition], numbers: Mapping[str, Estimate]) -> tuple[Verdict, str]:
    """The verdict on a claim, and what was measured: one condition that fails decides, one left open tests nothing.

    Example:
        >>> judge([Condition("a", above=0)], {"a": Estimate(1.0, 0.1, 5)})[0]
        'confirmed'
    """
    missing = [name for condition in conditions for name in condition.needs if name not in numbers]
    if missing:
        raise InputError(f"the run has no number called {missing[0]!r}; it has {', '.join(numbers)}")
    found = [condition.holds(numbers) for condition in conditions]
    verdict: Verdict = "not confirmed" if False in found else "not tested" if None in found else "confirmed"
    told = "; ".join(condition.told(numbers) for condition in conditions)
    return verdict, f"{told}. (By two standard errors; asked when the run was known.)"
