"""Every spectral-bias study at smoke size: what must hold at any size, and that runs can be resumed."""

import math
from pathlib import Path

import pytest
import torch

from biascope.studies import HeatMap, Run, StudyResult, configure, execute, find
from biascope.studies.claims import claims
from biascope.studies.conditions import all_hold
from biascope.studies.judging import judgements
from biascope.studies.result import Estimate
from biascope.support import InputError
from biascope_papers.spectral import paths
from studies.smoke_runs import Results, smoke_runs

TINY: dict[str, dict[str, object]] = {
    "spectral/fig3.1": {},
    "spectral/fig3.2": {},
    "spectral/figA.1": {},
    "spectral/fig3.3": {"steps": 500},
    "spectral/fig3.4": {"seeds": 2, "steps": 120},
    "spectral/fig3.5": {"runs": 2},
    "spectral/fig3.6": {},
    "spectral/fig3.7": {"runs": 4, "steps": 300},
    "spectral/fig3.8": {"steps": 200},
    "spectral/fig3.9": {"runs": 2, "steps": 150},
    "spectral/figA.6": {"steps": 200},
    "spectral/figA.10": {"steps": 100, "runs": 2},
    "spectral/figA.12": {"classes": 2},
    "spectral/figA.13": {"steps": 150, "runs": 2},
    "spectral/volume": {},
    "spectral/theorem3.3": {},
    "spectral/propositionA.2": {},
    "spectral/propositionA.3": {},
}
EXACT = ("spectral/propositionA.2", "spectral/propositionA.3")


def verdict(claim: str, run: Run, result: StudyResult) -> str:
    """Of one claim, by a run."""
    return next(each.verdict for each in judgements(run, result.numbers) if each.claim.id == claim)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return smoke_runs(tmp_path_factory, TINY, TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_structure(results: Results, name: str) -> None:
    run, result = results[name]
    assert judgements(run, result.numbers), "no claim can be judged by this study's numbers"
    assert result.figures or name in EXACT
    assert len({figure.name for figure in result.figures}) == len(result.figures)
    for number in result.numbers.values():
        assert math.isfinite(number.value)
    for figure in result.figures:
        cells = (
            [v for row in figure.z for v in row]
            if isinstance(figure, HeatMap)
            else [v for s in figure.series for v in s.y]
        )
        assert all(math.isfinite(v) for v in cells), figure.name
    assert StudyResult.from_json(result.to_json()) == result
    assert find(name).paper == "alignment"
    if "data" in run.config["options"]:
        assert "stand in" in result.measured


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral/fig3.1", "spectral/fig3.6", "spectral/figA.6", "spectral/volume"])
def test_resumed_runs_say_the_same(results: Results, name: str) -> None:
    run, result = results[name]
    assert execute(Run.resume(run.path)).to_json() == result.to_json()


@pytest.mark.slow
def test_low_frequencies_first(results: Results) -> None:
    """Checks 10 to 12 at a small size."""
    run, result = results["spectral/fig3.1"]
    assert verdict("alignment/3.1a", run, result) == verdict("alignment/A.1", run, result) == "supported"
    for setting in ("equal", "growing"):
        arrays = run.load_arrays(setting)
        spectrum = arrays["spectrum"]  # [r, runs, m]
        assert (spectrum[0] < 0.5).all()
        assert (spectrum[-1, :, 0] > 0.8).all()
        assert (spectrum[-1, :, -1] < 0.5).all()
        norms = arrays["norms"]
        assert (norms[-1, :, 1:-1].mean(1) >= 2 * norms[0, :, 1:-1].mean(1)).all()
        assert (arrays["losses"][-1] < arrays["losses"][0]).all()


@pytest.mark.slow
def test_noise_in_parameters_hurts_high_frequencies_most(results: Results) -> None:
    """Check 13."""
    run, result = results["spectral/fig3.3"]
    assert result.numbers["rank correlation of k with the amplitude left"].value < 0
    left = run.load_arrays("network 0")["left"]
    assert torch.allclose(left[0], torch.ones_like(left[0]), atol=1e-4)
    assert float(left[-1, -1]) < 1


@pytest.mark.slow
def test_high_frequency_noise_dips(results: Results) -> None:
    _, result = results["spectral/fig3.4"]
    assert result.numbers["dip at k = 2, beta = 2"].value > 0
    low = result.numbers["best validation loss, k = 0.1, beta = 2"].value
    assert low > result.numbers["best validation loss, k = 2, beta = 2"].value
    _, result = results["spectral/fig3.5"]
    assert result.numbers["learned share of the first tenth at the dip"].value > 0.8
    assert result.numbers["learned share of the last half at the dip"].value < 0.4


@pytest.mark.slow
def test_exact_studies(results: Results) -> None:
    run, result = results["spectral/fig3.6"]
    assert verdict("alignment/3.6", run, result) == "supported"
    assert result.numbers["sign changes of the last"].value == 49
    run, result = results["spectral/theorem3.3"]
    assert verdict("alignment/theorem3.3", run, result) == "supported"
    assert result.numbers["networks that violate the chain of bounds"].value == 0
    run, result = results["spectral/volume"]
    # the share shrinks, but at this size a slope is -2.06 +- 0.12, not surely -2
    assert verdict("alignment/A.4-volume", run, result) == "undecided"
    slopes = [n for name, n in result.numbers.items() if name.startswith("log-log slope")]
    assert max(slope.value for slope in slopes) == pytest.approx(-2.06, abs=0.05)
    shares = [n.value for name, n in result.numbers.items() if name.startswith("volume, eps = 0.1")]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.slow
def test_petals_help(results: Results) -> None:
    """Check 14: a larger L makes the loss smaller; and on the manifold networks agree more than away from it."""
    _, result = results["spectral/fig3.8"]
    assert (
        result.numbers["mean squared error at the end, L = 8"].value
        < 0.8 * result.numbers["mean squared error at the end, L = 0"].value
    )
    _, result = results["spectral/fig3.7"]
    on, off = (result.numbers[f"disagreement on the {place}"].value for place in ("manifold", "square"))
    assert on <= off
    run, result = results["spectral/fig3.9"]
    assert run.load_arrays("run 0")["majority"].min() >= 0.5
    assert result.numbers["accuracy, k = 8, L = 0"].value >= result.numbers["majority baseline, k = 8"].value - 0.02


@pytest.mark.slow
def test_clip_limits_what_a_delta_shows(results: Results) -> None:
    _, result = results["spectral/figA.6"]
    small, large = (result.numbers[f"high frequencies learned, clip {c}"].value for c in ("0.1", "2"))
    assert small < 0.05 < large


@pytest.mark.slow
def test_classes_without_pairs_have_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "attack", lambda net, x, *_: x[:0])  # no image is turned into one of the class
    alone = {"classes": 2, "members": 1, "epochs": 1}
    run = Run.create(tmp_path / "run", configure("spectral/figA.12", "smoke", seed=0, overrides=alone))
    result = execute(run)
    assert list(result.numbers) == ["training accuracy of the network"]
    assert "predicts no class" in result.measured


