"""A run beside an earlier one of the same study: which numbers came out alike, in standard errors."""

import math
from dataclasses import dataclass

from biascope.studies.result import Estimate, StudyResult


@dataclass(frozen=True)
class Pair:
    """One number of two runs; `None` where a run does not have it."""

    name: str
    before: Estimate | None
    now: Estimate | None

    @property
    def apart(self) -> float | None:
        """The difference in standard errors of a difference; None where nothing is known of errors."""
        if self.before is None or self.now is None:
            return None
        difference = abs(self.now.value - self.before.value)
        if difference == 0:
            return 0.0
        errors = [e.standard_error for e in (self.before, self.now) if e.standard_error is not None]
        return difference / math.hypot(*errors) if len(errors) == 2 and any(errors) else None


def beside(before: StudyResult, now: StudyResult) -> tuple[Pair, ...]:
    """All numbers of both results, in the order of the later one.

    Runs of the same seed share their random numbers, so they should be far closer than their errors; runs of two
    seeds are a replication.
    """
    names = dict.fromkeys([*now.numbers, *before.numbers])
    return tuple(Pair(name, before.numbers.get(name), now.numbers.get(name)) for name in names)
