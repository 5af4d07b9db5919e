"""The studies of lazy and hasty training at smoke size: their structure, and what must hold whatever the verdict."""

from pathlib import Path

import pytest
import torch

from biascope.studies import HeatMap, Run, StudyResult, configure, execute
from biascope_papers.lazy.capacity import labels_of, rbf_modes
from biascope_papers.lazy.quadratic import at_levels
from biascope_papers.lazy.supernat import regression
from claim_outcome import outcome


def run(tmp_path: Path, name: str, **overrides: object) -> StudyResult:
    return execute(Run.create(tmp_path / "run", configure(name, "smoke", seed=1, overrides=overrides)))


def test_fig5_1_non_linear_is_faster_and_better_on_the_quadrants_than_on_the_disks(tmp_path: Path) -> None:
    """Check 27, at a coarser size: disks above quadrants at training loss 0.5, and fewer steps."""
    result = run(tmp_path, "lazy/fig5.1")
    assert result.numbers["Delta loss on the disks at 0.5"].value > 0.02
    assert result.numbers["Delta loss on the quadrants at 0.5"].value < 0
    speed = result.numbers["steps, linear / non-linear, to 0.5"]
    assert speed.value - 2 * (speed.standard_error or 0) > 1
    maps = [figure for figure in result.figures if isinstance(figure, HeatMap)]
    assert {m.name for m in maps} == {"delta-0.6", "delta-0.5"}
    assert len(maps[0].z) == len(maps[0].z[0]) == 25
    assert execute(Run.resume(tmp_path / "run")) == result


def test_fig5_2_noise_wrong_labels_are_fitted_later_in_the_non_linear_regime(tmp_path: Path) -> None:
    """Checks 35 and 36 with a deep MLP: the sign of the effect, and the linearity of the lazy runs."""
    result = run(tmp_path, "lazy/fig5.2-noise")
    assert result.numbers["noisy loss at equal clean loss, non-linear minus linear"].value > 0.1
    assert result.numbers["tangent kernel alignment at the end, alpha = 100"].value > 0.98
    assert result.numbers["tangent kernel alignment at the end, alpha = 1"].value < 0.6
    assert [chart.name for chart in result.figures] == ["noise-loss", "noise-accuracy", "linearity"]
    best = result.numbers["best test loss once it has turned, non-linear minus linear"]
    assert (best.standard_error is None) == ("ended before its test loss turned" in result.measured)
    assert outcome("linearization/5.2b, levels", result.numbers) in {"holds", "open", "fails"}
    for alpha in ("1", "100"):
        assert result.numbers[f"rise of the noisy loss, alpha = {alpha}"].value > 0.1


