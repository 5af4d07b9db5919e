import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from biascope.linalg import effective_rank, marchenko_pastur, principal_angles, subspace_overlap
from biascope.linalg.spectra import orthonormal_basis
from biascope.support.errors import InputError

close = torch.testing.assert_close


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1e-20, 1e20))
def test_effective_rank_bounds_and_scale(values: list[float], scale: float) -> None:
    lam = torch.tensor(values, dtype=torch.float64)
    for kind in ("entropy", "participation"):
        rank = effective_rank(lam, kind)  # type: ignore[arg-type]
        assert 1 - 1e-9 <= rank <= len(values) + 1e-9
        assert math.isclose(effective_rank(lam * scale, kind), rank, rel_tol=1e-9)  # type: ignore[arg-type]
    assert effective_rank(lam, "participation") <= effective_rank(lam) + 1e-9  # Renyi entropies fall with the order


def test_effective_rank_closed_forms() -> None:
    for r in (1, 3, 10):
        lam = torch.cat([torch.full((r,), 7.0), torch.zeros(5), torch.full((2,), -1e-9)])
        assert math.isclose(effective_rank(lam), r, rel_tol=1e-6)
        assert math.isclose(effective_rank(lam, "participation"), r, rel_tol=1e-6)
    assert math.isclose(effective_rank(torch.tensor([3.0, 1.0]).double()), 4 / 3**0.75, rel_tol=1e-12)
    assert math.isclose(effective_rank(torch.tensor([3.0, 1.0]).double(), "participation"), 1.6, rel_tol=1e-12)
    for bad, text in (
        (torch.zeros(3), "at least one above 0; the largest is 0"),
        (torch.ones(2, 2), "1 dimension"),
        (torch.ones(0), "at least one above 0"),
        (torch.tensor([1.0, torch.inf]), "the largest is inf"),
        (torch.tensor([1.0, torch.nan]), "the largest is nan"),
    ):
        with pytest.raises(InputError, match=text):
            effective_rank(bad)
    with pytest.raises(InputError, match="kind='stable' is not known"):
        effective_rank(torch.ones(2), "stable")  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 3), (5, 2), (4, 4)])
def test_principal_angles_against_scipy(k: int, m: int, randn) -> None:  # type: ignore[no-untyped-def]
    U, V = randn(9, k), randn(9, m, seed=1)
    want = np.sort(subspace_angles(U.numpy(), V.numpy()))
    np.testing.assert_allclose(principal_angles(U, V).numpy(), want, atol=1e-12)
    assert math.isclose(subspace_overlap(U, V), float(np.mean(np.cos(want) ** 2)), rel_tol=1e-10)
    close(principal_angles(U @ randn(k, k, seed=2), V), principal_angles(U, V), atol=1e-10, rtol=0)


def test_tiny_and_extreme_angles(randn) -> None:  # type: ignore[no-untyped-def]
    e = torch.eye(4).double()
    for angle in (1e-12, 1e-9, 0.3, math.pi / 2):
        turned = (math.cos(angle) * e[:, 0] + math.sin(angle) * e[:, 1]).unsqueeze(1)
        close(principal_angles(e[:, :1], turned).item(), angle, atol=1e-16, rtol=1e-9)
    U = randn(6, 2)
    assert orthonormal_basis(torch.cat([U, U], 1)).shape == (6, 2)
    assert principal_angles(torch.cat([U, U], 1), U).max() < 1e-12
    assert math.isclose(subspace_overlap(U, torch.eye(6)), 1.0)
    with pytest.raises(InputError, match="zero vectors"):
        principal_angles(torch.zeros(6, 1), U)
    with pytest.raises(InputError, match="zero vectors"):
        principal_angles(torch.ones(6, 0), U)
    with pytest.raises(InputError, match=r"U has shape .* 2 dimension"):
        principal_angles(torch.ones(6), U)


@pytest.mark.parametrize(("n", "d", "variance"), [(1000, 300, 1.0), (200, 200, 2.5), (100, 400, 0.5)])
def test_marchenko_pastur_integrates(n: int, d: int, variance: float) -> None:
    law = marchenko_pastur(n, d, variance)
    # x = middle + half cos(t) takes away the square roots at both edges
    t = torch.linspace(0, math.pi, 200_001).double()[1:-1]
    x = (law.upper + law.lower) / 2 + (law.upper - law.lower) / 2 * t.cos()
    f = law.density(x) * (law.upper - law.lower) / 2 * t.sin()
    close(torch.trapezoid(f, t).item(), 1 - law.mass_at_zero, atol=1e-4, rtol=0)
    close(torch.trapezoid(f * x, t).item(), variance, atol=1e-4, rtol=1e-4)
    close(torch.trapezoid(f * x**2, t).item(), variance**2 * (1 + d / n), atol=1e-4, rtol=1e-4)
    assert (law.density(torch.tensor([-1.0, law.upper + 1])) == 0).all()


def test_marchenko_pastur_against_samples(randn) -> None:  # type: ignore[no-untyped-def]
    X = 1.5 * randn(2000, 400)
    values = torch.linalg.eigvalsh(X.T @ X / 2000)
    law = marchenko_pastur(2000, 400, 2.25)
    assert abs(values.max() / law.upper - 1) < 0.03
    assert abs(values.min() / law.lower - 1) < 0.05
    assert not law.outliers(values, slack=0.05).any()
    spiked = X.clone()
    spiked[:, 0] *= 3
    assert law.outliers(torch.linalg.eigvalsh(spiked.T @ spiked / 2000), slack=0.05).sum() == 1
    inside = ((values > 2) & (values < 3)).double().mean()
    grid = torch.linspace(2, 3, 1001).double()
    assert abs(inside - torch.trapezoid(law.density(grid), grid)) < 0.02
    # an isotropic 1024-dimensional sample of 10,000 is not flat: the spread of the specs
    assert math.isclose(marchenko_pastur(10_000, 1024).upper / marchenko_pastur(10_000, 1024).lower, 3.77, abs_tol=0.01)
    for bad in ((0, 3, 1.0), (3, 0, 1.0), (3, 3, 0.0), (3, 3, math.inf)):
        with pytest.raises(InputError, match=r"must be at least 1|a finite number above 0"):
            marchenko_pastur(*bad)
