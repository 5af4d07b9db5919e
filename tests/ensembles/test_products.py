"""Convolutions as products of patches and weights."""

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from biascope import nets
from biascope.ensembles import products, record
from biascope.ensembles.products import ConvolutionsAsProducts, patch_product, side_by_side

DOUBLE = torch.float64
CASES = [  # image, channels, outputs, kernel, stride, padding, bias
    ((9, 8), 4, 6, (5, 5), 1, 0, True),
    ((9, 8), 4, 6, (3, 2), (2, 1), (1, 0), False),
    ((9, 8), 4, 6, (1, 1), 2, 0, True),
    ((9, 8), 4, 6, (3, 3), 3, 2, True),
    ((13, 11), 1, 2, (5, 5), 1, 0, True),  # one patch for a whole row of prime length
    ((7, 12), 3, 40, (2, 3), (3, 2), (0, 2), True),
    ((6, 19), 2, 3, (4, 3), (1, 2), 1, False),
    ((5, 5), 3, 1, (5, 5), 1, 0, True),  # one output value
    ((4, 6), 2, 70, (3, 3), 1, 1, True),  # many outputs: one place a patch
]


def drawn(image, c, o, kernel, T=3, n=2):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(0)
    shapes = ((T, n, c, *image), (T, o, c, *kernel), (T, o))
    return [torch.randn(shape, generator=g, dtype=DOUBLE, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_torch_for_stacked_networks(case, channels_last) -> None:  # type: ignore[no-untyped-def]
    image, c, o, kernel, stride, padding, bias = case
    x, w, b = drawn(image, c, o, kernel)
    if channels_last:
        x = x.detach().permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3).requires_grad_(True)

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w, b if bias else None, stride, padding).sin()

    plain = vmap(convolve)(x, w, b)
    with ConvolutionsAsProducts():
        fast = vmap(convolve)(x, w, b)
    assert torch.allclose(fast, plain, rtol=1e-12, atol=1e-12)
    wanted = (x, w, b) if bias else (x, w)
    for a, c in zip(torch.autograd.grad(plain.sum(), wanted), torch.autograd.grad(fast.sum(), wanted)):
        assert torch.allclose(a, c, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("places", [1, 2, 3, 4, 6, 12])
def test_any_number_of_places_gives_the_same(places, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    x, w, b = (value[0] for value in drawn((8, 25), 3, 5, (4, 3)))
    expected = F.conv2d(x, w, b, stride=2)
    assert expected.shape[-1] == 12
    monkeypatch.setattr(products, "side_by_side", lambda *sizes: places)
    found = patch_product(x, w, b, stride=2)
    assert found is not None
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    up = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    for a, c in zip(torch.autograd.grad(expected, (x, w, b), up), torch.autograd.grad(found, (x, w, b), up)):
        assert torch.allclose(a, c, rtol=1e-11, atol=1e-11)


def test_places_divide_the_width_and_never_cost_more_copies() -> None:
    for width in range(1, 60):
        for kernel, stride, outputs in ((5, 1, 6), (3, 2, 16), (1, 1, 8), (7, 1, 64), (2, 3, 4)):
            places = side_by_side(width, kernel, stride, outputs)
            assert width % places == 0
            assert width // places * (kernel + (places - 1) * stride) <= max(width * kernel, width * stride)
    assert side_by_side(223, 3, 1, 8) == 1  # not 223: the wide matrix would be zero but for one part in 75


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # gradients inside a map are rare
def test_shared_inputs_nested_maps_and_gradients_inside_a_map() -> None:
    x, w, b = (value.detach() for value in drawn((7, 8), 2, 3, (3, 3), T=6))

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w, b).sin()

    def score(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return convolve(x, w, b).square().sum()

    nested = [value.unflatten(0, (2, 3)) for value in (x, w, b)]
    for call in (
        lambda: vmap(convolve, (None, 0, 0))(x[0], w, b),
        lambda: vmap(convolve, (1, 0, None))(x.transpose(0, 1), w, b[0]),
        lambda: vmap(vmap(convolve))(*nested),
        lambda: torch.cat([g.flatten() for g in vmap(grad(score, (0, 1, 2)))(x, w, b)]),
    ):
        expected = call()
        with ConvolutionsAsProducts():
            found = call()
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-11)


def test_half_precision_before_the_patches_are_made() -> None:
    x, w, b = (value.detach().float() for value in drawn((9, 8), 4, 6, (5, 5)))
    with torch.autocast("cpu", torch.bfloat16), ConvolutionsAsProducts():
        fast = vmap(torch.conv2d)(x, w, b)
        double = vmap(torch.conv2d)(x.double(), w.double(), b.double())
    assert fast.dtype == torch.bfloat16
    assert double.dtype == torch.float64  # as torch's own autocast leaves it
    exact = vmap(torch.conv2d)(x, w, b)
    assert (fast - exact).norm() < 1e-2 * exact.norm()


class Traffic(TorchDispatchMode):
    """The largest number of values that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        held = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        sizes = (min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) for t in held)
        self.largest = max(self.largest, *sizes, 0)
        return out


def test_a_training_step_of_lenet_holds_nothing_as_large_as_all_patches() -> None:
    """Plain patches of the first convolution are 28 * 28 * 25 values per example."""
    T, n = 2, 8
    networks = record(lambda: nets.build("lenet", in_channels=1, outputs=2)).draw(0, 0, T)
    params = {name: value.requires_grad_(True) for name, value in networks.params.items()}
    x = torch.randn(T, n, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    out = lambda p, x: functional_call(networks.template, p, (x,)).square().mean()  # noqa: E731
    expected = torch.autograd.grad(vmap(out)(params, x).sum(), list(params.values()))
    with Traffic() as traffic, ConvolutionsAsProducts():
        found = torch.autograd.grad(vmap(out)(params, x).sum(), list(params.values()))
    assert traffic.largest < T * n * 28 * 28 * 25 / 3
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * math.sqrt(a.numel()) * float(b.abs().max()))


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
