"""Leading eigenvectors from few passes over the rows, against a dense decomposition."""

import pytest
import torch

from biascope.geometry import average_geometry, nads
from biascope.geometry.few_passes import few_passes
from biascope.support.errors import InputError


def gradients(T: int, D: int) -> torch.Tensor:
    """Rows whose leading eigenvalues lie close together, as those of networks do."""
    return torch.randn(T, D, generator=torch.Generator().manual_seed(0)) / torch.linspace(1, 3, D)


def test_close_eigenvalues_in_a_dozen_passes() -> None:
    """Subspace iteration, with as many passes, misses a quarter of this span."""
    R, k = gradients(300, 1500), 10
    found = few_passes(lambda X: R.T @ (R @ X) / len(R), 1500, k, passes=14)
    exact = torch.linalg.svd(R.double(), full_matrices=False)
    assert torch.allclose(found.values, exact.S[:k] ** 2 / len(R), rtol=1e-3)
    assert float((found.vectors.double().T @ exact.Vh[:k].T).square().sum() / k) > 0.999
    assert bool(found.converged.all())
    assert torch.allclose(found.vectors.T @ found.vectors, torch.eye(k), atol=1e-5)


def test_it_says_when_the_passes_do_not_suffice() -> None:
    R = gradients(300, 1500)
    with pytest.warns(UserWarning, match="after 2 passes"):
        found = few_passes(lambda X: R.T @ (R @ X) / len(R), 1500, 10, passes=2)
    product = R.T @ (R @ found.vectors) / len(R)
    assert torch.allclose(
        (product - found.vectors * found.values.float()).norm(dim=0).double(), found.residuals, rtol=1e-2
    )


def test_an_exhausted_space_is_exact() -> None:
    """Fewer rows than the block is wide: two passes, nothing missing, whatever the number allowed."""
    R = gradients(6, 40)
    found = few_passes(lambda X: R.T @ (R @ X) / 6, 40, 6, passes=9)
    assert found.iterations <= 2
    assert torch.allclose(found.values, torch.linalg.svdvals(R.double())[:6] ** 2 / 6, rtol=1e-4)


def test_large_images_without_room_for_the_gradients() -> None:
    """3 x 64 x 64 inputs, gradients drawn again for each pass: the directions of the kept ones."""
    factory = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Conv2d(3, 4, 8, stride=8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(256, 1)
    )
    D, T, k = 3 * 64 * 64, 40, 4
    kept = nads(factory, (3, 64, 64), T, method="autograd", top=k)
    again = nads(factory, (3, 64, 64), T, method="autograd", top=k, max_memory=3 * T * D * 4 - 1)
    assert torch.allclose(again.eigenvalues, kept.eigenvalues, rtol=1e-3)
    assert again.overlap(kept, k) > 0.999
    probe = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    G = average_geometry(factory, (3, 64, 64), n_networks=T, probes=probe)
    rows = nads(factory, (3, 64, 64), T, method="autograd", top=k, x=probe[0])
    assert torch.allclose(G.eigh(k).values, rows.eigenvalues, rtol=1e-3)


def test_float64_reaches_its_own_precision() -> None:
    R = gradients(300, 400).double()
    found = few_passes(lambda X: R.T @ (R @ X) / 300, 400, 5, passes=30, tol=1e-10, dtype=torch.float64)
    assert torch.allclose(found.values, torch.linalg.svdvals(R)[:5] ** 2 / 300, rtol=1e-10)
    assert float(found.residuals.max()) <= 1e-10 * float(found.values[0])


def test_gradients_that_are_not_numbers_are_named() -> None:
    with pytest.raises(InputError, match="NaN"):
        few_passes(lambda X: X / 0 * 0, 20, 2, passes=3)
