"""Rows of the ledger: one per claim, the largest run decides for each network, and nothing smaller contradicts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from biascope.reports import ledger, ledger_json, ledger_page, summary
from biascope.reports.ledger_page import outcome
from biascope.reports.ledger_rows import Row, _decided, _rank
from biascope.studies import Estimate, Run, configure, execute
from biascope.studies.claims import Claim, Document, claims
from biascope.studies.judging import Judgement, Part
from biascope.studies.scope import Scope, Share

CLAIM = Claim("c", "nad", "1", "x rises.", ("nad/fig1",))


def judged(
    name: str, holds: dict[str, bool | None], epochs: int = 20, gate: bool = True, stand_in: str = ""
) -> Judgement:
    share = Share(epochs, 20, min(1.0, epochs / 20))
    parts = tuple(Part(net, outcome, gate, f"{name} {net}") for net, outcome in holds.items())
    return Judgement(CLAIM, Run(Path(name), {}, {}), Scope(shares={"epochs": share}, stand_in=stand_in), parts)


def row(*judgements: Judgement) -> Row:
    found = sorted(judgements, key=lambda each: (each.level != "published size", -each.scope.share))
    return Row(CLAIM, _decided(found), tuple(found))


def test_the_published_size_decides_over_smaller_runs() -> None:
    found = row(judged("small", {"a": True}, epochs=5), judged("whole", {"a": False}))
    assert (found.verdict, found.level) == ("contradicted", "published size")
    found = row(judged("small", {"a": False}, epochs=5), judged("whole", {"a": True}))
    assert (found.verdict, found.level, found.scope) == ("supported", "published size", "as published")


def test_a_larger_reduced_run_that_fails_is_not_hidden_by_a_smaller_one() -> None:
    found = row(judged("tiny", {"a": True}, epochs=1), judged("half", {"a": False}, epochs=10))
    assert found.verdict == "undecided"
    found = row(judged("tiny", {"a": True}, epochs=1), judged("half", {"a": None}, epochs=10))
    assert (found.verdict, found.scope) == ("supported", "epochs 1/20")


def test_each_network_has_its_own_verdict() -> None:
    found = row(judged("whole", {"a": True, "b": False}), judged("small", {"c": True}, epochs=5))
    assert {each.network: each.verdict for each in found.decided} == {
        "a": "supported", "b": "contradicted", "c": "supported",
    }  # fmt: skip
    assert found.verdict == "contradicted"
    assert found.sentence.startswith("supported for a, c; contradicted for b. ")


def test_of_two_equal_runs_the_one_that_contradicts_counts() -> None:
    assert row(judged("one", {"a": True}), judged("two", {"a": False})).verdict == "contradicted"


def test_what_did_not_learn_decides_nothing() -> None:
    assert row(judged("whole", {"a": False}, gate=False)).verdict == "undecided"
    assert row(judged("whole", {"a": False}, gate=False), judged("s", {"a": True}, epochs=2)).verdict == "supported"


def test_a_stand_in_says_so() -> None:
    found = row(judged("whole", {"a": True}, stand_in="digits instead of faces"))
    assert (found.verdict, found.level, found.stand_in) == ("supported", "stand-in", "digits instead of faces")
    assert row(judged("whole", {"a": False}, stand_in="digits")).verdict == "undecided"


def test_runs_are_joined_with_claims(tmp_path: Path) -> None:
    for name, sigma in (("a", 3.0), ("b", 2.0)):
        execute(Run.create(tmp_path / name, configure("nad/fig4a", overrides={"sigma": sigma})))
    rows = ledger(tmp_path)
    mine = next(each for each in rows if each.claim.id == "nad/4a")
    assert {each.run.path.name for each in mine.judgements} == {"a", "b"}
    assert mine.verdict == "supported"
    assert len({each.claim.id for each in rows}) == len(rows)
    assert summary(rows).startswith(f"{len(rows)} claims: ")
    named = {each["id"]: each for each in json.loads(ledger_json(rows))}
    fields = (
        "id document figure statement quote claim replication published measured error scope stand_in rule_set runs"
    )
    assert set(fields.split()) <= set(named["nad/4a"])
    assert {each["name"] for each in named["nad/4a"]["runs"]} == {"a", "b"}
    assert 'id="nad/4a"' in ledger_page(rows, tmp_path)


def test_a_claim_without_a_run_says_why() -> None:
    reasons = {each.claim.id: each.sentence for each in ledger("nowhere")}
    assert reasons["nad/4a"] == "No run kept yet: biascope run nad/fig4a --size paper"
    assert "No study yet." not in reasons.values()  # every claim that can be tested has a study
    assert all(reasons.values())


def test_a_number_without_an_error_says_why(tmp_path: Path) -> None:
    from biascope.reports.ledger_page import shown

    assert shown(Estimate(0.5, None, 1)) == "0.5 (one run: no error)"
    assert shown(Estimate(0.5, 0.0)) == "0.5 (exact)"
    assert shown(Estimate(1.0, 0.0, 3)) == "1 (the same in all 3)"
    assert "no error" not in shown(Estimate(0.5, 0.1, 3))


@pytest.mark.parametrize("at_odds", [True, False])
def test_numbers_that_agree_while_the_rule_fails_cannot_be_missed(at_odds: bool) -> None:
    from biascope.studies.claims import Published
    from biascope.studies.judging import Compared

    agree = Compared(Published("x", 1.0, 0.1), Estimate(1.0 if at_odds else 2.0, 0.0))
    found = Row(CLAIM, (), (replace(judged("whole", {"a": False}), compared=(agree,)),))
    assert found.at_odds is at_odds


def test_printed_numbers_without_a_run_are_shown_as_not_measured() -> None:
    rows = ledger("nowhere")
    printed = next(each for each in rows if each.claim.id == "nad/13-16")
    assert (printed.replication, printed.to_json()["published"]) == (
        "not measured", {each.number: each.value for each in printed.claim.published},
    )  # fmt: skip
    assert next(each for each in rows if each.claim.id == "nad/4a").replication == "none published"
    page = ledger_page([printed])
    assert "energy at multiples of 4, index 0 to 3, resnet18" in page
    assert "0.995" in page


def test_an_undecided_row_shows_the_largest_run() -> None:
    found = row(judged("whole", {"a": None}), judged("small", {"a": False}, epochs=5))
    assert (found.verdict, found.level) == ("undecided", "published size")


def on_networks(name: str, nets: list[str], commit: str = "abc") -> Judgement:
    claim = next(each for each in claims() if each.id == "nad/1, training accuracy")  # vgg11, resnet18, densenet121
    run = Run(Path(name), {"study": "nad/fig1", "options": {"net": nets}}, {"git": {"commit": commit, "dirty": False}})
    scope = Scope(parts={"net": Share(len(nets), 3, len(nets) / 3)})
    return Judgement(claim, run, scope, tuple(Part(net, True, True, "") for net in nets))


def test_support_by_some_of_the_networks_says_by_how_many() -> None:
    some, others = on_networks("a", ["vgg11"]), on_networks("b", ["resnet18", "densenet121"])
    one = Row(some.claim, _decided([some]), (some,))
    assert (one.partly, one.scope) == ("1 of 3 networks", "net 1/3")
    assert "supported, 1 of 3 networks" in ledger_page([one])
    assert "1 of these for some of their networks" in summary([one])
    both = Row(some.claim, _decided([some, others]), (some, others))
    assert (both.partly, both.scope) == ("", "as published")


def test_of_equal_runs_one_of_committed_code_goes_first() -> None:
    runs = sorted([on_networks("a", ["vgg11"], commit=""), on_networks("b", ["vgg11"])], key=_rank)
    assert [each.run.path.name for each in runs] == ["b", "a"]


def test_a_document_says_what_holds_what_does_not_and_what_is_open() -> None:
    document = Document("nad", "T", main=("c", "d"))
    fails = replace(judged("whole", {"a": False}), claim=replace(CLAIM, id="e", statement="Printed wrongly."))
    holds, open_ = judged("whole", {"a": True}), replace(judged("tiny", {"a": None}), claim=replace(CLAIM, id="d"))
    rows = [Row(each.claim, _decided([each]), (each,)) for each in (holds, open_, fails)]
    _, yes, no, unknown = outcome(rows, document)
    assert 'Holds: </strong>x rises (<a href="#c">Figure 1</a>).' in yes
    assert 'as printed: </strong><a href="#e">Figure 1</a>.' in no
    assert 'Open: </strong>x rises (<a href="#d">Figure 1</a>).' in unknown
    assert len(outcome(rows[1:2], document)) == 2


def test_other_networks_of_a_run_are_not_those_of_a_claim() -> None:
    claim = next(each for each in claims() if each.id == "nad/20")
    run = Run(Path("r"), {"study": "nad/fig20", "options": {"nets": ["mlp", "vgg11"]}}, {})
    decided = _decided([Judgement(claim, run, Scope(), (Part("", True, True, ""),))])
    assert [each.network for each in decided] == ["mlp"]


def test_a_sentence_says_what_kept_a_run_from_testing() -> None:
    judgement = judged("whole", {"a": False}, gate=False)
    parts = (replace(judgement.parts[0], missed="“accuracy” is not above 0.5"),)
    sentence = row(replace(judgement, parts=parts)).sentence
    assert "What has to hold first does not: “accuracy” is not above 0.5." in sentence
