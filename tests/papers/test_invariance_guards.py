"""Geometric invariance: what the studies refuse by name, what they say they have not tested, and honest errors."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from biascope.studies import Run, StudyResult, configure, execute
from biascope.studies.conditions import Condition
from biascope.studies.estimates import above
from biascope.studies.result import Estimate
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope_papers.gih import fig3_12_13, fig4_11, fig6, fig10_14, geometries, sets
from biascope_papers.gih.fig3_12_13 import Pair
from biascope_papers.gih.fig4_11 import chance_of_one, labels_along, reach_gap
from biascope_papers.gih.fig9_15 import true_spread
from biascope_papers.gih.geometries import Geometry
from biascope_papers.gih.sets import stand_in
from claim_outcome import outcome


def judged(folder: Path, name: str, **options: Any) -> StudyResult:
    return execute(Run.create(folder / "r", configure(name, "smoke", overrides=options)))


# ----------------------------------------------------------------------------------------- options refused by name

FEW = {"networks": "4", "heads": "4"}  # where G is made before the option is looked at


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("gih/fig5", {"plane": "3,3"}, "plane=3,3: different eigenvectors are needed, with indices from 0 to 255"),
        ("gih/fig5", {"plane": "300,301"}, "plane=300,301: .* from 0 to 255"),
        ("gih/fig5", {"plane": "-1,2"}, "plane=-1,2"),
        ("gih/fig5", {"plane": "0,255"}, "stride=255, plane=0,255: no direction is left"),
        ("gih/fig1", {"u2": "0"}, "u1=0, u2=0: different eigenvectors are needed"),
        ("gih/fig1", {"u2": "255"}, "u1=0, u2=255: .* from 0 to 254"),  # the last one is D_B's
        ("gih/fig1", {"u1": "300"}, "u1=300"),
        ("gih/fig4", {"stride": "0"}, "stride must be at least 1, not 0"),
        ("gih/fig5", {"stride": "0"}, "stride must be at least 1, not 0"),
        ("gih/fig10", {"stride": "0"}, "stride must be at least 1, not 0"),
        ("gih/fig10", {"stride": "-3"}, "stride must be at least 1, not -3"),  # had meant: the last direction alone
        ("gih/fig14", {"stride": "0"}, "stride must be at least 1, not 0"),
        ("gih/fig11", {"points": "1"}, "points must be at least 2, not 1"),
        ("gih/fig6", {"counts": "0"}, "counts=0: a number from 1 to 768"),
        ("gih/fig14", {"rates": "0"}, "rates=.*above 0"),
        ("gih/fig7", {"exact_widths": "8"}, "exact_widths=.*two or more increasing"),
        ("gih/fig7", {"exact_widths": "8,4"}, "exact_widths=.*two or more increasing"),
        ("gih/fig7", {"networks": "1"}, "networks must be at least 2"),
        ("gih/fig7", {"widths": "0"}, "widths must be at least 1"),
        ("gih/fig1", {**FEW, "radius": "-1"}, "radii 2 and -1: the second circle must be the outer one"),
        ("gih/fig1", {**FEW, "radius": "0.25"}, "the second circle must be the outer one"),
        ("gih/fig1", {**FEW, "sigma": "-1"}, "sigma must be at least 0, not -1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "runs": "0"}, "runs must be at least 1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "epochs": "0"}, "epochs must be at least 1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "micro": "0"}, "micro must be at least 1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "probes": "0"}, "probes must be at least 1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "clip_norm": "-1"}, "clip_norm must be at least 0, not -1"),
        ("gih/fig2", {**FEW, "nets": "mlp", "per_class": "0"}, "per_class must be at least 1"),
        ("gih/fig3", {**FEW, "nets": "mlp", "batch_size": "-5"}, "batch_size must be at least 1"),
        ("gih/fig4", {**FEW, "noise": "-1"}, "noise must be at least 0, not -1"),  # labels had been NaN
        ("gih/fig4", {**FEW, "repeats": "0"}, "repeats must be at least 1"),
        ("gih/fig5", {**FEW, "eps": "0"}, "eps must be at least 1e-12"),
        ("gih/fig9", {"networks": "0"}, "networks must be at least 4"),
        ("gih/fig13", {**FEW, "batch_size": "0"}, "batch_size must be at least 1"),
        ("gih/fig15", {"groups": "1"}, "groups must be at least 2"),
        ("gih/fig15", {"s": "-1"}, "s must be at least 1e-12"),
        ("gih/table1", {"n_train": "0"}, "n_train must be at least 1"),
        ("gih/table1", {**FEW, "n_train": "50", "rates": "99"}, "99 % of 50 images leave none"),
    ],
)
def test_options_that_make_no_sense_are_named(tmp_path: Path, name: str, options: dict[str, str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        judged(tmp_path, name, **options)


def test_only_orthonormal_directions_are_planted() -> None:
    u, v = torch.eye(6)[:2]
    w, c = torch.zeros(1, 6), torch.tensor([[0.6, 0.8]])
    assert torch.equal(sets.planted(w, torch.stack([u, v]), c), torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0, 0.0]]))
    for wrong in ([u, u], [u, 2 * v], [u, (u + v) / 2**0.5]):
        with pytest.raises(InputError, match="orthonormal"):
            sets.planted(w, torch.stack(wrong), c)


def test_images_that_are_not_there_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part (a) of Fig. 11 would have fewer than part (b), and than the text says."""
    few = stand_in(100, 16, 0, "train").x
    monkeypatch.setattr(fig4_11, "subset", lambda *_: (few, few))
    with pytest.raises(InputError, match="n_train=256: there are 100 training images"):
        judged(tmp_path, "gih/fig11")