def test_paths_connect_digits(results: Results) -> None:
    _, result = results["spectral/figA.12"]
    assert (
        result.numbers["share of pairs connected"].value
        >= result.numbers["share of pairs connected by the straight line"].value
    )
    assert result.numbers["how much longer than the straight line"].value >= 0


def test_a_slope_must_surely_be_steep() -> None:
    claim = next(claim for claim in claims() if claim.id == "alignment/A.4-volume")
    steep, flat, near = Estimate(-4.3, 0.1), Estimate(-1.0, 0.3), Estimate(-2.1, 0.1)

    def holds(*slopes: Estimate) -> bool | None:
        numbers = {f"log-log slope of the volume, eps = {i}": slope for i, slope in enumerate(slopes)}
        return all_hold(claim.rule, numbers)[0]

    assert holds(steep, steep) is True
    assert holds(steep, flat) is False
    assert holds(steep, near) is None  # -2.1 + 0.2 is above -2
    assert all_hold(claim.gate, {"thresholds without a slope": Estimate(1)})[0] is False


@pytest.mark.slow
def test_every_claim_of_the_chapter_can_be_judged_by_its_study(results: Results) -> None:
    """Every rule's numbers are among those that a study of it returns (the minimum of 3.4 needs the paper's k)."""
    for claim in claims():
        for name in set(claim.studies) & set(TINY):
            run, result = results[name]
            assert claim.rule
            tested = claim.tested_by(name, run.config["options"], result.numbers)
            assert tested or claim.id == "alignment/3.4, minimum", claim.id


@pytest.mark.slow
def test_a_network_that_has_not_learnt_is_not_compared_with_neighbours(tmp_path: Path) -> None:
    """After five steps its map is flat: less high frequency than any neighbours', which says nothing."""
    config = configure("spectral/figA.13", "smoke", seed=0, overrides={"steps": 5, "runs": 2})
    run = Run.create(tmp_path / "run", config)
    result = execute(run)
    assert result.numbers["training accuracy of the network"].value < 0.95
    assert verdict("alignment/A.13", run, result) == "undecided"


@pytest.mark.slow
def test_one_neighbour_is_perfect_on_its_own_data(results: Results) -> None:
    run, _ = results["spectral/figA.13"]
    assert (run.load_arrays("heat maps")["accuracy"][0] == 1).all()


def test_every_row_of_the_chapter_has_a_study() -> None:
    for name in TINY:
        study = find(name)
        assert study.values("paper")
        assert study.summary
    with pytest.raises(InputError, match="spectral/fig3"):
        find("spectral/fig3.11")
