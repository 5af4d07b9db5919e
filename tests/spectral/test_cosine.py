"""The cosine transform of functions on a segment (spec 05, 2.24) against sums over cosines, and scipy."""

import doctest
import math

import pytest
import scipy.fft
import torch
from torch import Tensor

import biascope.spectral.cosine as module
from biascope.kernels import fourier_power
from biascope.spectral.cosine import cosine_power, dominant_cosine
from biascope.support.errors import InputError

F64 = torch.float64


def grid_and_weights(n: int, ends: str) -> tuple[Tensor, Tensor]:
    j, w = torch.arange(n, dtype=F64), torch.ones(n, dtype=F64)
    if ends == "between":
        return (j + 0.5) / n, w
    w[0] = w[-1] = 0.5
    return j / (n - 1), w


@pytest.mark.parametrize("ends", ["between", "included"])
@pytest.mark.parametrize("n", [2, 3, 8, 9, 50])
def test_against_projections_on_cosines(n: int, ends: str) -> None:
    """|<v, c_m>|^2 / ||c_m||^2 in the grid's own inner product, in which the cosines are orthogonal and complete."""
    z, w = grid_and_weights(n, ends)
    C = torch.cos(math.pi * torch.outer(torch.arange(n, dtype=F64), z))  # [m, n]
    gram = C @ (w[:, None] * C.T)
    assert torch.allclose(gram, gram.diagonal().diag(), atol=1e-12 * n)
    v = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=F64)
    shares = (C @ (w[:, None] * v)).square() / gram.diagonal()[:, None] / (w[:, None] * v.square()).sum(0)
    found = cosine_power(v, ends)  # type: ignore[arg-type]
    assert torch.allclose(found, shares, rtol=1e-10, atol=1e-13)
    assert torch.allclose(found.sum(0), torch.ones(3, dtype=F64))
    assert torch.allclose(cosine_power(v[:, 1], ends), found[:, 1])  # type: ignore[arg-type]
    assert torch.allclose(cosine_power(-7 * v.float(), ends), found, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_against_scipy() -> None:
    v = torch.randn(13, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    for ends, kind in (("between", 2), ("included", 1)):
        y = v.clone()
        if kind == 1:  # scipy's orthonormal DCT-I takes end points that are scaled by sqrt(1/2)
            y[[0, -1]] *= math.sqrt(0.5)
        power = torch.from_numpy(scipy.fft.dct(y.numpy(), type=kind, norm="ortho", axis=0)).square()
        assert torch.allclose(cosine_power(v, ends), power / power.sum(0), rtol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", ["between", "included"])
def test_pure_cosines_have_one_frequency(ends: str) -> None:
    z, _ = grid_and_weights(50, ends)
    C = torch.cos(math.pi * torch.outer(z, torch.arange(50, dtype=F64)))
    found = cosine_power(C, ends)  # type: ignore[arg-type]
    assert torch.allclose(found, torch.eye(50, dtype=F64), atol=1e-12)
    assert dominant_cosine(C, ends).tolist() == [m / 2 for m in range(50)]  # type: ignore[arg-type]


def test_what_the_periodic_transform_smears() -> None:
    """Half a period and a slope: the Fourier transform sees a jump at the ends, the cosine transform does not."""
    z, _ = grid_and_weights(64, "between")
    for v, least in ((torch.cos(math.pi * z), 1 - 1e-12), (z - 0.5, 0.98)):
        assert float(cosine_power(v).max()) >= least
        assert float(fourier_power(v).max()) < 0.85
        assert float(dominant_cosine(v)) == 0.5
        assert int(fourier_power(v).argmax()) == 1
    # sum_{odd m} 1 / m^4 = pi^4 / 96: the share of the first cosine in a slope
    fine, _ = grid_and_weights(4096, "between")
    assert float(cosine_power(fine - 0.5)[1]) == pytest.approx(96 / math.pi**4, rel=1e-6)
    # a whole period is one frequency for both
    assert float(dominant_cosine(torch.cos(2 * math.pi * z))) == 1.0


def test_edges() -> None:
    for values, ends, message in (
        (torch.ones(1), "between", r"vectors \[n\] or \[n, k\] with n >= 2 and k"),
        (torch.ones(2, 2, 2), "between", r"vectors \[n\] or \[n, k\] with n >= 2 and k"),
        (torch.zeros(4, 1), "between", "a zero vector has no frequency"),
        (torch.ones(4) / 0, "included", "NaN or infinity"),
        (torch.ones(4), "both", "ends='both'"),
    ):
        with pytest.raises(InputError, match=message):
            cosine_power(values, ends)  # type: ignore[arg-type]
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("ends", ["between", "included"])
def test_shares_have_no_scale(ends: str) -> None:
    v = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1e-200, 1e200):  # the squares of these are no float64
        torch.testing.assert_close(cosine_power(scale * v, ends), cosine_power(v, ends), rtol=1e-9, atol=1e-15)
    with pytest.raises(InputError, match="k >= 1"):
        cosine_power(v[:, :0], ends)
