"""When to measure: every so many steps or epochs, at log-spaced steps, or when the loss crosses the next threshold.

A schedule says how many of its marks a moment has passed (`level`); a measurement is due when that number is larger
than it ever was. So a schedule keeps no state, and one object can serve many runs. `Overhead` limits the time it takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from biascope.support.arguments import as_number, check_choice, check_count, check_number
from biascope.support.errors import InputError
from biascope.support.signatures import checked


@dataclass(frozen=True)
class Moment:
    """Where a training is: optimiser steps taken, epochs (if known), training loss (if known)."""

    step: int
    epoch: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Schedule(ABC):
    """Base of schedules."""

    needs_loss: ClassVar[bool] = False  # every step must give its loss

    @abstractmethod
    def level(self, now: Moment) -> int | None:
        """Number of marks passed, None if none can have been."""

    def threshold(self, level: int) -> float | None:
        """The mark of a level, as a loss."""
        return None


@dataclass(frozen=True)
class EverySteps(Schedule):
    """Every `every` optimiser steps.

    Example:
        >>> [EverySteps(10).level(Moment(s)) for s in (0, 9, 10, 25)]
        [0, 0, 1, 2]
    """

    every: int = 100

    def __post_init__(self) -> None:
        check_count(self.every, "every")

    def level(self, now: Moment) -> int:
        """Multiples of `every` passed."""
        return now.step // self.every


@dataclass(frozen=True)
class EveryEpochs(Schedule):
    """Every `every` epochs; give `steps_per_epoch` here, or `epoch=` to `probe.step`.

    Example:
        >>> EveryEpochs(2).level(Moment(500, epoch=4.5)), EveryEpochs(1, steps_per_epoch=100).level(Moment(250))
        (2, 2)
    """

    every: float = 1
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_number(self.every, "every", above=0)
        if self.steps_per_epoch is not None:
            check_count(self.steps_per_epoch, "steps_per_epoch")

    def level(self, now: Moment) -> int:
        """Multiples of `every` epochs passed."""
        epoch = now.epoch
        if epoch is None and (self.steps_per_epoch is not None or now.step == 0):
            epoch = now.step / (self.steps_per_epoch or 1)
        if epoch is None:
            raise InputError("EveryEpochs needs steps_per_epoch=..., or epochs from probe.step(loss, epoch=...)")
        return math.floor(epoch / self.every + 1e-9)


@dataclass(frozen=True)
class LogSteps(Schedule):
    """At steps first * floor(factor^m), m = 0, 1, ...: evenly spaced on a logarithmic axis.

    Example:
        >>> log = LogSteps(first=5, factor=1.5)  # floor(1.5^m) = 1, 1, 2, 3, 5, 7, ...
        >>> [s for s in range(1, 40) if log.level(Moment(s)) > log.level(Moment(s - 1))]
        [5, 10, 15, 25, 35]
    """

    first: int = 5
    factor: float = 1.15

    def __post_init__(self) -> None:
        check_count(self.first, "first")
        check_number(self.factor, "factor", above=1)

    def level(self, now: Moment) -> int:
        """Marks at or before this step."""
        m = 0
        while self.first * math.floor(self.factor**m) <= now.step:
            m += 1
        return m


@dataclass(frozen=True)
class LossGrid(Schedule):
    """When the loss first falls to the next threshold start * factor^k, k = 0, 1, ...

    Two runs with the same grid are measured at the same losses, so they can be compared at equal progress
    (`equal_progress`). Without `start` the grid goes on above 1 as well (k may be negative).

    Args:
        factor: between 0 and 1; the papers use 0.96. `LossGrid.decades(4)`: four thresholds per factor of 10.
        start: the first threshold, such as log(c) for c classes.
        smoothing: weight of the past in a running average of the loss (0 or 0.66 in the papers).

    Example:
        >>> grid = LossGrid(factor=0.5, start=2.0)
        >>> [grid.level(Moment(1, loss=v)) for v in (3.0, 2.0, 1.5, 1.0, 0.3)], grid.threshold(1)
        ([None, 0, 0, 1, 2], 1.0)
    """

    factor: float = 0.96
    start: float | None = None
    smoothing: float = 0.0
    needs_loss = True

    def __post_init__(self) -> None:
        factor, past = as_number(self.factor, "factor"), as_number(self.smoothing, "smoothing")
        if not (0 < factor < 1 and 0 <= past < 1):
            raise InputError(f"factor={factor}, smoothing={past}: need 0 < factor < 1 and 0 <= smoothing < 1")
        if self.start is not None:
            check_number(self.start, "start", above=0)

    @staticmethod
    @checked
    def decades(per_decade: int = 1, start: float | None = None, smoothing: float = 0.0) -> LossGrid:
        """Thresholds that divide every factor of 10 of the loss into `per_decade` equal parts."""
        check_count(per_decade, "per_decade")
        return LossGrid(10 ** (-1 / per_decade), start, smoothing)

    def level(self, now: Moment) -> int | None:
        """k of the lowest threshold at or above the loss."""
        if now.loss is None:
            return None
        if now.loss < 0:
            raise InputError(f"the loss is {now.loss:.3g} at step {now.step}: a geometric grid needs positive losses")
        loss = max(now.loss, 1e-300)
        k = math.floor(math.log(loss / (self.start or 1.0)) / math.log(self.factor) + 1e-9)
        return None if self.start is not None and k < 0 else k

    def threshold(self, level: int) -> float:
        """start * factor^level."""
        return (self.start or 1.0) * self.factor**level


NAMES: dict[str, Callable[[], Schedule]] = {
    "steps": EverySteps,
    "epochs": EveryEpochs,
    "log": lambda: LogSteps(first=1),  # a curve of a short run too
    "loss": LossGrid,
}


def as_schedule(schedule: Schedule | str | int) -> Schedule:
    """A schedule from an object, a name ("log", "loss", "epochs", "steps") or a number of steps."""
    if isinstance(schedule, Schedule):
        return schedule
    return NAMES[check_choice(schedule, "schedule", NAMES)]() if isinstance(schedule, str) else EverySteps(schedule)


class Overhead:
    """The seconds spent measuring, of all seconds since it was made: a share that must not exceed `cap`."""

    def __init__(self, cap: float | None, clock: Callable[[], float]) -> None:
        if cap is not None and not 0 < as_number(cap, "max_overhead") <= 1:
            raise InputError(f"max_overhead={cap}: a share of the time, above 0 and up to 1, or None for no cap")
        self.cap, self.clock = cap, clock
        self.began = clock()
        self.before = 0.0  # seconds of earlier processes of the same run
        self.spent = 0.0
        self.cost = 0.0  # of the last measurement: what the next one is expected to take

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens inside as spent."""
        begin = self.clock()
        try:
            yield
        finally:
            self.spent += self.clock() - begin

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.before + self.clock() - self.began

    @property
    def share(self) -> float:
        """Spent / elapsed."""
        elapsed = self.elapsed
        return self.spent / elapsed if elapsed > 0 else 0.0

    def allows(self) -> bool:
        """Whether one more measurement keeps the share under the cap."""
        return self.cap is None or self.spent + self.cost <= self.cap * (self.elapsed + self.cost)
