"""Every study of the geometric invariance paper at a tiny size: structure, resuming, and what must come out."""

import json
from pathlib import Path
from typing import Any

import pytest

from biascope.studies import HeatMap, Run, StudyResult, configure, execute, studies
from biascope.studies.judging import judgements
from biascope.support.errors import InputError
from biascope_papers.gih import fig2_8
from claim_outcome import outcome

SWEEP: dict[str, Any] = {"n_train": 128, "n_test": 100, "epochs": 1, "networks": 16, "heads": 16, "engine": "vmap"}
TRACK: dict[str, Any] = {"networks": 16, "heads": 16, "runs": 3, "epochs": 2}
TINY: dict[str, dict[str, Any]] = {
    "gih/conjecture1": {"nets": "lenet", "networks": 12, "geometry_networks": 8, "groups": 4, "heads": 4},
    "gih/conjecture2": {**TRACK, "nets": "lenet", "per_class": 20},
    "gih/curvature": {"epochs": 2, "runs": 3},
    "gih/probes": {**SWEEP, "epochs": 1, "each": 8},
    "gih/proposition-a1": {"nets": "lenet", "networks": 8, "groups": 4},
    "gih/fig1": {**SWEEP, "nets": "lenet"},
    "gih/fig2": {**TRACK, "nets": "mlp", "per_class": 40},
    "gih/fig3": {**TRACK, "nets": "lenet", "n": 64, "large_epochs": 1},
    "gih/fig4": {**SWEEP, "nets": "lenet"},
    "gih/fig5": {**SWEEP, "nets": "lenet"},
    "gih/fig6": {"nets": "lenet", "networks": 16, "heads": 16, "per_class": 40, "counts": 2, "epochs": 1},
    "gih/fig7": {"networks": 300, "widths": "8"},
    "gih/fig8": {**TRACK, "nets": "mlp", "per_class": 40},
    "gih/fig9": {"networks": 4096},
    "gih/fig10": {**SWEEP, "nets": "mlp"},
    "gih/fig11": {**SWEEP, "points": 2},
    "gih/fig12": {**TRACK, "sizes": "32,64", "batch_size": 32},
    "gih/fig13": {**TRACK, "sizes": "32,64", "batch_size": 32},
    "gih/fig14": {**SWEEP, "rates": "0.5,0.2", "repeats": 2},
    "gih/fig15": {"networks": 2000},
    "gih/theory": {"networks": 200, "largest": 32},
    "gih/table1": {"n_train": 200, "networks": 16, "heads": 16, "rates": "50", "epochs": 1},
    "gih/table2": {"n_train": 200, "networks": 16, "heads": 16, "rates": "50", "epochs": 1},
}
Made = dict[str, tuple[Run, StudyResult]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, results = tmp_path_factory.mktemp("gih"), Made()
    for name, options in TINY.items():
        run = Run.create(folder / name.replace("/", "-"), configure(name, "smoke", overrides=options))
        results[name] = run, execute(run)
    return results


def test_every_figure_and_table_is_registered() -> None:
    ours = {name for name, study in studies().items() if study.paper == "invariance"}
    assert ours == set(TINY)
    for name in ours:
        for size in ("smoke", "laptop", "paper"):
            configure(name, size)
        assert studies()[name].values("smoke").get("source", "synthetic") == "synthetic"  # no download
        assert studies()[name].values("paper").get("side", 32) == 32


@pytest.mark.slow
def test_results_are_whole(made: Made) -> None:
    for name, (run, result) in made.items():
        assert result.figures, name
        assert result.numbers, name
        assert len(result.measured) > 60, name
        assert StudyResult.from_json(json.loads(json.dumps(result.to_json()))).numbers == dict(result.numbers), name
        assert run.finished
    judged = [name for name, (run, result) in made.items() if judgements(run, result.numbers)]
    assert len(judged) > len(made) / 2, judged  # small runs have not the networks of every claim


@pytest.mark.slow
def test_theory_holds_at_any_size(made: Made) -> None:
    """Fig. 7: the sampled Delta is the exact one up to its sampling error, and negative."""
    _, result = made["gih/fig7"]
    assert outcome("invariance/7, CNN", result.numbers) == "holds", result.measured
    ratios = [e.value for name, e in result.numbers.items() if "over the sampling error" in name]
    assert len(ratios) == 3
    assert all(0.5 < ratio < 2 for ratio in ratios)
    assert all(e.value < 0 for name, e in result.numbers.items() if "signed" in name)


@pytest.mark.slow
def test_theorems_as_printed(made: Made) -> None:
    """Directions and rates hold, factors do not; G without pooling is no multiple of I unless patches wrap."""
    numbers = made["gih/theory"][1].numbers
    found = {name: outcome(f"invariance/{name}", numbers) for name in (
        "linear regression", "linear regression, factor", "theorem 3.2", "theorem A.2, CNN", "theorem A.3",
        "corollary A.4, upper", "corollary A.4, lower", "lemma A.6, mean")}  # fmt: skip
    assert list(found.values()) == ["holds", "fails", "holds", "fails", "fails", "holds", "fails", "fails"], found


@pytest.mark.slow
def test_smallest_example(made: Made) -> None:
    _, result = made["gih/fig15"]
    assert outcome("invariance/15", result.numbers) != "fails", result.measured  # its error can leave it open
    assert result.numbers["eigenvalue 1 of 4 G / s^2 (exact: 3)"].value == pytest.approx(3, abs=0.4)


@pytest.mark.slow
def test_mlp_is_isotropic_and_lenet_is_not(made: Made) -> None:
    _, result = made["gih/fig9"]
    assert outcome("invariance/9, LeNet", result.numbers) == "holds", result.measured
    assert result.numbers["mlp: spread of the true eigenvalues / mean"].value < 0.1
    assert result.numbers["lenet: correlation with the covariance recursion, noise removed"].value > 0.97
    assert sum(isinstance(figure, HeatMap) for figure in result.figures) == 2


@pytest.mark.slow
def test_networks_that_learn_nothing_decide_nothing(made: Made) -> None:
    assert outcome("invariance/14, order", made["gih/fig14"][1].numbers) == "gate"


@pytest.mark.slow
def test_differences_are_taken_network_by_network(made: Made) -> None:
    run, result = made["gih/fig13"]
    gaps = []
    for how in ("steps", "batch"):
        kept = [run.load_arrays(f"{how} fixed lenet n=64 {kind} 0")["accuracy"][1:].mean(0) for kind in ("G", "flip")]
        gaps.append(100 * (kept[0] - kept[1]).double())
    by_hand = gaps[0] - gaps[1]
    found = result.numbers["gap with the steps fixed minus gap with the batch fixed, points"]
    assert found.value == pytest.approx(float(by_hand.mean()))
    assert found.standard_error == pytest.approx(float(by_hand.std() / 3**0.5))


@pytest.mark.slow
def test_rates_are_compared_that_were_fixed_beforehand(made: Made) -> None:
    assert "rate 0.5 minus smallest rate, mean test accuracy, points" in made["gih/fig14"][1].numbers


@pytest.mark.slow
def test_pictures_and_resuming(made: Made) -> None:
    pytest.importorskip("matplotlib")
    run, result = made["gih/fig1"]
    assert all((run.path / "figures" / f"decision-boundaries.{kind}").exists() for kind in ("png", "svg", "pdf"))
    kept = {file: file.stat().st_mtime_ns for file in (run.path / "arrays").glob("circles*")}
    again = execute(Run.resume(run.path))
    assert again.numbers == result.numbers
    assert kept == {file: file.stat().st_mtime_ns for file in kept}  # nothing was trained again


@pytest.mark.slow
def test_partial_runs_claim_no_more_than_they_judged(made: Made) -> None:
    """Every tiny run has fewer networks, boundaries or rates than the paper: its page says which."""
    for name, (_, result) in made.items():
        assert ("Not tested: " in result.measured) == (name not in ("gih/fig15", "gih/theory")), name
    assert "Not tested: networks mlp, resnet18, vit." in made["gih/fig3"][1].measured
    assert "boundaries quadratic, sinusoidal" in made["gih/fig10"][1].measured
    assert "networks resnet18; boundaries quadratic, sinusoidal; rates 1.0, 0.1, 0.01, 0.001" in (
        made["gih/fig14"][1].measured
    )
    assert "rates 30, 70, 90" in made["gih/table1"][1].measured


@pytest.mark.slow
def test_containment_and_rates_are_on_the_page(made: Made) -> None:
    for name in ("gih/fig2", "gih/fig8"):
        numbers = made[name][1].numbers
        for k in (8, 23, 77, 230):  # of 768
            assert 0 <= numbers[f"mlp: share of G^2 - G^0 within the first {k} eigenvectors of GSG"].value <= 1
            assert numbers[f"mlp: share of G^2 - G^0 within {k} random dimensions"].value < 0.5
    assert "Learning rates of Adam: mlp 0.001" in made["gih/fig8"][1].measured


def test_adams_rate_of_large_networks_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def spy(run: Run, networks: Any, options: Any, descent_of: Any, **more: Any) -> StudyResult:
        seen.update({net: descent_of(net).lr for net in networks})
        return StudyResult(measured=more["how"])

    monkeypatch.setattr(fig2_8, "correlations", spy)
    for i, (options, rate) in enumerate((({}, 1e-3), ({"large_lr": "1e-4"}, 1e-4))):
        execute(Run.create(tmp_path / str(i), configure("gih/fig8", "smoke", overrides=options)))
        assert seen == {"mlp": 1e-3, "lenet": 1e-3, "vgg11": 1e-3, "resnet18": rate}


@pytest.mark.slow
def test_baselines_are_on_the_page(made: Made) -> None:
    """Fig. 2 must show what unrelated positive matrices would give, and the sign of the first change."""
    _, result = made["gih/fig2"]
    labels = {series.label for figure in result.figures for series in figure.series}  # type: ignore[union-attr]
    assert {"Corr(G^t, I)", "Corr(G^t, G^0), same networks", "GSG randomly rotated", "Corr(G^t - G^0, GSG)"} <= labels
    assert "random vectors" in result.measured
    start = next(s for f in result.figures for s in f.series if s.label.startswith("Corr(G^t, G^0)"))  # type: ignore[union-attr]
    assert start.y[0] == pytest.approx(1.0)


@pytest.mark.slow
def test_panels_of_the_paper_are_on_the_page(made: Made) -> None:
    """Training accuracy over epochs beside the correlations (Figs 2, 8), and the curves of every size (Figs 12, 13)."""
    names = {name: [figure.name for figure in result.figures] for name, (_, result) in made.items()}
    assert "fitting-mlp" in names["gih/fig2"]
    assert "fitting-mlp" in names["gih/fig8"]
    for name in ("gih/fig12", "gih/fig13"):
        assert names[name] == ["gap", "velocity", "velocity-32", "fitting-32", "velocity-64", "fitting-64"]


def test_wrong_options_are_named(tmp_path: Path) -> None:
    for name, options, match in (
        ("gih/fig10", {"nets": "lenat"}, "lenat"),
        ("gih/fig10", {"boundaries": "cubic"}, "cubic"),
        ("gih/table1", {"rates": "120"}, "120"),
        ("gih/fig12", {"sizes": "20,10"}, "increasing"),
        ("gih/fig9", {"side": "8"}, "side must be at least 9"),
        ("gih/fig9", {"side": "18", "nets": "lenet"}, "divide evenly"),
    ):
        with pytest.raises(InputError, match=match):
            execute(Run.create(tmp_path / f"{match}", configure(name, "smoke", overrides=options)))
