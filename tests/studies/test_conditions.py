"""Conditions on the numbers of a run: sure, surely not, or left open by the errors."""

import json
from pathlib import Path

import pytest

from biascope.studies.claims import claims
from biascope.studies.conditions import Condition, all_hold
from biascope.studies.result import Estimate
from biascope.support.errors import CorruptError, InputError


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        (Condition("a", above=1), 1.3, True),
        (Condition("a", above=1), 1.1, None),  # not surely
        (Condition("a", above=1), 0.7, False),
        (Condition("a", above=1, margin=0.5), 1.1, False),  # surely less than the effect that would count
        (Condition("a", above=1, margin=0.5), 1.3, True),
        (Condition("a", below=1, margin=0.5), 0.9, False),
        (Condition("a", below=1), 0.7, True),
        (Condition("a", below=1), 0.9, None),
        (Condition("a", below=1), 1.3, False),
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
        (Condition("a", above=1, errors=4), 1.3, None),
    ],
)
def test_sure_and_left_open(condition: Condition, value: float, expected: bool | None) -> None:
    assert condition.holds({"a": Estimate(value, 0.1)}) is expected
    assert condition.holds({"a": Estimate(value)}) is None  # without an error nothing is sure


def test_another_number_brings_its_own_error() -> None:
    numbers = {"a": Estimate(1.0, 0.3), "b": Estimate(0.0, 0.3), "c": Estimate(0.0, 0.6), "d": Estimate(0.0)}
    assert Condition("a", above="b").holds(numbers)  # 1 against 2 x 0.42
    assert Condition("a", above="c").holds(numbers) is None  # 1 against 2 x 0.67
    assert Condition("b", above="a").holds(numbers) is False
    assert Condition("a", above="d").holds(numbers) is None
    assert Condition("a", above="b").needs == ("a", "b")


def test_two_repeats_are_not_sure_by_two_errors() -> None:
    assert Condition("a", above=0).holds({"a": Estimate(1.0, 0.1, 2)}) is None  # 13.97 errors are needed
    assert Condition("a", above=0).holds({"a": Estimate(1.0, 0.07, 2)})
    assert Condition("a", above=0).holds({"a": Estimate(1.0, 0.2, 3)})


def test_exact_numbers_are_compared_without_errors() -> None:
    assert Condition("a", above=0.9, exact=True).holds({"a": Estimate(0.95)})
    assert Condition("a", above=0.9, exact=True).holds({"a": Estimate(0.9)}) is False
    assert Condition("a", not_below=0.9, within=1e-9, exact=True).holds({"a": Estimate(0.9)})
    assert Condition("a", at=0.0, within=1e-6, exact=True).holds({"a": Estimate(2e-6)}) is False


def test_a_condition_is_asked_of_each_network() -> None:
    asked = Condition("gain, {net}", above="bar, {net}", but="{net} *")
    assert asked.of("mlp") == Condition("gain, mlp", above="bar, mlp", but="mlp *")
    assert asked.of("mlp").holds({"gain, mlp": Estimate(1.0, 0.1), "bar, mlp": Estimate(0.0, 0.1)})


def test_at_least_some_of_many() -> None:
    numbers = {"gain 1": Estimate(1.0, 0.1), "gain 2": Estimate(1.0, 0.1), "gain 3": Estimate(-1.0, 0.1)}
    assert Condition("gain *", above=0, least=2).holds(numbers)
    assert Condition("gain *", above=0, least=3).holds(numbers) is False
    assert Condition("gain *", above=0, least=3).holds({**numbers, "gain 3": Estimate(0.1, 0.1)}) is None


def test_networks_that_a_run_leaves_out_are_not_asked_about() -> None:
    numbers = {"mlp: gain": Estimate(0.0, 0.1), "vit: gain": Estimate(1.0, 0.1), "own.py:mlp: gain": Estimate(1.0, 0.1)}
    rule = [
        Condition("mlp: gain", at=0, within=0.5, optional=True),
        Condition("*: gain", but="mlp: *", above=0, optional=True),
    ]
    assert rule[1].matches(numbers) == ["vit: gain", "own.py:mlp: gain"]
    assert all_hold(rule, numbers)[0] is True
    alone = {"vit: gain": Estimate(-1.0, 0.1)}
    assert not any(condition.missing(alone) for condition in rule)
    holds, text = all_hold(rule, alone)
    assert holds is False
    assert "mlp" not in text
    assert all_hold(rule, {"vit: loss": Estimate(1.0, 0.1)}) == (None, "")  # nothing is asked


def test_one_failure_decides_and_one_open_condition_leaves_it_open() -> None:
    numbers = {"yes": Estimate(1.0, 0.1, 9), "no": Estimate(-1.0, 0.1, 9), "open": Estimate(1.0)}
    yes, no, left = (Condition(name, above=0) for name in numbers)
    assert all_hold([yes], numbers)[0] is True
    assert all_hold([yes, left], numbers)[0] is None
    holds, text = all_hold([yes, no, left], numbers)
    assert holds is False
    assert "no: -1.00 ± 0.10 (n = 9), required above 0: no" in text
    assert "open: 1, required above 0: left open by the errors" in text
    with pytest.raises(InputError, match="no number called 'x'"):
        all_hold([Condition("x", above=0)], numbers)


@pytest.mark.parametrize("bad", [{}, {"above": 1, "below": 2}, {"at": 1}, {"above": 1, "within": 0.1}])
def test_a_condition_asks_one_thing(bad: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a condition on 'a'"):
        Condition("a", **bad)
    row = {"id": "a", "paper": "nad", "figure": "1", "statement": "x.", "studies": ["nad/fig1"], "data": "d"}
    rule = ", ".join(f"{key} = {value}" for key, value in {"number": '"a"', **bad}.items())
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in row.items()) + f"\nrule = [{{ {rule} }}]"
    (tmp_path / "claims.toml").write_text(f"[[claim]]\n{text}\n")
    with pytest.raises(CorruptError, match="a condition on 'a'"):
        claims(tmp_path / "claims.toml")
