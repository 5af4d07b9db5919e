"""Two results of one study, number by number."""

import pytest

from biascope.studies import Estimate, StudyResult
from biascope.studies.replication import beside


def result(**numbers: Estimate) -> StudyResult:
    return StudyResult("measured", numbers)


def test_numbers_are_paired_by_name_and_measured_in_errors() -> None:
    before = result(a=Estimate(1.0, 0.3, 4), gone=Estimate(1.0), exact=Estimate(2.0), plain=Estimate(1.0))
    now = result(a=Estimate(2.0, 0.4, 4), new=Estimate(1.0), exact=Estimate(2.0), plain=Estimate(1.5))
    pairs = {pair.name: pair for pair in beside(before, now)}
    assert list(pairs) == ["a", "new", "exact", "plain", "gone"]
    assert pairs["a"].apart == pytest.approx(1.0 / 0.5, rel=1e-15)
    assert pairs["exact"].apart == 0
    assert pairs["plain"].apart is None  # differs, and nobody knows how much is chance
    assert pairs["new"].before is None
    assert pairs["gone"].now is None
    assert pairs["new"].apart is pairs["gone"].apart is None


def test_errors_of_zero_say_nothing() -> None:
    assert beside(result(a=Estimate(1.0, 0.0, 3)), result(a=Estimate(2.0, 0.0, 3)))[0].apart is None
    assert beside(result(a=Estimate(1.0, 0.0, 3)), result(a=Estimate(2.0, 0.5, 3)))[0].apart == 2.0
