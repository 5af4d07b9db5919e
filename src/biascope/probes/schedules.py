"""When to measure: every so many steps or epochs, at log-spaced steps, or when the loss crosses the next threshold.

A schedule says how many of its marks a moment has passed (`level`); a measurement is due when that number is larger
than it ever was. So a schedule keeps no state, and one object can serve many runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from biascope.arguments import as_number
from biascope.errors import InputError, near
from biascope.signatures import checked


@dataclass(frozen=True)
class Moment:
    """Where a training is: optimiser steps taken, epochs (if known), training loss (if known)."""

    step: int
    epoch: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Schedule(ABC):
    """Base of schedules."""

    @property
    def needs_loss(self) -> bool:
        """Whether every step must give its loss."""
        return False

    @property
    def averaging(self) -> float:
        """Weight of the past in the running average of the loss."""
        return 0.0

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
        _positive_integer("every", self.every)

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
        if not 0 < as_number(self.every, "every") < math.inf:
            raise InputError(f"every={self.every}: a schedule needs a positive number of epochs")
        if self.steps_per_epoch is not None:
            _positive_integer("steps_per_epoch", self.steps_per_epoch)

    def level(self, now: Moment) -> int:
        """Multiples of `every` epochs passed."""
        epoch = now.epoch
        if epoch is None and self.steps_per_epoch is not None:
            epoch = now.step / self.steps_per_epoch
        if epoch is None:
            if now.step == 0:
                return 0
            raise InputError(
                "a schedule by epochs needs EveryEpochs(..., steps_per_epoch=...) or probe.step(loss, epoch=...)"
            )
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
        _positive_integer("first", self.first)
        if not 1 < as_number(self.factor, "factor") < math.inf:
            raise InputError(f"factor={self.factor}: steps must grow, factor > 1")

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

    def __post_init__(self) -> None:
        if not 0 < as_number(self.factor, "factor") < 1:
            raise InputError(f"factor={self.factor}: thresholds must fall, 0 < factor < 1")
        if self.start is not None and not 0 < as_number(self.start, "start") < math.inf:
            raise InputError(f"start={self.start}: the first threshold must be positive")
        if not 0 <= as_number(self.smoothing, "smoothing") < 1:
            raise InputError(f"smoothing={self.smoothing}: a weight from 0 (none) to below 1")

    @staticmethod
    @checked
    def decades(per_decade: int = 1, start: float | None = None, smoothing: float = 0.0) -> LossGrid:
        """Thresholds that divide every factor of 10 of the loss into `per_decade` equal parts."""
        _positive_integer("per_decade", per_decade)
        return LossGrid(10 ** (-1 / per_decade), start, smoothing)

    @property
    def needs_loss(self) -> bool:
        """Every step must give its loss."""
        return True

    @property
    def averaging(self) -> float:
        """Weight of the past in the running average of the loss."""
        return self.smoothing

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


NAMES: dict[str, type[Schedule]] = {"steps": EverySteps, "epochs": EveryEpochs, "log": LogSteps, "loss": LossGrid}


def as_schedule(schedule: Schedule | str | int) -> Schedule:
    """A schedule from an object, a name ("log", "loss", "epochs", "steps") or a number of steps.

    Example:
        >>> as_schedule(50), as_schedule("epochs")
        (EverySteps(every=50), EveryEpochs(every=1, steps_per_epoch=None))
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        return EverySteps(schedule)
    if isinstance(schedule, str):
        if schedule in NAMES:
            return NAMES[schedule]()
        raise InputError(f"no schedule is called {schedule!r}{near(schedule, NAMES)}")
    raise InputError(f"schedule: expected a Schedule, a name or a number of steps, got {type(schedule).__name__}")


def _positive_integer(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={value!r}: a schedule needs a positive integer here")
