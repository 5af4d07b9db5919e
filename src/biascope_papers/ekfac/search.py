"""A search that brackets: a walk on the lattice of two hyper-parameters until its best point is surrounded.

Try the start, then its four straight neighbours; where none is better, the four diagonal ones too, and the two along
which learning rate and damping grow alike (with much damping only their ratio matters: a valley that is neither
straight nor diagonal here). Go to the best point tried so far and try its neighbours, until all ten are no better, or
the trials are spent. No point is tried twice; of equal points the earlier counts. From a start that diverges, the walk
first goes down the learning rate until something is finite.

Surrounded means a minimum of the neighbourhood, not of all. (Changed after the first walks: without the last two
neighbours KFAC with constant damping could not follow its valley.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from biascope import InputError

Point = tuple[int, int]  # rung of the learning rate, rung of the other hyper-parameter
STRAIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
DIAGONAL = (1, 1), (-1, -1), (-1, 1), (1, -1)
VALLEY = (2, 1), (-2, -1)  # a decade of each


@dataclass(frozen=True)
class Ladder:
    """Values of a hyper-parameter by a whole number: these times all powers of ten, or (`ends`) these alone."""

    values: tuple[float, ...]
    ends: bool = False

    def __call__(self, i: int) -> float:
        """The value at rung i."""
        decade, digit = (0, i) if self.ends else divmod(i, len(self.values))
        return float(f"{self.values[digit]:g}e{decade}")  # as one would write it: 3e-2 is 0.03 exactly

    def has(self, i: int) -> bool:
        """Is there a rung i?"""
        return not self.ends or 0 <= i < len(self.values)

    def index(self, value: float) -> int:
        """The rung of a value."""
        if self.ends and value in self.values:
            return self.values.index(value)
        if not self.ends and value > 0:
            i = round(len(self.values) * math.log10(value))
            if self(i) == value:
                return i
        raise InputError(f"{value:g} is not on the ladder {self.values}{'' if self.ends else ' times powers of ten'}")


HALF_DECADES = Ladder((1.0, 3.0))
DECADES = Ladder((1.0,))
MOMENTA = Ladder((0.0, 0.5, 0.8, 0.9, 0.95, 0.99), ends=True)


@dataclass(frozen=True)
class Walk:
    """Where a walk ended. `surrounded`: all neighbours of the best point were tried and are no better.

    order: all points tried with a finite loss, the best first.
    """

    best: Point
    loss: float
    spent: int
    surrounded: bool
    order: tuple[Point, ...] = field(default=(), repr=False)


def walk(
    loss: Callable[[Point], float], start: Point, trials: int, exists: Callable[[Point], bool] = lambda point: True
) -> Walk:
    """Walk from `start` with at most `trials` values of `loss`; neighbours that do not exist need not be tried."""
    if trials < 1:
        raise InputError(f"trials={trials}: at least one is needed")
    tried = {start: loss(start)}

    def lowest() -> Point:
        return min(tried, key=lambda point: tried[point])  # the earlier one of two that are equal

    def try_around(centre: Point, steps: tuple[Point, ...]) -> bool:
        """Try these neighbours; False if the trials do not suffice."""
        for point in ((centre[0] + i, centre[1] + j) for i, j in steps):
            if point not in tried and exists(point):
                if len(tried) == trials:
                    return False
                tried[point] = loss(point)
        return True

    enough, down = True, STRAIGHT[:1]
    while enough and math.isinf(tried[lowest()]):
        last = list(tried)[-1]
        enough = exists((last[0] - 1, last[1])) and try_around(last, down)
    centre = lowest()
    while enough:
        enough = try_around(centre, STRAIGHT) and (lowest() != centre or try_around(centre, DIAGONAL + VALLEY))
        if lowest() == centre:
            break
        centre = lowest()
    finite = [point for point in tried if math.isfinite(tried[point])]
    return Walk(centre, tried[centre], len(tried), enough, tuple(sorted(finite, key=lambda point: tried[point])))
