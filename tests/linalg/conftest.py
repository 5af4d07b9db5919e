"""Devices, and matrices with a chosen spectrum."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """Seeded float64 normal numbers."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    return make


@pytest.fixture
def with_spectrum(randn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A float64 symmetric matrix with the given eigenvalues and random eigenvectors."""

    def make(values: Tensor | list[float], seed: int = 0) -> Tensor:
        lam = torch.as_tensor(values, dtype=torch.float64)
        Q = torch.linalg.qr(randn(len(lam), len(lam), seed=seed))[0]
        M = (Q * lam) @ Q.T
        return (M + M.T) / 2

    return make


@pytest.fixture(autouse=True)
def global_rng_untouched():  # type: ignore[no-untyped-def]
    """No function of the room may draw from, or seed, the global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())
