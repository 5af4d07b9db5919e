"""What no row of the ledger may do, asked of every rule in the catalogue and of every kept run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from biascope.reports import ledger, ledger_json
from biascope.studies import Estimate, Run, studies
from biascope.studies.claims import Claim, claims, experiment_of
from biascope.studies.conditions import Condition
from biascope.studies.judging import Judgement, judge_claim
from biascope.studies.scope import Scope

KEPT = Path(__file__).parents[2] / "reproductions"
BY_ID = {claim.id: claim for claim in claims()}
JUDGED = [claim for claim in claims() if claim.rule]


def instance(name: str) -> str:
    """A number's name that a pattern stands for."""
    return re.sub(r"\[(.).*?\]", r"\1", name).replace("*", "of some kind")


def _several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def bar_of(condition: Condition) -> float | str:
    return next(bar for bar in condition._bars if bar is not None)


def numbers_for(condition: Condition, holds: bool) -> dict[str, Estimate]:
    """Numbers, known to nearly nothing, with which a condition surely holds, or surely fails."""
    bar, far = bar_of(condition), 1.0 + condition.margin + 2 * condition.within
    level = 0.0 if isinstance(bar, str) else float(bar)
    if condition.at is not None:
        value = level if holds else level + far
    else:
        up = condition.above is not None or condition.not_below is not None
        value = level + (far if up == holds else -far)
    found = {instance(condition.number): Estimate(value, 1e-9)}
    return found | ({instance(bar): Estimate(level, 1e-9)} if isinstance(bar, str) else {})


def as_published(claim: Claim) -> tuple[Run, Scope]:
    """A run of the claim's first study with all that the document gives of its setting."""
    study = claim.studies[0]
    published = experiment_of(study)
    assert published is not None
    paper: dict[str, Any] = studies()[study].values("paper")
    wanted: dict[str, Any] = {**published.parts, **claim.where}
    if claim.networks and published.networks:
        wanted[published.networks] = list(claim.networks)
    wanted |= {key: tuple(range(int(n))) if _several(paper[key]) else n for key, n in published.size.items()}
    wanted |= {**published.smaller, **published.same}
    values = dict(paper)
    for key, want in wanted.items():
        if _several(paper[key]):
            values[key] = want if _several(want) else [want]
        else:
            values[key] = want[0] if _several(want) else want
    return Run(Path("r"), {"study": study, "options": values}, {}), published.scope(values)


def judged(claim: Claim, rule: bool, gate: bool | list[bool]) -> Judgement:
    """The claim judged by a run of the published size whose rule (and conditions of the gate) hold or fail."""
    run, _ = as_published(claim)
    net = claim.networks_of(claim.studies[0], run.config["options"])[0] if claim.per_network else ""
    answers = gate if isinstance(gate, list) else [gate] * len(claim.gate)
    numbers: dict[str, Estimate] = {}
    for condition in claim.rule:
        numbers |= numbers_for(condition.of(net), rule)
    for condition, answer in zip(claim.gate, answers):
        numbers |= numbers_for(condition.of(net), answer)
    return judge_claim(claim, run, numbers)


def decidable(claim: Claim) -> bool:
    """Whether some run could contradict it: nothing silent, no stand-in, rule and gate about different numbers."""
    _, scope = as_published(claim)
    rule, gate = ({instance(name) for each in part for name in each.needs} for part in (claim.rule, claim.gate))
    apart = not rule & gate and not any(each.least for each in (*claim.rule, *claim.gate))
    return apart and scope.level == "published size" and not scope.silent and not claim.stand_in


GATED = [claim for claim in JUDGED if claim.gate and decidable(claim)]


@pytest.mark.parametrize("claim", GATED, ids=[claim.id for claim in GATED])
def test_what_has_to_hold_first_withholds_the_verdict(claim: Claim) -> None:
    """The same failing numbers contradict with the gate open and decide nothing when any of its conditions fails."""
    if len({bar for each in claim.rule for bar in each.needs}) == len(claim.rule):
        assert judged(claim, rule=False, gate=True).verdict == "contradicted"
    for i in range(len(claim.gate)):
        gate = [each != i for each in range(len(claim.gate))]
        assert judged(claim, rule=False, gate=gate).verdict == "undecided"
        assert judged(claim, rule=True, gate=gate).verdict == "undecided"


def test_many_claims_have_a_gate() -> None:
    assert len(GATED) >= 90


