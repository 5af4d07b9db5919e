"""Convolutions as products of patches and weights."""

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from biascope.ensembles.products import ConvolutionsAsProducts, patch_product

DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"),
    [((5, 5), 1, 0, True), ((3, 2), (2, 1), (1, 0), False), ((1, 1), 2, 0, True), ((3, 3), 3, 2, True)],
)
def test_equals_torch_for_stacked_networks(kernel, stride, padding, bias) -> None:  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 9, 8, generator=g, dtype=DOUBLE, requires_grad=True)
    w = torch.randn(3, 6, 4, *kernel, generator=g, dtype=DOUBLE, requires_grad=True)
    b = torch.randn(3, 6, generator=g, dtype=DOUBLE) if bias else torch.zeros(3, 6, dtype=DOUBLE)

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w, b if bias else None, stride, padding).sin()

    plain = vmap(convolve)(x, w, b)
    with ConvolutionsAsProducts():
        fast = vmap(convolve)(x, w, b)
    assert torch.allclose(fast, plain, rtol=1e-12, atol=1e-12)
    for a, c in zip(torch.autograd.grad(plain.sum(), (x, w)), torch.autograd.grad(fast.sum(), (x, w))):
        assert torch.allclose(a, c, rtol=1e-11, atol=1e-11)


def test_half_precision_before_the_patches_are_made() -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=g) for shape in ((3, 2, 4, 9, 8), (3, 6, 4, 5, 5), (3, 6)))
    with torch.autocast("cpu", torch.bfloat16), ConvolutionsAsProducts():
        fast = vmap(torch.conv2d)(x, w, b)
        double = vmap(torch.conv2d)(x.double(), w.double(), b.double())
    exact = vmap(torch.conv2d)(x.double(), w.double(), b.double())
    assert fast.dtype == torch.bfloat16
    assert (fast - exact).norm() < 1e-2 * exact.norm()
    assert double.dtype == torch.float64  # torch's own autocast leaves it as well
    assert torch.allclose(double, exact, rtol=1e-12, atol=1e-12)


def test_what_it_does_not_treat_goes_to_torch() -> None:
    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 2, 3, 3)
    assert patch_product(x, w, groups=2) is None
    assert patch_product(x, torch.randn(2, 4, 3, 3), dilation=2) is None
    assert patch_product(x, torch.randn(2, 4, 3, 3), padding="same") is None
    with ConvolutionsAsProducts():
        assert torch.equal(F.conv2d(x, w, groups=2), torch.conv2d(x, w, groups=2))


def test_batch_norm_does_not_ask_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, x, plain = [], torch.randn(3, 8, 4, 5, 5, dtype=DOUBLE), torch.batch_norm
    mean, var = torch.zeros(3, 4, dtype=DOUBLE), torch.ones(3, 4, dtype=DOUBLE)

    def note(*args: object) -> torch.Tensor:
        asked.append(args[-1])
        return plain(*args)  # type: ignore[arg-type]

    expected = vmap(lambda x, m, v: F.batch_norm(x, m, v, training=True))(x, mean.clone(), var.clone())
    monkeypatch.setattr(torch, "batch_norm", note)
    enabled = torch.backends.cudnn.enabled
    with ConvolutionsAsProducts():
        found = vmap(lambda x, m, v: F.batch_norm(x, m, v, training=True))(x, mean, var)
    assert asked == [False]
    assert torch.backends.cudnn.enabled is enabled
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(mean, torch.zeros_like(mean))  # the running mean was written