# ----------------------------------------------------------------------------------- nothing to compare, nothing tested


@pytest.mark.parametrize(("counts", "verdict"), [(1, "open"), (3, "holds")])
def test_no_removal_is_not_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: int, verdict: str
) -> None:
    def spy(run: Run, key: str, factory: Any, made: Sequence[Any], tests: Sequence[Any], *_: Any, **more: Any) -> Any:
        n = len(made)  # guided first, then random
        return torch.ones(n), torch.linspace(0.9, 0.6, n)[:, None].repeat(1, len(tests))

    monkeypatch.setattr(fig6, "train_tasks", spy)
    result = judged(tmp_path, "gih/fig6", counts=counts, networks=8, heads=8, per_class=20)
    if counts > 1:  # the accuracy of the whole images is a gate, and made up here
        assert (
            outcome("invariance/6", {**result.numbers, "lenet, 0 removed, guided, %": Estimate(90, 1)}, "lenet")
            == verdict
        )
    else:
        assert result.numbers["lenet: guided minus random, mean over removals, points"].standard_error is None
    assert "nan" not in result.measured
    assert not any(math.isnan(number.value) for number in result.numbers.values())
    assert ("nothing to compare" in result.measured) == (counts == 1)


def test_elimination_in_the_order_of_the_published_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed are eigenvectors of GSG, largest first; the text is the default, and the claim says which."""
    removed = {}

    def spy(
        run: Run, net: str, train: Any, test: Any, S: Tensor, guided: Tensor, shares: Tensor, ks: Any, *_: Any
    ) -> Any:
        removed[run.config["options"]["directions"]] = (S, guided, shares)
        return torch.rand(2, 3, len(ks), generator=generator(0, "accuracy"))

    monkeypatch.setattr(fig6, "eliminate", spy)
    told = {}
    for way in ("generalised", "gsg"):
        told[way] = judged(tmp_path / way, "gih/fig6", directions=way, networks=300, heads=8, per_class=20).measured
        run = Run.open(tmp_path / way / "r")
        G = geometries.Drawn(networks=300, heads=8).geometry(run, "lenet", (3, 16, 16), norm=False).matrix
        S, guided, shares = removed[way]
        assert torch.allclose(guided @ guided.T, torch.eye(768, dtype=torch.float64), atol=1e-6)
        energies = ((guided @ G @ S @ G) * guided).sum(1)  # along each direction, in the order of removal
        assert bool((energies.diff() <= 1e-9 * energies[0]).all()) == (way == "gsg")
        assert bool((shares.diff() > -1e-9).all())
    assert torch.allclose(removed["gsg"][0], removed["generalised"][0])
    assert told["generalised"].endswith(" Not tested: networks resnet18, vit; images cifar10.")
    assert told["gsg"].endswith("; directions generalised eigenvectors of S and G (the text).")
    with pytest.raises(InputError, match="directions"):
        judged(tmp_path / "none", "gih/fig6", directions="code")


def falling(run: Run, key: str, net: str, G: Any, indices: Sequence[int], *_: Any) -> Any:
    """Accuracies [repeats, directions] that fall with the index, the lower the smaller the rate in the key."""
    height, repeats = 0.1 if key == "lr=0.1" else 0.0, run.config["options"]["repeats"]
    noise = torch.randn(repeats, 1, generator=generator(0, key))
    test = torch.linspace(0.95 - height, 0.6 - height, len(indices)).repeat(repeats, 1) + 0.001 * noise
    return torch.ones_like(test), test


def fallen(run: Run, net: str, train: Tensor, test: Tensor, U: Tensor, *_: Any) -> Any:
    accuracies = falling(run, "relabel", net, None, range(len(U)))
    return (*accuracies, accuracies[1])


@pytest.mark.parametrize(
    ("name", "few", "enough", "options"),
    [
        ("gih/fig10", {"stride": 128}, {"stride": 85}, {"nets": "lenet"}),
        ("gih/fig11", {"points": 2}, {"points": 4}, {"networks": 8, "heads": 8}),
        ("gih/fig14", {"stride": 128}, {"stride": 85}, {"rates": "0.5,0.1"}),
    ],
)
def test_few_directions_have_no_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    few: Mapping[str, int],
    enough: Mapping[str, int],
    options: Mapping[str, Any],
) -> None:
    """Two or three directions, perfectly in order in each of three repeats, decide nothing; four do."""
    for module in (fig10_14, fig4_11):
        monkeypatch.setattr(module, "sweep_directions", falling)
    monkeypatch.setattr(fig4_11, "sweep_labels", fallen)
    short = judged(tmp_path / "few", name, **few, **options, repeats=3)
    claim = {"gih/fig10": "10, linear", "gih/fig11": "11, isotropic", "gih/fig14": "14, order"}[name]
    net = "lenet" if name == "gih/fig10" else ""
    assert outcome(f"invariance/{claim}", short.numbers, net) == "open"
    assert "too few for a rank correlation" in short.measured
    long = judged(tmp_path / "enough", name, **enough, **options, repeats=3)
    assert outcome(f"invariance/{claim}", long.numbers, net) == "holds"
    assert "too few" not in long.measured


def test_a_rate_is_not_compared_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig10_14, "sweep_directions", falling)
    for i, (rates, verdict) in enumerate(
        (("0.1", "open"), ("0.5,1", "open"), ("0.5,0.1", "holds"), ("0.1,0.01", "fails"))
    ):
        result = judged(tmp_path / str(i), "gih/fig14", rates=rates, stride=64)
        assert outcome("invariance/14, smallest rate", result.numbers) == verdict, rates
        assert ("no two are compared" in result.measured) == (verdict == "open")
        compared = [value for name, value in result.numbers.items() if "minus smallest rate" in name]
        assert (compared[0].standard_error is None) == (verdict == "open")


def test_a_wrong_order_is_told_from_one_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be judged is: a rank correlation with the wrong sign is against the claim, compared or not."""

    def rising(*args: Any) -> tuple[Tensor, Tensor]:
        train, test = falling(*args)
        return train, test.flip(1)

    monkeypatch.setattr(fig10_14, "sweep_directions", rising)
    numbers = judged(tmp_path, "gih/fig14", rates="0.1", stride=64).numbers
    assert outcome("invariance/14, order", numbers) == "fails"


