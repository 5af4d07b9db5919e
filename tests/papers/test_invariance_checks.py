"""Checks 17 to 22 of the geometric invariance paper: small versions that show the effect, and what the kept runs say.

The small versions have LeNet on 16 x 16 pixels where the paper has ResNet18 or ViT on 32 x 32; their sizes were chosen
so that the effect shows within a minute. Where a kept run at a larger size says otherwise, its test says so.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from biascope.studies import Run, StudyResult, configure, execute, load_result
from biascope.studies.rejudge import rejudge
from claim_outcome import outcome

KEPT = Path(__file__).parents[2] / "reproductions"
G = {"networks": 64, "heads": 32}


def small(tmp_path: Path, name: str, **options: Any) -> tuple[Run, StudyResult]:
    run = Run.create(tmp_path / "r", configure(name, "smoke", overrides={**G, **options}))
    return run, execute(run)


def arrays(name: str, key: str) -> dict[str, Tensor]:
    return Run.open(KEPT / name).load_arrays(key)


def ranks(indices: Tensor, accuracy: Tensor) -> list[float]:
    """Rank correlation of index and accuracy [repeats, indices] for every repeat, by SciPy alone."""
    return [float(spearmanr(indices.numpy(), row.numpy()).statistic) for row in accuracy]


def lead(a: Tensor, b: Tensor) -> float:
    """Mean of a - b over its standard error, repeat by repeat."""
    gap = (a - b).double()
    return float(gap.mean() / (gap.std() / len(gap) ** 0.5))


# ------------------------------------------------------------------------------------- 17: accuracy down the spectrum


@pytest.mark.slow
def test_accuracy_falls_for_lenet_and_not_for_the_mlp(tmp_path: Path) -> None:
    sizes = {"nets": "mlp,lenet", "stride": 51, "n_train": 1000, "n_test": 500, "epochs": 10}
    run, result = small(tmp_path, "gih/fig10", **sizes)
    lenet, mlp = (run.load_arrays(f"accuracy {net}") for net in ("lenet", "mlp"))
    assert max(ranks(lenet["indices"], lenet["linear"])) < 0
    assert lead(lenet["linear"][:, 0], lenet["linear"][:, -1]) > 2
    assert float((lenet["linear"][:, 0] - lenet["linear"][:, -1]).mean()) > 0.2
    assert abs(float((mlp["linear"][:, 0] - mlp["linear"][:, -1]).mean())) < 0.05
    assert outcome("invariance/10, linear", result.numbers, "lenet") != "fails", result.measured
    assert outcome("invariance/10, MLP", result.numbers) != "fails", result.measured  # three seeds leave it open


def test_kept_accuracy_falls_for_lenet_at_the_papers_size() -> None:
    """And the sooner, the harder the boundary; the MLP has no preference and learns no sine."""
    name = "gih-fig10-paper-mlp-lenet-h200"
    kept, mlp = arrays(name, "accuracy lenet"), arrays(name, "accuracy mlp")
    reach = {}
    for boundary in ("linear", "quadratic", "sinusoidal"):
        found = ranks(kept["indices"], kept[boundary])
        assert len(found) == 3
        assert max(found) < -0.1
        assert lead(kept[boundary][:, 0], kept[boundary][:, -1]) > 10
        reach[boundary] = float((kept[boundary] - 0.5).mean())
    assert reach["linear"] > 2 * reach["quadratic"] > 2 * reach["sinusoidal"]
    for boundary in ("linear", "quadratic"):
        assert abs(float((mlp[boundary][:, 0] - mlp[boundary][:, -1]).mean())) < 0.01
    assert float(mlp["sinusoidal"].mean(0).max()) < 0.55
    _, result, _ = load_result(KEPT / name)
    for boundary in ("linear", "quadratic", "sinusoidal"):
        assert outcome(f"invariance/10, {boundary}", result.numbers, "lenet") == "holds"
    assert "Learned in no direction and left out: mlp sinusoidal." in result.measured
    assert "Not tested: networks resnet18, vit." in result.measured  # the check asks for more


def test_kept_accuracy_of_resnet18_falls_at_the_linear_boundary_alone() -> None:
    """At the quadratic one it is lowest in the middle and highest along the last directions."""
    kept = arrays("gih-fig10-paper-resnet18-h200", "accuracy resnet18")
    assert max(ranks(kept["indices"], kept["linear"])) < -0.7
    assert min(ranks(kept["indices"], kept["quadratic"])) > 0
    mean = kept["quadratic"].mean(0)
    assert 0 < int(mean.argmin()) < len(mean) // 2
    assert float(mean[-2:].mean()) > float(mean[1:-3].max()) + 0.1
    numbers = load_result(KEPT / "gih-fig10-paper-resnet18-h200")[1].numbers
    found = [outcome(f"invariance/10, {boundary}", numbers, "resnet18") for boundary in ("linear", "quadratic")]
    assert found == ["holds", "fails"]


@pytest.mark.slow
def test_harder_boundaries_fall_sooner(tmp_path: Path) -> None:
    """Fig. 4 on images that stand in for CIFAR-10, without label noise, whose ceiling alone would make it so."""
    sizes = {"boundaries": "linear,quadratic", "stride": 153, "n_train": 1500, "n_test": 500, "epochs": 8, "noise": 0.0}
    _, result = small(tmp_path, "gih/fig4", nets="lenet", **{**sizes, "networks": 48})
    curves = {series.label: torch.tensor(series.y) - 50 for series in result.figures[0].series}  # type: ignore[union-attr]
    reach = {name: float(curve.mean() / curve.max()) for name, curve in curves.items()}
    gap = result.numbers["lenet: reach, linear minus quadratic"]
    assert gap.standard_error is not None
    assert gap.value > 2 * gap.standard_error
    assert gap.value == pytest.approx(reach["linear"] - reach["quadratic"], abs=1e-6)
    for boundary in ("linear", "quadratic"):
        assert result.numbers[f"lenet, {boundary}: Spearman(index, accuracy)"].value < 0


# --------------------------------------------------------------------------------------------- 18: simplicity contest


@pytest.mark.slow
def test_circle_takes_over_as_the_linear_feature_moves_down(tmp_path: Path) -> None:
    sizes = {"nets": "lenet", "stride": 128, "n_train": 4000, "n_test": 500, "epochs": 20, "networks": 128}
    run, result = small(tmp_path, "gih/fig5", **sizes)
    _, linear, circle = run.load_arrays("contest lenet")["accuracy"].unbind(-1)
    assert lead(linear[:, 0], circle[:, 0]) > 2
    assert lead(circle[:, -1], linear[:, -1]) > 2
    assert lead(linear[:, 0], linear[:, -1]) > 2
    # that the circle's own accuracy rises is not shown at this size: one of the three networks fails along the last
    assert float((circle[:, -1] - circle[:, 0]).mean()) > 0
    assert result.numbers["lenet: Spearman(index, linear accuracy)"].value < 0


def test_kept_contest_holds_for_resnet18_and_the_mlp_and_not_for_lenet() -> None:
    found = {net: arrays("gih-fig5-paper-h200", f"contest {net}") for net in ("mlp", "lenet", "resnet18")}
    parts = {net: each["accuracy"].unbind(-1)[1:] for net, each in found.items()}
    for linear, circle in parts.values():
        assert lead(linear[:, 0], circle[:, 0]) > 2
    linear, circle = parts["resnet18"]
    down, up = (torch.tensor(ranks(found["resnet18"]["indices"], rows)) for rows in (linear, circle))
    assert lead(-down, torch.zeros(5)) > 2
    assert lead(up, torch.zeros(5)) > 2
    assert lead(circle[:, -1], linear[:, -1]) > 2
    linear, circle = parts["mlp"]
    assert float(linear.mean(0).min()) > 0.95  # stays linear at every index
    assert float(circle.mean(0).max()) < 0.55
    assert float(parts["lenet"][1][:, -1].max()) < 0.55  # LeNet: along the last direction the circle does not take over
    assert float(parts["lenet"][0][:, -1].max()) < 0.55  # nor is the linear feature learnt there
    numbers = load_result(KEPT / "gih-fig5-paper-h200")[1].numbers
    found = [outcome("invariance/5, circle wins", numbers, net) for net in ("lenet", "resnet18")]
    assert found == ["gate", "holds"]  # LeNet has learnt nothing there


# ------------------------------------------------------------------------------------ 19: velocity, aligned and flipped


@pytest.mark.slow
def test_geometry_moves_on_aligned_data_and_not_on_flipped_ones(tmp_path: Path) -> None:
    sizes = {"nets": "lenet", "n": 300, "runs": 5, "epochs": 150, "probes": 4, "batch_size": 64}
    _, result = small(tmp_path, "gih/fig3", **sizes)
    gap = result.numbers["lenet: mean velocity, G minus flip(G)"]
    assert gap.standard_error is not None
    # one, not two: among five flipped networks one may move, and rounding, which differs between CPUs, decides which;
    # two standard errors are reached at the published size, below
    assert gap.value > gap.standard_error
    slow, fast = (result.numbers[f"lenet: mean velocity, {kind} covariance"].value for kind in ("flip(G)", "G"))
    assert fast > 2 * slow


def test_kept_velocities_at_the_papers_size() -> None:
    """From the numbers of the run: its gradients are too large to keep."""
    _, result, _ = load_result(KEPT / "gih-fig3-paper-mlp-lenet-h200")
    velocity = {(net, kind): result.numbers[f"{net}: mean velocity, {kind} covariance"].value
                for net in ("mlp", "lenet") for kind in ("G", "flip(G)")}  # fmt: skip
    gap = result.numbers["lenet: mean velocity, G minus flip(G)"]
    assert gap.standard_error is not None
    assert gap.value == pytest.approx(velocity["lenet", "G"] - velocity["lenet", "flip(G)"])
    assert gap.value > 2 * gap.standard_error
    assert velocity["lenet", "G"] > 10 * velocity["lenet", "flip(G)"]
    assert abs(velocity["mlp", "G"] / velocity["mlp", "flip(G)"] - 1) < 0.25


# ----------------------------------------------------------------------------------------- 20: steps against samples


def test_kept_gap_does_not_return_with_a_fixed_number_of_steps() -> None:
    """Laptop size, LeNet, up to 2000 examples: check 20 does not hold there, on a stand-in for ResNet18."""
    _, batch, _ = load_result(KEPT / "gih-fig12-laptop-cpu")
    _, steps, _ = load_result(KEPT / "gih-fig13-laptop-cpu")
    for kept in (batch, steps):
        gate = kept.numbers["gap at the smallest size, points"]
        assert gate.value == pytest.approx(kept.numbers["n = 500: gap in training accuracy, points"].value)
    shrinks = batch.numbers["gap at the smallest size minus gap at the largest, points"]
    returns = steps.numbers["gap with the steps fixed minus gap with the batch fixed, points"]
    for estimate, result in ((shrinks, batch), (returns, steps)):
        assert estimate.standard_error is not None
        assert estimate.value < 2 * estimate.standard_error
        assert outcome(f"invariance/{12 if result is batch else 13}", result.numbers) != "holds"
    fixed, plain = (steps.numbers[f"n = 2000{how}: gap in training accuracy, points"].value
                    for how in ("", ", batch size fixed"))  # fmt: skip
    assert returns.value == pytest.approx(fixed - plain)
    assert plain == pytest.approx(
        batch.numbers["n = 2000: gap in training accuracy, points"].value
    )  # the same networks


# ------------------------------------------------------------------------------------------------------- 21: circles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "sizes"), [("mlp", {"side": 8, "n_train": 3000}), ("lenet", {"side": 16, "n_train": 4000})]
)
def test_circles_are_learnt_where_both_axes_are_aligned(tmp_path: Path, net: str, sizes: dict[str, int]) -> None:
    """The MLP learns both sets, LeNet (for ResNet18) only the aligned one."""
    published = {"inner": 0.25, "radius": 0.0}  # the radii of the authors' code
    sizes = {**sizes, **published, "random_pairs": 0}
    run, _ = small(tmp_path, "gih/fig1", nets=net, n_test=500, epochs=20 if net == "mlp" else 15, seeds=3, **sizes)
    aligned, other = (float(run.load_arrays(f"circles {net} {name}")["test"].mean()) for name in "AB")
    assert aligned > 0.9
    assert other > 0.9 if net == "mlp" else other < 0.6


def test_kept_circles_are_not_learnt_at_the_papers_size() -> None:
    """10,000 examples, the published code's radii and noise: check 21 does not hold; one axis alone would be enough."""
    test = {(net, name): arrays("gih-fig1-paper-h200", f"circles {net} {name}")["test"]
            for net in ("mlp", "resnet18") for name in "AB"}  # fmt: skip
    assert all(len(each) == 5 for each in test.values())
    assert float(test["resnet18", "A"].mean()) < 0.9  # check: about 1
    assert float(test["resnet18", "B"].mean()) > 0.6  # check: near chance
    assert max(float(test["mlp", name].mean()) for name in "AB") < 0.6  # check: about 1
    numbers = load_result(KEPT / "gih-fig1-paper-h200")[1].numbers
    assert outcome("invariance/1", numbers, "resnet18") == "gate"


