"""Schedules: when a measurement is due."""

import math

import pytest

from biascope.probes import EveryEpochs, EverySteps, LogSteps, LossGrid
from biascope.probes.schedules import Moment, Overhead, Schedule, as_schedule
from biascope.support.errors import InputError


def due(schedule: Schedule, moments: list[Moment]) -> list[int]:
    """Indices of moments at which the level is larger than ever before."""
    best, found = schedule.level(Moment(0)), []
    for i, now in enumerate(moments):
        level = schedule.level(now)
        if level is not None and (best is None or level > best):
            best = level
            found.append(i)
    return found


def test_every_steps() -> None:
    assert due(EverySteps(4), [Moment(s) for s in range(13)]) == [4, 8, 12]
    assert due(EverySteps(4), [Moment(s) for s in (3, 6, 7, 9)]) == [1, 3]  # calls may miss the mark itself


def test_log_steps_are_the_published_ones() -> None:
    expected = sorted({5 * math.floor(1.15**m) for m in range(60)})
    found = due(LogSteps(), [Moment(s) for s in range(3000)])
    assert found == [s for s in expected if s < 3000]


def test_epochs_by_number_and_by_steps() -> None:
    assert due(EveryEpochs(1), [Moment(s, epoch=s / 3) for s in range(1, 8)]) == [2, 5]
    assert due(EveryEpochs(0.5, steps_per_epoch=4), [Moment(s) for s in range(9)]) == [2, 4, 6, 8]
    with pytest.raises(InputError, match=r"steps_per_epoch=.*epoch="):
        EveryEpochs(1).level(Moment(3))


def test_loss_grid_is_crossed_once_and_ignores_noise() -> None:
    losses = [3.0, 2.1, 1.9, 2.5, 1.1, 0.9, 1.5, 0.24, 0.26]
    grid = LossGrid(factor=0.5, start=2.0)  # thresholds 2, 1, 0.5, 0.25, ...
    assert due(grid, [Moment(i + 1, loss=v) for i, v in enumerate(losses)]) == [2, 5, 7]
    assert [grid.threshold(k) for k in range(3)] == [2.0, 1.0, 0.5]


def test_loss_exactly_at_a_threshold_counts() -> None:
    grid = LossGrid()
    for k in (-3, 0, 7, 100):
        assert grid.level(Moment(1, loss=grid.threshold(k))) == k


def test_grids_of_all_runs_agree_without_a_start() -> None:
    grid = LossGrid(factor=0.5)
    assert [grid.level(Moment(1, loss=v)) for v in (5.0, 2.0, 1.0, 0.3)] == [-3, -1, 0, 1]
    assert LossGrid.decades(2).factor ** 2 == pytest.approx(0.1)
    assert grid.level(Moment(1, loss=0.0)) > 500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EverySteps(0), "every must be at least 1, not 0"),
        (lambda: LogSteps(factor=1.0), "factor=1.0"),
        (lambda: LossGrid(factor=1.5), "factor=1.5"),
        (lambda: LossGrid(start=-1.0), "start=-1.0"),
        (lambda: LossGrid(smoothing=1.0), "smoothing=1.0"),
        (lambda: EveryEpochs(0), "every=0"),
        (lambda: LossGrid().level(Moment(3, loss=-0.5)), "-0.5 at step 3"),
        (lambda: as_schedule("epoch"), "did you mean epochs"),
        (lambda: as_schedule(2.5), "every must be an integer, not 2.5"),  # type: ignore[arg-type]
    ],
)
def test_bad_schedules(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_a_share_of_the_time_is_kept() -> None:
    now = iter([0.0, 0.0, 2.0, 10.0, 100.0])
    time = Overhead(0.1, lambda: next(now))
    with time.counted():  # from 0 to 2
        pass
    time.cost = 2.0
    assert (time.allows(), time.allows()) == (False, True)  # at 10: 4 of 12 seconds; at 100: 4 of 102