@pytest.mark.parametrize(
    ("name", "sizes", "verdict"),
    [
        ("gih/fig12", "128", "open"),
        ("gih/fig12", "128,256", "holds"),
        ("gih/fig13", "128", "open"),
        ("gih/fig13", "100", "open"),  # batches of 50 and 64, but the set has not grown
        ("gih/fig13", "65,128", "open"),  # two sizes, batches of 64 either way
        ("gih/fig13", "20,40", "open"),  # the whole set is one batch either way
        ("gih/fig13", "128,256", "holds"),
    ],
)
def test_a_size_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sizes: str, verdict: str
) -> None:
    def pair(run: Run, key: str, net: str, G: Any, descent: Any, n: int, runs: int, *_: Any) -> Pair:
        """The gap shrinks with the number of steps."""
        fitting = 10.0 / descent.steps(n) + torch.linspace(-0.01, 0.01, runs, dtype=torch.float64)
        still = {flip: Estimate(0.1, 0.01, runs) for flip in (False, True)}
        return Pair({}, {}, still, {}, Estimate(0.0), fitting, Estimate.of(fitting), 0.1)

    monkeypatch.setattr(fig3_12_13, "compare_pair", pair)
    monkeypatch.setattr(geometries, "initial_geometry", lambda *_, **__: None)
    result = judged(tmp_path, name, sizes=sizes)
    assert outcome(f"invariance/{name[-2:]}", result.numbers) == verdict, result.measured
    assert ("nothing is compared" in result.measured) == (verdict == "open")