def test_fig5_2_cscore_groups_are_learnt_in_the_order_of_their_scores(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/fig5.2-cscore")
    assert result.numbers["C-score, easiest group"].value > result.numbers["C-score, most difficult group"].value + 0.3
    groups = {series.label: series.y for series in result.figures[0].series}  # type: ignore[union-attr]
    for alpha in ("1", "100"):
        assert groups[f"group 1 of 5, alpha = {alpha}"][-1] > groups[f"group 5 of 5, alpha = {alpha}"][-1]


def test_figC_5_differences_add_up_at_equal_mean_loss(tmp_path: Path) -> None:
    """At equal mean training loss the differences of the groups must cancel: a check of the whole comparison."""
    result = run(tmp_path, "lazy/figC.5", seeds=1)
    gaps = [v.value for k, v in result.numbers.items() if k.startswith("loss of group ")]
    assert len(gaps) == 5
    assert sum(gaps) == pytest.approx(0.0, abs=1e-6)
    assert outcome("linearization/C.5", result.numbers) == "open"  # one seed has no error bar
    assert result.numbers["rank correlation of difficulty and loss, alpha = 100"].value > 0.8


def test_fig5_3_says_that_it_is_a_stand_in(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/fig5.3", seeds=1)
    assert result.measured.startswith("Stand-in")
    assert outcome("linearization/5.3a", result.numbers) in {"open", "gate"}  # one seed
    for series in result.figures[0].series:  # type: ignore[union-attr]
        assert min(series.y) < 0.7 or max(series.x) < 0.5  # the groups start near chance


def test_fig5_4_is_the_table_of_the_specification(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/fig5.4")
    parts = ("5.4, order", "5.4, noise", "5.4, spurious", "5.4.1")
    assert {outcome(f"linearization/{part}", result.numbers) for part in parts} == {"holds"}
    assert outcome("linearization/5.4.6 as printed", result.numbers) == "fails"  # a factor of 2 is missing in the print
    for level, hasty, slow in ((0.8, 0.94, 0.82), (0.6, 0.90, 0.65), (0.4, 0.86, 0.46), (0.2, 0.80, 0.26)):
        name = f"example 3, minority error at majority error {level:g}"
        assert result.numbers[f"{name}, non-linear"].value == pytest.approx(hasty, abs=0.01)
        assert result.numbers[f"{name}, linear"].value == pytest.approx(slow, abs=0.01)
    assert result.numbers["largest |gradient descent - closed form|"].value < 2e-3
    assert "the opposite order" in result.measured  # the aligned basis of example 2


def test_fig5_4_reverses_where_the_core_feature_is_weak() -> None:
    """Example 3 with lambda = 0.5: y~ = (29.6, 36.4), so the claim does not hold there."""
    from biascope.data import quadratic_example3

    task = quadratic_example3(lam=0.5)
    assert sorted(task.y_tilde[:2].tolist()) == pytest.approx([29.6, 36.4], abs=0.05)
    table = at_levels(task, 1e-3, 4001)
    assert not bool((table[0] > table[1]).all())


def test_figC_1_compares_the_effect_of_the_rate_with_that_of_alpha(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/figC.1", seeds=1, lin=0)
    assert outcome("linearization/C.1", result.numbers) == "open"  # one seed
    assert "noisy accuracy at equal clean loss, lr 0.05 minus lr 0.2" in result.numbers
    assert result.numbers["noisy loss at equal clean loss, alpha = 100 minus lr 0.2"].value < 0
    assert "noisy loss at equal clean loss, lr 0.05 minus lr 0.2" in result.numbers


def test_figC_1_leaves_out_a_rate_without_progress(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/figC.1", seeds=1, lin=0, steps="40,10", lrs="0.2,1e-6", alpha_steps=100)
    assert not any(name.startswith("noisy loss") for name in result.numbers)
    assert "lr 1e-06" in result.measured


def test_figC_3_runs_both_experiments_with_a_vgg(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/figC.3", seeds=1, steps="6,8")
    assert result.measured.startswith("vgg11-nobn of width 4")
    assert "noise-loss" in {figure.name for figure in result.figures}
    assert result.numbers["spread of the loss, non-linear minus linear"].standard_error is None  # one seed


def test_figC_9_dense_networks_do_not_flip_the_order(tmp_path: Path) -> None:
    result = run(tmp_path, "lazy/figC.9")
    for alpha in ("0.1", "10"):
        name = f"example 1, slope of the relative residual over the index, alpha = {alpha}"
        assert result.numbers[name].value > 0  # low index first in both regimes
    for level, expected in ((0.8, 0.91), (0.6, 0.80), (0.4, 0.655), (0.2, 0.445)):
        found = result.numbers[f"noise: difficult error at easy error {level:g}, alpha = 10"].value
        assert found == pytest.approx(expected, abs=0.05)
    assert outcome("linearization/C.9, order", result.numbers) == "fails"


def test_fig6_5_supernat_wins(tmp_path: Path) -> None:
    """Check 30 (here 10 seeds, 300 steps): below gradient descent in at least 90 %."""
    result = run(tmp_path, "lazy/fig6.5")
    assert {outcome(f"alignment/4.5{part}", result.numbers) for part in ("", ", freezing")} == {"holds"}
    weights = [result.numbers[f"weight on the noise features, {who}"].value for who in ("SuperNat", "gradient descent")]
    assert weights[0] < 0.5 * weights[1]


def test_fig6_5_regression_has_the_noise_it_says() -> None:
    train, y, test = regression(0, 0, 50, 10, 0.1, literal=False)
    noise = y - train[:, 0]
    inside = train[:, 1:] @ torch.linalg.lstsq(train[:, 1:], noise[:, None]).solution
    assert torch.allclose(inside[:, 0], noise)  # in the span of the noise features: a projection
    literal = regression(0, 0, 50, 10, 0.1, literal=True)[1] - train[:, 0]
    assert float(literal.norm() / noise.norm()) > 2  # the printed matrix has eigenvalues about n / d = 5
    assert test.shape == (500, 11)


def test_figB_3_the_size_of_the_identity_bound_is_set_by_the_cutoff(tmp_path: Path) -> None:
    """A share s of the largest eigenvalue kept as the least one bounds ||w|| by 1 / sqrt(s): the bound follows it."""
    small = {"N": 200, "P": 200, "draws": 10}
    found = [run(tmp_path / str(cut), "lazy/figB.3", cutoff=cut, **small) for cut in (1e-14, 1e-8)]
    tight, loose = (result.numbers["A = Id bound, c = 1, median"].value for result in found)
    assert tight > 20 * loose
    assert "set by the cutoff of 1e-08" in found[1].measured


def test_figB_3_the_identity_bound_blows_up_and_the_optimal_one_does_not(tmp_path: Path) -> None:
    """Check 31 at a smaller size."""
    result = run(tmp_path, "lazy/figB.3")
    assert {outcome(f"alignment/B.3{part}", result.numbers) for part in ("", ", optimal")} == {"holds"}
    identity, optimal, _ = result.figures[0].series  # type: ignore[union-attr]
    assert all(o <= i * (1 + 1e-9) for i, o in zip(identity.y, optimal.y))  # it is the optimum
    assert identity.y[0] == pytest.approx(1.0, abs=1e-6)  # white features: ||y|| sqrt(n) / n


def test_rbf_features_approximate_their_kernel_and_labels_have_two_classes() -> None:
    psi, values = rbf_modes(100, 20_000, 1.0, 1.0, seed=0)
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)
    exact = torch.exp(-((x[:, None] - x) ** 2))
    assert float((psi * values @ psi.T - exact).abs().max()) < 0.05
    mode, y, share = labels_of(psi)
    assert mode > 0  # on a short interval the first eigenfunction has one sign
    assert 0.1 <= share <= 0.5
    assert set(y.tolist()) == {-1.0, 1.0}
