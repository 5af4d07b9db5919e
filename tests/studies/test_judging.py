"""Two judgements of a claim by one run: only the published size contradicts, and printed numbers are compared apart."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from biascope.studies import Estimate, Run
from biascope.studies import claims as catalogue
from biascope.studies.claims import Claim, Published
from biascope.studies.conditions import Condition
from biascope.studies.judging import Judgement, judge_claim, options_of_run
from biascope.studies.scope import Experiment

TOLD = Experiment("nad/fig1", parts={"nets": ["a", "b"]}, size={"epochs": 20}, diagnostic={"gap": ["half"]})
CLAIM = Claim(
    "c", "nad", "1", "x rises.", ("nad/fig1",), per_network=True,
    rule=(Condition("x, {net}", above=0),), gate=(Condition("learned, {net}", above=0.9, exact=True),),
)  # fmt: skip
NUMBERS = {"x, a": Estimate(1.0, 0.1, 9), "x, b": Estimate(-1.0, 0.1, 9)}
NUMBERS |= {f"learned, {net}": Estimate(1.0) for net in "ab"}


@pytest.fixture(autouse=True)
def _experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "experiments", lambda: {TOLD.study: TOLD})


def judge(claim: Claim = CLAIM, numbers: dict[str, Estimate] = NUMBERS, **options: Any) -> Judgement:
    options = {"nets": ("a", "b"), "epochs": 20, "gap": "full", **options}
    environment = {"started": "2026-11-18T12:00:00+00:00"}
    run = Run(Path("r"), {"study": "nad/fig1", "options": options}, environment)
    return judge_claim(claim, run, numbers)


def test_each_network_is_judged_apart() -> None:
    judged = judge()
    assert [judged.verdict_of(part) for part in judged.parts] == ["supported", "contradicted"]
    assert judged.verdict == "contradicted"
    assert judge(nets=("a",)).verdict == "supported"
    assert str(judge(nets=("a",)).scope) == "nets 1/2"


def test_a_reduced_run_supports_and_never_contradicts() -> None:
    judged = judge(epochs=10)
    assert [judged.verdict_of(part) for part in judged.parts] == ["supported", "undecided"]
    assert judged.verdict == "supported"
    assert judged.level == "reduced size"
    assert "epochs 10/20): that contradicts nothing" in judged.reason


def test_what_a_run_does_not_record_is_what_its_study_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that came after the run: it counts as its default, so that a departure is seen."""
    experiment = Experiment("ntk/table4.1", parts={"nets": ["lenet"]}, size={"epochs": 200}, same={"init": "lecun"})
    monkeypatch.setattr(catalogue, "experiments", lambda: {experiment.study: experiment})
    claim = replace(CLAIM, studies=(experiment.study,))
    run = Run(Path("r"), {"study": experiment.study, "options": {"nets": ["lenet"], "epochs": 200}}, {})
    numbers = {"x, lenet": Estimate(-1.0, 0.1, 9), "learned, lenet": Estimate(1.0)}
    judged = judge_claim(claim, run, numbers)
    assert "init torch instead of lecun" in str(judged.scope)
    assert judged.verdict == "undecided"


def test_a_stand_in_never_contradicts() -> None:
    judged = judge(replace(CLAIM, stand_in="digits"), nets=("b",))
    assert (judged.verdict, judged.level) == ("undecided", "stand-in")


def test_a_setting_that_is_not_printed_contradicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = replace(TOLD, silent=("radii", "noise"))
    monkeypatch.setattr(catalogue, "experiments", lambda: {TOLD.study: silent})
    judged = judge(nets=("b",))
    assert (judged.verdict, judged.level) == ("undecided", "published size")
    assert judged.fails_as_far_as_printed
    assert "radii, noise are not printed" in judged.reason
    assert judge(nets=("a",)).verdict == "supported"


def test_a_check_of_ours_does_not_count() -> None:
    assert judge(gap="half").verdict == "undecided"
    assert "Not counted: gap half" in judge(gap="half").reason


def test_networks_that_did_not_learn_leave_it_undecided() -> None:
    judged = judge(numbers={**NUMBERS, "learned, b": Estimate(0.5)})
    assert [judged.verdict_of(part) for part in judged.parts] == ["supported", "undecided"]
    assert "learned, b: 0.5" in judged.reason


def test_errors_can_leave_it_open() -> None:
    assert judge(numbers={**NUMBERS, "x, b": Estimate(-1.0, 0.5, 3)}, nets=("b",)).verdict == "undecided"


@pytest.mark.parametrize(
    ("value", "error", "outcome"),
    [(1.0, None, "agree"), (1.2, None, "differ"), (1.2, 0.05, "agree"), (0.85, None, "differ")],
)
def test_printed_numbers_are_compared_within_tolerance_and_errors(
    value: float, error: float | None, outcome: str
) -> None:
    printed = Published("x, a", value, tolerance=0.1, error=error)
    exact = {**NUMBERS, "x, a": Estimate(1.0, 0.0)}
    assert judge(replace(CLAIM, published=(printed,)), exact).replication == outcome
    assert judge().replication == "none published"
    assert judge(replace(CLAIM, published=(printed,)), {**exact, "x, a": Estimate(1.0, 0.1, 3)}).replication == "agree"


def test_numbers_that_agree_while_the_rule_fails_are_marked() -> None:
    printed = Published("x, b", -1.0, tolerance=0.1)
    judged = judge(replace(CLAIM, published=(printed,)))
    assert judged.replication == "agree"
    assert judged.at_odds
    assert not judge().at_odds


def test_a_published_number_is_meant_for_its_own_runs() -> None:
    printed = Published("x, a", 1.0, tolerance=0.1, where={"epochs": 10})
    assert judge(replace(CLAIM, published=(printed,))).compared == ()
    assert len(judge(replace(CLAIM, published=(printed,)), epochs=10).compared) == 1


def test_whether_the_rule_came_first_is_computed() -> None:
    early, late = datetime(2026, 11, 18, 11, tzinfo=UTC), datetime(2026, 11, 18, 13, tzinfo=UTC)
    assert judge(replace(CLAIM, rule_set=early)).rule_before_run is True
    assert judge(replace(CLAIM, rule_set=late)).rule_before_run is False
    assert judge(replace(CLAIM, rule_set="after")).rule_before_run is False


def test_an_option_that_an_old_run_lacks_has_its_default() -> None:
    """What was the only way then departs from the published setting as much as if it had been asked for."""
    run = Run(Path("r"), {"study": "nad/fig1", "options": {"nets": ("a",)}}, {})
    found = options_of_run(run)
    assert found["nets"] == ("a",)
    assert set(found) > {"nets"}