# ----------------------------------------------------------------------------------------------------- honest errors


@pytest.mark.parametrize("shape", ["straight", "curved"])
def test_reaches_of_equal_curves_differ_as_often_as_two_errors_say(shape: str) -> None:
    """104 directions, 5 repeats, the same true curve twice: sure is by Student's t, which errs in 2.3 %."""
    at = torch.arange(104, dtype=torch.float64)
    truth = 0.95 - 0.45 * at / 103 if shape == "straight" else 0.5 + 0.45 * (-at / 15).exp()
    rng, N = generator(0, "reach", shape), 400
    new = old = 0
    for _ in range(N):
        a, b = (truth + 0.02 * torch.randn(5, 104, generator=rng, dtype=torch.float64) for _ in range(2))
        for far, near in ((a, b), (b, a)):
            gap = reach_gap(far, near)
            new += above(gap)
            shares = [(each - 0.5).mean(1) / (each.mean(0).max() - 0.5) for each in (far, near)]
            old += above(Estimate.of(shares[0] - shares[1]))  # the rule it replaces
            assert gap.value == pytest.approx(float((shares[0] - shares[1]).mean()), abs=1e-12)
    assert 0.005 < new / (2 * N) < 0.045, new / (2 * N)
    assert old / (2 * N) > 2 * 0.023, old / (2 * N)


def test_reach_gap_leaves_a_repeat_out_of_both_curves() -> None:
    rng = np.random.default_rng(0)
    curves = 0.55 + 0.4 * rng.random((2, 4, 6))

    def number(rows: Any) -> float:
        far, near = rows.mean(1) - 0.5
        return float(far.mean() / far.max() - near.mean() / near.max())

    left = np.array([number(np.delete(curves, i, axis=1)) for i in range(4)])
    found = reach_gap(torch.tensor(curves[0]), torch.tensor(curves[1]))
    assert found.value == pytest.approx(number(curves))
    assert found.standard_error == pytest.approx(math.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum()))
    assert reach_gap(torch.tensor(curves[0]), torch.full((4, 6), 0.53)).standard_error is None  # learned nowhere
    assert reach_gap(torch.tensor(curves[0, :2]), torch.tensor(curves[1, :2])).standard_error is None


def geometry(root: Tensor, rows: int, groups: int, *name: object) -> Geometry:
    """G estimated from `rows` gradients for each group, whose covariance is root root^T."""
    D, made = len(root), []
    for i in range(groups):
        g = torch.randn(rows, D, generator=generator(0, i, *name), dtype=torch.float64) @ root
        made.append(g.T @ g / rows)
    return Geometry(torch.stack(made).mean(0), torch.ones(D), torch.eye(D), tuple(made), (D,), groups * rows)


def small(spread: Estimate) -> bool:
    return Condition("spread", at=0, within=0.1).holds({"spread": spread}) is True


