"""Two runs at equal loss: closed cases by hand."""

import pytest

from biascope.probes import Record, equal_progress
from biascope.support.errors import InputError


def run(*rows: tuple[int, float, float], **extra: object) -> list[Record]:
    return [Record(step, loss, values={"m": m}, **extra) for step, loss, m in rows]


FAST = run((0, 2.0, 0.0), (1, 1.0, 10.0), (2, 0.3, 20.0), (3, 0.8, 30.0), (4, 0.1, 40.0))
SLOW = run((0, 2.0, 0.0), (10, 1.2, 1.0), (20, 0.6, 2.0), (30, 0.4, 3.0))


def test_the_first_record_at_or_below_each_threshold() -> None:
    both = equal_progress(FAST, SLOW, [0.5, 1.0, 0.2])
    assert both.thresholds == [1.0, 0.5]
    assert both.missed == (0.2,)  # the slow run never got there
    assert [(p.a.step, p.b.step) for p in both.pairs] == [(1, 20), (2, 30)]
    assert both.column("m") == ([10.0, 20.0], [2.0, 3.0])
    assert both.pairs[1].difference("m") == 17.0
    assert both.table()[0] == {
        "threshold": 1.0,
        **{"step_a": 1.0, "loss_a": 1.0, "m_a": 10.0},
        **{"step_b": 20.0, "loss_b": 0.6, "m_b": 2.0},
    }


def test_interpolation_stands_exactly_at_the_threshold() -> None:
    both = equal_progress(FAST, SLOW, [0.5], interpolate=True)
    pair = both.pairs[0]
    assert pair.a.loss == pytest.approx(0.5)
    assert pair.b.loss == pytest.approx(0.5)
    assert pair.a["m"] == pytest.approx(10 + 10 * 0.5 / 0.7)
    assert pair.b["m"] == pytest.approx(2.5)


def test_thresholds_of_a_loss_schedule_are_used() -> None:
    a = [Record(1, 0.9, threshold=1.0), Record(2, 0.2, threshold=0.25)]
    b = [Record(1, 0.95, threshold=1.0), Record(5, 0.45, threshold=0.5), Record(9, 0.2, threshold=0.25)]
    both = equal_progress(a, b)
    assert both.thresholds == [1.0, 0.5, 0.25]
    assert [(p.a.step, p.b.step) for p in both.pairs] == [(1, 1), (2, 5), (2, 9)]  # a jumped over 0.5
    with pytest.raises(InputError, match="no thresholds"):
        equal_progress(FAST, SLOW)


def test_by_accuracy_progress_rises() -> None:
    a = [Record(i, 1.0, values={"group_losses/majority/accuracy": v}) for i, v in enumerate((0.1, 0.6, 0.9))]
    b = [Record(i, 1.0, values={"group_losses/majority/accuracy": v}) for i, v in enumerate((0.1, 0.3, 0.8))]
    both = equal_progress(a, b, [0.5, 0.85], by="group_losses/majority/accuracy")
    assert [(p.a.step, p.b.step) for p in both.pairs] == [(1, 2)]
    assert both.missed == (0.85,)


def test_skipped_records_and_missing_losses_do_not_count() -> None:
    a = [Record(0), Record(1, 0.4, skipped=True), *FAST]
    assert equal_progress(a, SLOW, [0.5]).pairs[0].a.step == 2
    with pytest.raises(InputError, match="b_records: none of 1 records has 'loss'"):
        equal_progress(a, [Record(0)], [0.5])
    with pytest.raises(InputError, match="'n'; there are m"):
        equal_progress(a, SLOW, [0.5]).column("n")


def test_plot() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    figure = equal_progress(FAST, SLOW, [1.0, 0.5]).plot("m")
    assert len(figure.axes[0].lines) == 2
