"""Correlations that are shown or returned lie in [-1, 1]: neither rounding nor a corrected norm carries them out."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.kernels.kernel import Kernel
from biascope.probes.metrics import cosine
from biascope_papers.gih.averages import Averages, History, rotated_away
from biascope_papers.spectral.fitting import rank_correlation

SEEDS = range(40)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_kernel_with_itself() -> None:
    for seed in SEEDS:
        K = Kernel((M := draw(9, 9, seed=seed)) @ M.T, "trace", "trace", True)
        assert 1 - 1e-12 < K.alignment(K) <= 1
        # its own leading eigenvector as labels: a kernel of rank one
        v = draw(9, 1, seed=seed)
        assert Kernel(v @ v.T, "trace", "trace", True).alignment(v, centered=False) <= 1


def test_task_vectors_and_hidden_representations_with_themselves() -> None:
    for seed in SEEDS:
        zero, one = ({"w": t.float()} for t in (torch.zeros(31), draw(31, seed=seed)))
        tau = bs.TaskVector(zero, one)
        assert 1 - 1e-6 < tau.cosine(tau) <= 1
        assert cosine(one["w"], 3 * one["w"]) <= 1
        assert cosine(one["w"], -one["w"]) >= -1
        x = torch.arange(7.0)
        assert rank_correlation(x, x) <= 1


def test_a_sketched_norm_that_is_too_small() -> None:
    """One eigenvalue dominates and the labels lie along it: the estimated norm is often too small."""
    x = torch.ones(30, 1) + 0.01 * draw(30, 1, seed=0).float()
    y = torch.arange(30.0)[:, None] * 0.01 + 1
    net = nn.Linear(1, 1, bias=False)
    found = [bs.label_alignment(net, x, y, centered=False, sketch=3, seed=seed) for seed in range(20)]
    raw = [each.numerator / (each.frobenius * each.target_norm_squared) for each in found]
    assert max(raw) > 1.1
    assert [each.value for each in found] == pytest.approx([min(value, 1.0) for value in raw])


def test_changes_along_a_training_and_averages_of_networks() -> None:
    start = draw(3, 2, 4, seed=1)
    for seed in SEEDS:
        still = torch.stack([start, start + 1e-9 * draw(3, 2, 4, seed=seed)])  # hardly a change
        history, w = History(still), torch.ones(3, dtype=torch.float64) / 3
        M = torch.eye(4, dtype=torch.float64)
        energies, norm = history.energies(M), float(M.norm())
        found = [
            history.change_with_matrix(energies, norm, w),
            history.with_matrix(energies, norm, w),
            history.with_start(w),
            1 - history.velocity(w),
        ]
        assert all(bool((values.abs() <= 1).all()) for values in found)
        # noise taken off the norm leaves little of it, and the ratio passed 1
        noisy = Averages(torch.eye(3, dtype=torch.float64) * 0.3 + draw(3, 3, 3, seed=seed))
        values = (noisy.correlation(M[:3, :3]).value, rotated_away(noisy, M[:3, :3])[0].value)
        assert not any(abs(value) > 1 for value in values)  # NaN where nothing is left