def test_few_gradients_do_not_make_a_scaled_identity() -> None:
    """A spread estimated as 0 is not known to be 0."""
    eye = torch.eye(30, dtype=torch.float64)
    seen = 0
    for seed in range(60):
        found = true_spread(geometry(eye, 10, 3, seed))
        assert found.standard_error is not None
        if found.value == 0:  # the square was negative
            seen += 1
            assert found.standard_error > 0.05
        assert not small(found)
    assert seen > 10
    many = true_spread(geometry(eye, 4000, 4, "many"))
    assert small(many)


def test_a_spread_of_three_tenths_is_hardly_ever_called_negligible() -> None:
    scale = torch.linspace(1 - 0.3 * 3**0.5, 1 + 0.3 * 3**0.5, 30, dtype=torch.float64)  # standard deviation 0.3
    for rows in (3, 5, 10, 100):
        found = [true_spread(geometry(scale.sqrt().diag(), rows, 4, seed)) for seed in range(60)]
        assert sum(map(small, found)) <= 1


# ---------------------------------------------------------------------------------------------------------- the ceiling


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
def test_chance_of_a_label_is_its_frequency(boundary: str) -> None:
    value = torch.linspace(-7, 7, 15, dtype=torch.float64)[:, None].repeat(1, 3)
    spread, bar = torch.tensor([0.3, 1.0, 4.0]), torch.tensor([0.5, 0.2, 0.8])
    drawn = value + spread * torch.randn(40_000, 1, 1, generator=generator(0, "drawn"))
    inner = {"linear": drawn, "quadratic": drawn**2, "sinusoidal": drawn.sin()}[boundary]
    found = chance_of_one(value, spread, bar, boundary)  # type: ignore[arg-type]
    assert float((found - (inner > bar).double().mean(0)).abs().max()) < 0.012  # 4 standard errors are 0.01
    certain = chance_of_one(value, torch.zeros(3), bar, boundary)  # type: ignore[arg-type]
    inner = {"linear": value, "quadratic": value**2, "sinusoidal": value.sin()}[boundary]
    assert torch.equal(certain, (inner > bar).double())


@pytest.mark.parametrize(
    ("boundary", "sinusoid"),
    [("linear", "projection"), ("quadratic", "projection"), ("sinusoidal", "projection"), ("sinusoidal", "channel")],
)
def test_ceiling_is_what_the_best_rule_gets(boundary: str, sinusoid: str) -> None:
    """Each of 100 images 8000 times: what most of its first labels are, against the labels of the other half."""
    train, few, copies = stand_in(2000, 4, 0, "train").x, stand_in(100, 4, 0, "test").x, 8000
    U, _ = torch.linalg.qr(torch.randn(48, 2, generator=generator(0, "U")))
    U = U.T.reshape(2, 3, 4, 4)
    test = few.repeat(copies, 1, 1, 1)
    for noise in (0.2, 4.0):
        found = labels_along(train, test, U, boundary, noise, 0, 0, sinusoid)  # type: ignore[arg-type]
        first, second = found.test.view(2, copies, 100).float().split(copies // 2, dim=1)
        best = (second == first.mean(1, keepdim=True).round()).float().mean((1, 2))
        assert found.ceiling.tolist() == pytest.approx(best.tolist(), abs=0.003)
        assert float(found.ceiling.max()) < 0.99


def test_the_label_without_noise_is_not_always_the_more_likely_one() -> None:
    """Just inside |x.u| = c noise leads out on either side: the share of unchanged labels is below the ceiling."""
    inside = chance_of_one(torch.tensor([[0.95]]), torch.tensor([1.0]), torch.tensor([1.0]), "quadratic")
    assert float(inside) > 0.5
    n, noise = 200_000, 2.0
    x = [torch.randn(n, 1, 1, 1, generator=generator(0, part)) for part in ("a", "b")]
    found = labels_along(x[0], x[1], torch.ones(1, 1, 1, 1), "quadratic", noise, 0, 0)
    square = (1 + noise) * 0.6745**2  # the median of the noisy square
    unchanged = float(((x[1].flatten() ** 2 > square).long() == found.test[0]).float().mean())
    assert float(found.ceiling[0]) > unchanged + 0.005
