"""How much of a published experiment a run has: shares, departures, stand-ins, and what that lets it say."""

import pytest

from biascope.studies.scope import Experiment, Scope
from biascope.support.errors import InputError

TOLD = Experiment(
    "nad/fig1",
    parts={"net": ["lenet", "vgg11"], "sets": ["a", "b", "c"]},
    size={"epochs": 20, "n": 1000},
    smaller={"stride": 2},
    same={"sigma": 3.0, "rates": [0.1, 0.2]},
    all=("n",),
    diagnostic={"gap": ["half"]},
    stand_in={"data": {"x-rays": "X-rays instead of faces"}},
)
WHOLE = {"net": "lenet", "sets": ("a", "b"), "epochs": 20, "n": 1000, "stride": 2, "sigma": 3, "rates": (0.2, 0.1)}


def test_a_run_with_all_of_it_is_of_the_published_size_for_its_networks() -> None:
    scope = TOLD.scope({**WHOLE, "gap": "full", "data": "faces"})
    assert scope.level == "published size"
    assert str(scope) == "net 1/2, sets 2/3"
    assert TOLD.networks_of(WHOLE) == ("lenet",)
    assert TOLD.scope({**WHOLE, "net": "vgg11", "epochs": 40, "n": 0, "stride": 1}).level == "published size"


@pytest.mark.parametrize(
    ("change", "level", "told"),
    [
        ({"epochs": 5}, "reduced size", "epochs 5/20"),
        ({"stride": 8}, "reduced size", "stride 2/8"),
        ({"sigma": 1.0}, "reduced size", "sigma 1 instead of 3"),
        ({"rates": [0.1]}, "reduced size", "rates 0.1 instead of 0.1, 0.2"),
        ({"data": "x-rays"}, "stand-in", "on a stand-in: X-rays instead of faces"),
        ({"gap": "half", "epochs": 1}, "not counted", "a check of ours: gap half"),
    ],
)
def test_what_is_missing_is_named(change: dict[str, object], level: str, told: str) -> None:
    scope = TOLD.scope({**WHOLE, **change})
    assert scope.level == level
    assert told in str(scope)


def test_the_share_says_which_run_is_larger() -> None:
    small, large = (TOLD.scope({**WHOLE, "epochs": epochs}).share for epochs in (5, 10))
    assert large == pytest.approx(2 * small)
    assert TOLD.scope(WHOLE).share == pytest.approx(1 / 2 * 2 / 3)


def test_a_claim_on_one_network_needs_only_that() -> None:
    assert str(TOLD.scope(WHOLE, {"net": ["lenet"], "sets": ["a", "b"]})) == "as published"


def test_lists_count_what_they_hold() -> None:
    told = Experiment("s", size={"seeds": 5})
    assert str(told.scope({"seeds": (0, 1, 2)})) == "seeds 3/5"
    with pytest.raises(InputError, match="must be a number or a list"):
        told.scope({"seeds": "five"})


def test_an_experiment_that_nobody_catalogued_is_never_of_the_published_size() -> None:
    assert Scope(known=False).level == "reduced size"
    assert str(Scope(known=False)) == "published setting not catalogued"


def test_one_sentence_makes_every_run_a_stand_in() -> None:
    assert Experiment("s", stand_in="digits instead of faces").scope({}).level == "stand-in"


def test_what_a_document_does_not_print_is_said() -> None:
    told = Experiment("s", size={"epochs": 20}, silent=("radii", "noise"))
    assert str(told.scope({"epochs": 20})) == "as published (not printed: radii, noise)"
    assert told.scope({"epochs": 20}).level == "published size"