def test_kept_circles_are_learnt_in_both_planes_with_half_the_noise() -> None:
    """Half the noise, at which the MLP learns both sets: ResNet-18 does so too, where the paper has it fail on D_B."""
    name = "gih-fig1-paper-sigma-0.5-h200"
    for net in ("mlp", "resnet18"):
        for plane in "AB":
            test = arrays(name, f"circles {net} {plane}")["test"]
            assert len(test) == 5
            assert float(test.min()) > 0.99  # more than the first axis alone allows
    assert outcome("invariance/1", load_result(KEPT / name)[1].numbers, "resnet18") == "gate"


# ------------------------------------------------------------------------------------------------------- 22: pruning


@pytest.mark.parametrize(
    ("name", "net", "rates"),
    [
        ("gih-table1-paper-lenet-h200", "lenet", [30, 50, 70, 90]),
        ("gih-table1-paper-resnet18-h200", "resnet18", [30, 50, 70, 90]),
        ("gih-table2-laptop-cpu", "lenet", [10, 50, 90]),
    ],
)
def test_kept_pruning_by_the_score_loses_at_every_rate(name: str, net: str, rates: list[int]) -> None:
    """Check 22 expects +0.6 to +2 points at each rate: it does not hold with fewer epochs than published."""
    kept, (_, result, _) = arrays(name, f"table {net}"), load_result(KEPT / name)
    assert kept["rates"].tolist() == rates
    for rate, (score, random) in zip(rates, kept["accuracy"]):
        gain = float(score.mean() - random.mean())
        assert gain < 0
        found = result.numbers[f"{net}, {rate} % removed, score minus random"]
        assert found.value == pytest.approx(gain)
        error = (score.var() / len(score) + random.var() / len(random)).sqrt()
        assert found.standard_error == pytest.approx(float(error))
    assert outcome(f"invariance/{name[4:10]}", result.numbers, net) == "fails"


# ------------------------------------------------------------------------------------------- verdicts and their arrays


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gih-fig5-paper-h200",
        "gih-fig5-laptop-cpu",
        "gih-fig10-paper-mlp-lenet-h200",
        "gih-fig10-paper-resnet18-h200",
        "gih-fig10-laptop-cpu",
        "gih-fig14-laptop-cpu",
        "gih-table1-paper-lenet-h200",
        "gih-table1-paper-resnet18-h200",
        "gih-table2-laptop-cpu",
    ],
)
def test_kept_numbers_follow_from_the_kept_arrays(tmp_path: Path, name: str) -> None:
    """Nothing is trained, no data and no G are needed; older runs have kept more numbers than studies compute now."""
    shutil.copytree(KEPT / name, tmp_path / name)
    _, told, _ = load_result(KEPT / name)
    judged = rejudge(tmp_path / name)
    assert judged.numbers
    assert judged.numbers == {name: told.numbers[name] for name in judged.numbers}
