"""Conditions on the numbers of a run: sure, surely not, or left open by the errors."""

import json
from pathlib import Path

import pytest

from biascope.reports.claim_rows import ledger
from biascope.studies.claims import claims
from biascope.studies.conditions import Condition, judge
from biascope.studies.registry import studies
from biascope.studies.result import Estimate
from biascope.support.errors import CorruptError, InputError

KEPT = Path(__file__).parents[2] / "reproductions"
UNTRAINED = {"nad/11, others", "nad/22, ResNet-18", "function-space/4.5, any size"}  # of settings no kept run has


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        (Condition("a", above=1), 1.3, True),
        (Condition("a", above=1), 1.1, False),  # not surely: a claim of more is not borne out
        (Condition("a", below=1), 0.7, True),
        (Condition("a", below=1), 0.9, False),
        (Condition("a", at=1, within=0.5), 1.1, True),
        (Condition("a", at=1, within=0.5), 1.4, None),  # 1.2 to 1.6
        (Condition("a", at=1, within=0.5), 1.8, False),
        (Condition("a", at=1, within=0.5), 0.2, False),
        (Condition("a", not_below=1, within=0.5), 9.0, True),
        (Condition("a", not_below=1, within=0.5), 0.6, None),
        (Condition("a", not_below=1, within=0.5), 0.2, False),
        (Condition("a", not_above=1, within=0.5), 0.2, True),
        (Condition("a", not_above=1, within=0.5), 1.4, None),
        (Condition("a", not_above=1, within=0.5), 1.8, False),
        (Condition("a", not_below=1), 0.9, True),  # not surely below
        (Condition("a", not_below=1), 0.7, False),
        (Condition("a", not_below=1, errors=4), 0.7, True),
        (Condition("a", not_above=1), 1.3, False),
        (Condition("a", above=1, errors=4), 1.3, False),
        (Condition("a", at=1, within=0.5, strict=True), 1.1, True),
        (Condition("a", at=1, within=0.5, strict=True), 1.4, False),  # not shown to be that near
        (Condition("a", at=1, within=0.15, strict=True), 1.1, None),  # the error alone is wider
        (Condition("a", at=1, within=0.15, strict=True), 1.4, False),
    ],
)
def test_two_standard_errors_decide(condition: Condition, value: float, expected: bool | None) -> None:
    assert condition.holds({"a": Estimate(value, 0.1)}) is expected
    assert condition.holds({"a": Estimate(value)}) is None  # without an error nothing is sure


def test_another_number_brings_its_own_error() -> None:
    numbers = {"a": Estimate(1.0, 0.3), "b": Estimate(0.0, 0.3), "c": Estimate(0.0, 0.6), "d": Estimate(0.0)}
    assert Condition("a", above="b").holds(numbers)  # 1 against 2 x 0.42
    assert Condition("a", above="c").holds(numbers) is False  # 1 against 2 x 0.67
    assert Condition("a", above="d").holds(numbers) is None
    assert Condition("a", above="b").needs == ("a", "b")


def test_networks_that_a_run_leaves_out_are_not_asked_about() -> None:
    numbers = {"mlp: gain": Estimate(0.0, 0.1), "vit: gain": Estimate(1.0, 0.1), "own.py:mlp: gain": Estimate(1.0, 0.1)}
    rule = [
        Condition("mlp: gain", at=0, within=0.5, optional=True),
        Condition("*: gain", but="mlp: *", above=0, optional=True),
    ]
    assert rule[1].matches(numbers) == ["vit: gain", "own.py:mlp: gain"]
    assert judge(rule, numbers)[0] == "confirmed"
    alone = {"vit: gain": Estimate(-1.0, 0.1)}
    assert not any(condition.missing(alone) for condition in rule)
    verdict, told = judge(rule, alone)
    assert verdict == "not confirmed"
    assert "mlp" not in told
    assert judge(rule, {"vit: loss": Estimate(1.0, 0.1)})[0] == "not tested"  # nothing is asked
    assert judge(rule, alone, [Condition("mlp: learned", above=0, optional=True)])[0] == "not confirmed"


def test_one_failure_decides_and_one_open_condition_tests_nothing() -> None:
    numbers = {"yes": Estimate(1.0, 0.1, 3), "no": Estimate(-1.0, 0.1, 3), "open": Estimate(1.0)}
    yes, no, left = (Condition(name, above=0) for name in numbers)
    assert judge([yes], numbers)[0] == "confirmed"
    assert judge([yes, left], numbers)[0] == "not tested"
    verdict, told = judge([yes, no, left], numbers)
    assert verdict == "not confirmed"
    assert "no: -1.00 ± 0.10 (n = 3), asked above 0: no" in told
    assert "open: 1, asked above 0: left open by the errors" in told
    with pytest.raises(InputError, match="no number called 'x'"):
        judge([Condition("x", above=0)], numbers)


@pytest.mark.parametrize("bad", [{}, {"above": 1, "below": 2}, {"at": 1}, {"above": 1, "within": 0.1}])
def test_a_condition_asks_one_thing(bad: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a condition on 'a'"):
        Condition("a", **bad)
    row = {"id": "a", "paper": "nad", "figure": "1", "claim": "x.", "studies": ["nad/fig1"], "data": "d"}
    rule = ", ".join(f"{key} = {value}" for key, value in {"number": '"a"', **bad}.items())
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in row.items()) + f"\nrule = [{{ {rule} }}]"
    (tmp_path / "claims.toml").write_text(f"[[claim]]\n{text}\n")
    with pytest.raises(CorruptError, match="a condition on 'a'"):
        claims(tmp_path / "claims.toml")


def test_every_condition_of_the_catalogue_finds_its_numbers_in_a_kept_run() -> None:
    """A number that a study calls by another name now would leave its claim untested without a word."""
    asked = [claim for claim in claims() if claim.rule]
    judged = {row.claim.id for row in ledger(KEPT) if row.claim.rule and row.run}
    assert len(asked) >= 20
    assert {claim.id for claim in asked if claim.id not in judged} == UNTRAINED
    assert all(name in studies() for claim in asked for name in claim.studies)


def test_a_run_that_tests_nothing_judges_no_other_claim() -> None:
    rows = [row for row in ledger(KEPT) if row.claim.id == "linearization/5.2b, levels"]
    verdicts = {row.run.name: row.verdict for row in rows if row.run}
    assert verdicts == {
        "lazy-fig5.2-noise-paper-h200": "not tested",
        "lazy-fig5.2-noise-paper-he-h200": "not confirmed",
    }
