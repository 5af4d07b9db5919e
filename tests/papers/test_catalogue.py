"""The catalogue of the papers: whole, within the options of the studies, and at peace with the published numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from biascope.reports import ledger, ledger_json
from biascope.studies import Estimate, studies
from biascope.studies.claims import Claim, claims, documents, experiments
from biascope.studies.conditions import all_hold

KEPT = Path(__file__).parents[2] / "reproductions"


def test_every_study_has_its_published_setting() -> None:
    named = {name for claim in claims() for name in claim.studies}
    assert sorted(named - set(experiments())) == []
    assert sorted(set(experiments()) - set(studies())) == []


@pytest.mark.parametrize("study", sorted(experiments()))
def test_an_experiment_names_options_and_values_of_its_study(study: str) -> None:
    experiment, found = experiments()[study], studies()[study]
    values: dict[str, Any] = found.values("paper")
    assert [name for name in experiment.options if name not in values] == []
    for name, want in (*experiment.size.items(), *experiment.smaller.items()):
        assert want > 0, name
        assert isinstance(values[name], int | float | tuple | list), name
    for name, want in experiment.same.items():
        kinds = (int, float) if isinstance(values[name], int | float) else (list, tuple, str)
        assert isinstance(want, kinds), name
    experiment.scope(values)


def test_claims_select_by_options_of_their_studies() -> None:
    for claim in claims():
        for name in claim.studies:
            assert set(claim.where) <= {option.name for option in studies()[name].options}, claim.id
        for each in claim.published:
            known = {option.name for name in claim.studies for option in studies()[name].options}
            assert set(each.where) <= known, claim.id


def test_a_claim_that_a_study_tests_has_a_rule_and_one_that_none_tests_says_why() -> None:
    assert [claim.id for claim in claims() if not claim.rule and not claim.why] == []
    assert [claim.id for claim in claims() if not (claim.statement.endswith(".") and claim.place)] == []


def test_the_main_claims_of_a_document_are_its_own() -> None:
    for key, document in documents().items():
        assert document.main, key
        assert set(document.main) <= {claim.id for claim in claims() if claim.paper == key}


def published(claim: Claim) -> list[tuple[str, dict[str, Estimate]]]:
    """What the document prints, as if it were a run; of each network whose rule it covers (gates ask for more)."""
    numbers = {each.number: Estimate(each.value, each.error or 0.0) for each in claim.published if each.rule}
    settings = [experiments()[name] for name in claim.studies if name in experiments()]
    networks = [net for each in settings for net in each.parts.get(each.networks, ())] if claim.per_network else [""]
    rules = {net: [each.of(net) for each in claim.rule] for net in networks} if claim.rule else {}
    return [(net, numbers) for net, rule in rules.items() if not any(each.missing(numbers) for each in rule)]


COVERED = [(claim, net, numbers) for claim in claims() for net, numbers in published(claim)]


@pytest.mark.parametrize(("claim", "net", "numbers"), COVERED, ids=[f"{c.id} {net}" for c, net, _ in COVERED])
def test_every_rule_accepts_the_published_data(claim: Claim, net: str, numbers: dict[str, Estimate]) -> None:
    rule = [each.of(net) for each in claim.rule]
    holds, text = all_hold(rule, numbers)
    assert holds is True, text


def test_the_published_data_test_covers_claims() -> None:
    assert len({claim.id for claim, _, _ in COVERED}) >= 35


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(ledger_json(ledger(KEPT)))  # type: ignore[no-any-return]


def test_nothing_is_contradicted_by_less_than_the_published_experiment(rows: list[dict[str, Any]]) -> None:
    """A reduced run, a stand-in, a check of ours or a network that did not learn never speaks against a document."""
    assert len(rows) >= 200
    for row in rows:
        against = [run for run in row["runs"] if run["claim"] == "contradicted"]
        assert all(run["level"] == "published size" for run in against), row["id"]
        for run in against:
            learned = zip(run["rule_holds"], run["gate_holds"])
            assert any(holds is False and gate is True for holds, gate in learned), row["id"]
        assert row["claim"] != "contradicted" or (against and row["level"] == "published size" and not row["stand_in"])


def test_a_rule_belongs_to_one_claim_alone() -> None:
    """No shared verdicts: two claims on the same numbers of the same runs ask different things."""
    asked = [(claim.studies, str(claim.where), claim.rule, claim.networks) for claim in claims() if claim.rule]
    assert len({str(each) for each in asked}) == len(asked)


def test_every_rule_finds_its_numbers_in_a_kept_run_or_the_claim_waits_for_one(rows: list[dict[str, Any]]) -> None:
    """A number that a study calls by another name now would leave its claim untested without a word."""
    waiting = [row["id"] for row in rows if not row["runs"] and "No run kept yet" not in row["why"]]
    cannot = [claim.id for claim in claims() if claim.why]
    assert sorted(set(waiting) - set(cannot)) == []
