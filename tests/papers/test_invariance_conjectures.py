"""Conjectures of the invariance paper: estimates without noise, known networks."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import record
from biascope.geometry import correlation, data_second_moment, geometry_evolution
from biascope.geometry.mlp_theory import mlp_evolution
from biascope.studies import Run, configure
from biascope.studies.result import Estimate
from biascope.support.seeds import generator
from biascope_papers.gih import fig7, probes, proposition_a1
from biascope_papers.gih.averages import Averages, rotated_away, squared, stacked, without_mean
from biascope_papers.gih.networks import DESIGNS, factory


def noisy(truth: Tensor, R: int, size: float, seed: int) -> Averages:
    noise = torch.randn(R, *truth.shape, generator=generator(seed), dtype=torch.float64)
    return Averages(truth + size * (noise + noise.mT))


# ------------------------------------------------------------ averages without noise


def test_noise_shrinks_the_raw_correlation_and_not_the_corrected_one() -> None:
    D = 40
    truth = torch.diag(torch.linspace(0.1, 2, D, dtype=torch.float64) ** 3)
    M = torch.diag(torch.linspace(0.1, 2, D, dtype=torch.float64))
    exact = correlation(truth, M)
    found = [noisy(truth, 8, 0.6, seed) for seed in range(20)]
    raw = [each.correlation(M, between=False).value for each in found]
    corrected = Estimate.of([each.correlation(M).value for each in found])
    assert max(raw) < exact - 0.05
    assert corrected.value == pytest.approx(exact, abs=3 * (corrected.standard_error or 0))
    errors = [each.correlation(M).standard_error or 0.0 for each in found]
    spread = (corrected.standard_error or 0) * math.sqrt(20)
    assert 0.5 < sum(errors) / 20 / spread < 2  # the jackknife is as wide as the spread over samples


def test_no_correlation_is_longer_than_one() -> None:
    """With the noise taken off by an estimate, half of the values would be where truth and M are the same."""
    M = torch.diag(torch.linspace(0.1, 2, 30, dtype=torch.float64))
    found = [noisy(M, 4, 0.1, seed) for seed in range(12)]
    assert max(float(each.ratio(each.along(M) / M.norm()).value) for each in found) > 1
    assert max(each.correlation(M).value for each in found) == 1.0
    assert min(each.correlation(-M).value for each in found) == -1.0


def test_products_and_baselines_are_those_of_the_matrices() -> None:
    A = noisy(torch.diag(torch.arange(1.0, 6, dtype=torch.float64)), 3, 0.1, 0)
    M = torch.diag(torch.arange(5.0, 0, -1, dtype=torch.float64))
    w = torch.ones(3, dtype=torch.float64)
    assert squared(A.gram, w, between=False) == pytest.approx(float(A.mean.square().sum()))
    by_hand = sum(float((A.matrices[i] * A.matrices[j]).sum()) for i in range(3) for j in range(3) if i != j) / 6
    assert float(squared(A.gram, w)) == pytest.approx(by_hand)
    assert A.correlation(M, between=False).value == pytest.approx(correlation(A.mean, M))
    eye = torch.eye(5, dtype=torch.float64)
    null, excess = rotated_away(A, M, between=False)
    assert null.value == pytest.approx(correlation(A.mean, eye) * correlation(M, eye))
    assert null.value + excess.value == pytest.approx(correlation(A.mean, M))
    flat = stacked([M + 3 * eye, M + 4 * eye])
    assert without_mean(flat, M).value == pytest.approx(1.0)


# ------------------------------------------------------------ conjecture 1


def test_known_networks_have_the_correlation_of_the_theory() -> None:
    """The linear CNN with pooling, Delta = -(c) GSG plus a small term, and the MLP with one hidden layer, nearly -S."""
    x = torch.randn(30, 1, 6, 6, generator=generator(0))
    x = x + 2 * x.mean((2, 3), keepdim=True)
    S, (K, patches) = data_second_moment(x), fig7.channel_overlap(6, 3, 1)
    for name, target, n in (("linear CNN", K @ S @ K, 16), ("MLP, torch variances", S, 16)):
        made = record(lambda name=name, n=n: fig7.network(name, n, (1, 6, 6), 3))  # type: ignore[misc]
        parts = [
            geometry_evolution(made, x, torch.zeros(30), 150, n_probes=4, seed=seed, dtype=torch.float64).matrix
            for seed in range(6)
        ]
        sw, sp = fig7.scales(name, n, 36)
        exact = (
            fig7.overlap_evolution(K, patches, S, n) if "CNN" in name else mlp_evolution(fig7.square_root(S), n, sw, sp)
        )
        found = stacked(parts).correlation(target)
        assert found.value < -0.8
        assert found.value == pytest.approx(correlation(exact, target), abs=4 * (found.standard_error or 0) + 1e-3)


# ------------------------------------------------------------ proposition A.1


def test_what_noise_shares_is_nothing() -> None:
    zero = torch.zeros(12, 12, dtype=torch.float64)
    z = [e.value / (e.standard_error or 1) for e in (proposition_a1.common(noisy(zero, 8, 1.0, i)) for i in range(60))]
    assert abs(sum(z) / 60) < 4 / 60**0.5
    assert 0.7 < (sum(v * v for v in z) / 60) ** 0.5 < 1.3  # the error under the proposition is the right one
    there = proposition_a1.common(noisy(torch.eye(12, dtype=torch.float64), 8, 0.5, 0))
    assert there.value > 3 * (there.standard_error or 0)


@pytest.mark.parametrize("net", [name for name in DESIGNS if name in ("mlp", "lenet", "vit-small", "resnet18-narrow")])
def test_the_last_layer_is_the_one_that_is_negated(net: str) -> None:
    drawn = record(factory(net, (3, 16, 16), outputs=1, norm=False)).draw(seed=0, start=0, stop=2)
    x = torch.randn(2, 3, 16, 16, generator=generator(1))
    other = proposition_a1.change_last(drawn, scale=-1.0)
    for i in range(2):
        torch.testing.assert_close(other.module(i)(x), -drawn.module(i)(x))
    moved = proposition_a1.change_last(drawn, shift=2.0)
    changed = [name for name in drawn.params if not torch.equal(moved.params[name], drawn.params[name])]
    assert len(changed) == 1
    last = [module for module in drawn.template.modules() if isinstance(module, nn.Linear)][-1]
    assert drawn.params[changed[0]].shape[1:] == last.weight.shape


# ------------------------------------------------------------ probes


def test_kinds_of_probes_share_their_networks(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure("gih/probes", "smoke"))
    found = {
        kind: probes.estimates(run, "lenet", (1, 16, 16), activation, std, 4, 2)
        for kind, (activation, std) in probes.KINDS.items()
        if kind in ("GELU, std 1e-05", probes.AT_ZERO, probes.RELU)
    }
    near, zero = found["GELU, std 1e-05"], found[probes.AT_ZERO]
    assert correlation(near[0], zero[0]) > 0.9999  # the same networks
    assert correlation(near[0], zero[1]) < 0.99
    assert correlation(near[0], found[probes.RELU][0]) < 0.9999
