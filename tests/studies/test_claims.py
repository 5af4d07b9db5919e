"""The catalogue of claims: whole, unambiguous, and refused when it is not."""

from pathlib import Path

import pytest

from biascope.studies import Estimate
from biascope.studies.claims import claims, documents
from biascope.studies.registry import studies
from biascope.support.errors import CorruptError


def test_every_document_is_covered() -> None:
    found = claims()
    count = {paper: sum(claim.paper == paper for claim in found) for paper in documents()}
    assert min(count.values()) >= 1
    assert sorted(count.values())[-5] >= 17  # five are covered whole
    assert sum(count.values()) >= 140
    assert all(claim.statement.endswith(".") for claim in found)


def test_every_study_is_named_by_a_claim_and_its_conditions_are_its_options() -> None:
    named = {name for claim in claims() for name in claim.studies}
    assert [name for name in studies() if name not in named] == []  # a new study: add its claim to claims.toml
    for claim in claims():
        for name in claim.studies:
            if name in studies():
                assert set(claim.where) <= {option.name for option in studies()[name].options}, claim.id


def test_a_condition_decides_which_runs_test_a_claim() -> None:
    adam = next(claim for claim in claims() if claim.id == "function-space/B.1")
    needs = [name for condition in (*adam.rule, *adam.gate) for name in condition.needs]
    numbers = {name.replace("*", "x").replace("{net}", "mlp"): Estimate(0.1, 0.01) for name in needs}
    options = {**adam.where, "nets": ("mlp",)}
    assert adam.where["optimiser"] == "adam"
    assert adam.tested_by("ntk/fig4.2", options, numbers)
    assert not adam.tested_by("ntk/fig4.2", {**options, "optimiser": "sgd"}, numbers)
    assert not adam.tested_by("ntk/fig4.4", options, numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claim = 3", "not a catalogue"),
        ('[[claim]]\nid = "a"', "not a catalogue"),
        (
            '[[claim]]\nid="a"\npaper="nad"\nfigure="1"\nstatement="x."\nstudies=["s"]\ndata="d"\n' * 2,
            "more than once: a",
        ),
        ('[[claim]]\nid="a"\npaper="x"\nfigure="1"\nstatement="x."\nstudies=["s"]\ndata="d"', "of an unknown paper: a"),
        ('[[claim]]\nid="a"\npaper="nad"\nfigure="1"\nstatement="x."\nstudies=[]\ndata="d"', "no study, no reason: a"),
    ],
)
def test_a_bad_catalogue_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(CorruptError, match=message):
        claims(tmp_path / "claims.toml")