# settings that cannot show what the claim says, with the numbers that such runs had, and a rule that fails in them
BLIND = {
    "invariance/1": {"resnet18: best accuracy from the first axis alone, %": 97.3},  # radii of the published code
    "nad/3, equalised": {"spread over bins, with pooling": 0.016, "spread by the finite test set alone": 0.016},
    "nad/22": {"indices that need more than 1000, lenet": 1},
    "nad/8, training error": {"train accuracy, lenet, original": 0.59},
    "alignment/5.3": {"samples on the spiral, GAN": 0.9, "covered, GAN": 0.99},  # nothing left to cover
    "alignment/5.4": {"samples near a centre, GAN": 0.9, "modes, GAN": 25},
    "alignment/5.6": {"samples near a centre, ALI": 0.13},
    "alignment/table5.3": {"error (%), DVB": 6.9},
    "alignment/table5.1": {"confidence of the classifier, GAN": 0.3},
    "linearization/4.2b": {"lowest training accuracy": 0.99, "smallest drift of KFAC between refreshes": 0.0},
    "linearization/4.6": {"worst final loss / plateau, EKFAC-ra": 5.3, "worst final loss / plateau, KFAC": 0.5},
    "linearization/5.2b": {"lowest tangent kernel alignment of the linear regime": 0.6},
    "function-space/4.6": {"last training loss of lin with the fewest images": 0.66},
    "function-space/4.4, advantage": {"largest last training loss of lin, lenet": 0.693},
    "function-space/table6.1": {"share of the gain kept, pre-trained minus random, fine-tuned": -0.01},
    "invariance/4": {"lenet, linear: lowest training accuracy, %": 51.0},
    "invariance/2": {"lenet: training accuracy at the end, %": 50.2},
    "invariance/12": {"gap at the smallest size, points": 0.0},
    "invariance/14, smallest rate": {"lr = 0.01: lowest mean training accuracy, %": 50.0},
    "invariance/a3, in time": {"lenet, sse: mean |l'(f)|, at the end": 0.8},
    "invariance/conjecture2": {"lenet: training accuracy at the end, %": 50.2},
    "nad/1, logistic regression": {"mean training accuracy, lenet": 0.51},
    "nad/11, LeNet without noise": {"mean accuracy, lenet, sigma 0": 0.5},
    "function-space/4.2, linearisation": {"largest last training loss of lin, lenet": 0.693},
    "function-space/C.3, atoms": {"overlap with images, MAML minus drawn weights": 0.0},
    "alignment/4.4": {"accuracy at the end, easy, random": 0.3},
    "alignment/A.8": {"high frequencies learned, depth 6": 0.1},
    "linearization/5.2, linear": {"share of the loss left, alpha = 100": 0.886},  # of 320,000 steps 12,000
}


@pytest.mark.parametrize("name", BLIND)
def test_a_setting_that_cannot_show_its_effect_is_refused(name: str) -> None:
    claim = BY_ID[name]
    net = next((each for each in ("lenet", "resnet18") if each in str(BLIND[name])), "") if claim.per_network else ""
    gate = [condition.of(net) for condition in claim.gate]
    given = {key: Estimate(value, 0.0) for key, value in BLIND[name].items()}
    answers = [each.holds(given) for each in gate if each.matches(given)]
    assert answers, "none of the conditions looks at these numbers"
    assert set(answers) != {True}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(ledger_json(ledger(KEPT)))  # type: ignore[no-any-return]


def test_every_number_has_an_error_or_the_reason_why_not(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for name, error in row["error"].items():
            assert (error is not None and error > 0) != (name in row["no_error"]), (row["id"], name)


def test_contradictions_are_of_the_published_setting_whole(rows: list[dict[str, Any]]) -> None:
    against = [row for row in rows if row["claim"] == "contradicted"]
    assert against
    for row in against:
        claim = BY_ID[row["id"]]
        assert (row["level"], row["stand_in"], claim.stand_in) == ("published size", "", ""), row["id"]
        each = claim.per_network and re.fullmatch(r"nets? \d/\d", row["scope"])  # one network fails it
        assert row["scope"] == "as published" or each, row["id"]
        assert row["replication"] != "agree", row["id"]
        deciding = [run for run in row["runs"] if run["claim"] == "contradicted"]
        assert all(set(run["gate_holds"]) == {True} for run in deciding), row["id"]
        assert claim.gate or claim.data == "none", f"{row['id']}: whether networks learned is not asked"


def test_no_row_is_decided_by_a_check_of_ours(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if all(run["level"] == "not counted" for run in row["runs"]):
            assert row["claim"] == "undecided", row["id"]


def test_networks_of_a_row_are_those_of_its_claim(rows: list[dict[str, Any]]) -> None:
    """A run may have others beside them, which say nothing of it."""
    for row in rows:
        claim = BY_ID[row["id"]]
        names = {name for each in row["networks"] for name in each.split(", ")}
        assert not claim.networks or names <= set(claim.networks), row["id"]
