"""Convolutions as tap matrices against torch's, and the residual sum of the covariance recursion (spec 02, 2.7)."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from biascope.geometry import average_geometry
from biascope.geometry.linear_cnn import (
    dense_head,
    pool_matrix,
    pooled_cnn_evolution,
    pooled_cnn_geometry,
    tap_matrices,
    through_average_pool,
    through_convolution,
    through_sum,
)
from biascope.support.errors import InputError

F64 = torch.float64
TAPS = tap_matrices((3,), 2)


Size = int | tuple[int, ...]


def by_torch(
    shape: tuple[int, ...], kernel: Size, stride: Size, padding: Size | str, mode: str, dilation: Size = 1
) -> Tensor:
    """[taps, inputs, outputs] from nn.Conv1d or nn.Conv2d, one unit input and one unit tap at a time."""
    kind = nn.Conv1d if len(shape) == 1 else nn.Conv2d
    taps = kernel ** len(shape) if isinstance(kernel, int) else math.prod(kernel)
    inputs, options = math.prod(shape), {"stride": stride, "padding": padding, "dilation": dilation}
    conv = kind(1, taps, kernel, padding_mode=mode, bias=False, **options).to(F64)
    conv.weight.data = torch.eye(taps, dtype=F64).view(conv.weight.shape)
    out = conv(torch.eye(inputs, dtype=F64).view(inputs, 1, *shape)).detach()
    return out.flatten(2).transpose(0, 1)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("shape", [(1,), (5,), (6,), (4, 5)])
def test_taps_are_those_of_torchs_convolutions(shape: tuple[int, ...], mode: str) -> None:
    """All kernels up to the extent (and above it), strides 1 to 3, paddings 0 to 4 and "same"."""
    compared = 0
    for kernel, stride, padding in itertools.product(range(1, 8), (1, 2, 3), (0, 1, 2, 3, 4, "same")):
        try:
            exact = by_torch(shape, kernel, stride, padding, mode)
        except (RuntimeError, ValueError):  # what torch refuses is refused here
            with pytest.raises(InputError):
                tap_matrices(shape, kernel, stride=stride, padding=padding, circular=mode == "circular")
            continue
        found = tap_matrices(shape, kernel, stride=stride, padding=padding, circular=mode == "circular")
        assert torch.equal(found, exact), (kernel, stride, padding)
        compared += 1
    assert compared >= (12 if shape == (1,) else 60)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_taps_of_rectangles_are_those_of_torchs_convolutions(mode: str) -> None:
    """Another kernel, stride, padding and dilation along each dimension."""
    kernels, strides, paddings = [(1, 3), (2, 1), (3, 2)], [1, (1, 2), (3, 1)], [0, (1, 0), (0, 2), (2, 1), "same"]
    compared = 0
    for kernel, stride, padding, dilation in itertools.product(kernels, strides, paddings, [1, (2, 1), (1, 3)]):
        if padding == "same" and stride != 1:
            continue
        circular = mode == "circular"
        try:
            exact = by_torch((4, 6), kernel, stride, padding, mode, dilation)
        except (RuntimeError, ValueError):
            with pytest.raises(InputError):
                tap_matrices((4, 6), kernel, stride=stride, padding=padding, circular=circular, dilation=dilation)
            continue
        found = tap_matrices((4, 6), kernel, stride=stride, padding=padding, circular=circular, dilation=dilation)
        assert torch.equal(found, exact), (kernel, stride, padding, dilation)
        compared += 1
    assert compared > 90


@pytest.mark.parametrize(
    ("shape", "size"), [((6,), 3), ((4, 6), 2), ((4, 6), (4, 6)), ((4, 6), (1, 3)), ((4, 6), [2, 6])]
)
def test_pooling_is_torchs(shape: tuple[int, ...], size: int | tuple[int, ...]) -> None:
    pixels = torch.eye(math.prod(shape), dtype=F64).view(-1, 1, *shape)
    pool = nn.AvgPool1d(size) if len(shape) == 1 else nn.AvgPool2d(size)
    assert torch.allclose(pool_matrix(shape, size), pool(pixels).flatten(1).T, atol=1e-15)


def test_covariances_of_any_precision() -> None:
    taps, P, eye = tap_matrices((3,), 2), pool_matrix((4,), 2), torch.eye(2)
    for covariance in (eye, eye.half(), eye.int(), eye.double()):
        for found, at_float64 in (
            (through_convolution(covariance, taps, 2, 0.3), through_convolution(eye.double(), taps, 2, 0.3)),
            (through_average_pool(covariance, P), through_average_pool(eye.double(), P)),
            (through_sum(covariance, eye), 2 * eye.double()),
        ):
            assert found.dtype == F64
            assert torch.equal(found, at_float64)


def test_circular_taps_keep_the_size_unless_told_otherwise() -> None:
    for kernel in (1, 2, 3, 4, 5):
        same = tap_matrices((6,), kernel, circular=True)
        assert torch.equal(same, tap_matrices((6,), kernel, padding="same", circular=True))
        assert same.shape == (kernel, 6, 6)
    assert tap_matrices((6,), 3).shape == (3, 6, 4)


def test_taps_that_cannot_be_are_refused() -> None:
    for call, message in (
        (lambda: tap_matrices((6,), 2, stride=2, circular=True), '"same" is for stride 1'),
        (lambda: tap_matrices((6,), 2, padding="valid"), "padding='valid'"),  # type: ignore[arg-type]
        (lambda: tap_matrices((2,), 3, padding=3, circular=True), "wraps around 2 positions more than once"),
        (lambda: tap_matrices((6,), 0), "kernel=0"),
        (lambda: tap_matrices((6,), 2, stride=0), "stride=0"),
        (lambda: tap_matrices((6,), 2, padding=-1), "padding=-1"),
        (lambda: tap_matrices((2, 2, 2), 2), "height, width"),
        (lambda: tap_matrices((), 2), "height, width"),
        (lambda: tap_matrices((3, 0), 2), r"shape=\(3, 0\)"),
        (lambda: tap_matrices(3, 2), r"shape=3: a sequence of integers is needed, e.g. \[3\]"),  # type: ignore[arg-type]
        (lambda: tap_matrices((6,), 2.0), "kernel=2.0"),  # type: ignore[arg-type]
        (lambda: tap_matrices((6,), (2, 1)), r"kernel=\(2, 1\) for \(6,\), \(length,\) or \(height, width\)"),
        (lambda: tap_matrices((6, 6), 2, stride=(1, 0)), r"stride=\(1, 0\)"),
        (lambda: tap_matrices((6, 6), 2, padding=(1, -1)), r"padding=\(1, -1\).* from 0 on"),
        (lambda: tap_matrices((6,), 2, dilation=0), "dilation=0"),
        (lambda: tap_matrices((6,), 4, dilation=2), "kernel of 4 at dilation 2 does not fit into 6"),
        (lambda: pool_matrix((4,), 0), "size=0 .* from 1 on"),
        (lambda: pool_matrix((4, 4, 4), 2), "height, width"),
        (lambda: pool_matrix((4, 6), (2, 4)), r"pooling by 4 does not divide 6 positions"),
        (lambda: pool_matrix(4, 2), "shape=4"),  # type: ignore[arg-type]
        (
            lambda: through_convolution(torch.eye(3), TAPS, 1, 1.0),
            r"covariance \[3, 3\] do not fit",
        ),
        (
            lambda: through_convolution(torch.ones(2), TAPS, 1, 1.0),
            r"covariance \[2\] do not fit",
        ),
        (
            lambda: through_convolution(torch.eye(3), torch.eye(3), 1, 1.0),
            r"covariance \[3, 3\] do not fit",
        ),
        (
            lambda: through_average_pool(torch.eye(3), pool_matrix((4,), 2)),
            r"covariance \[3, 3\] do not fit",
        ),
        (
            lambda: through_average_pool(torch.eye(3), torch.ones(3)),
            r"covariance \[3, 3\] do not fit",
        ),
        (lambda: dense_head(0, [1.0]), "positions must be at least 1"),
        (lambda: dense_head(2, [-1.0]), r"variances\[0\]=-1\.0: a finite number from 0 on is"),
        (lambda: dense_head(2, [1.0, 1.0], widths=[-3]), r"widths\[0\] must be at least 1, not -3"),
        (lambda: dense_head(2, [1.0, 1.0], widths=[3], gain=-0.5), "gain=-0.5"),
        (lambda: through_convolution(torch.eye(2), TAPS, -1, 1.0), "channels_out must be at least 1"),
        (lambda: through_convolution(torch.eye(2), TAPS, 1, -1.0), "variance=-1.0"),
        (
            lambda: through_convolution(math.nan * torch.eye(2), TAPS, 1, 1.0),
            r"covariance is not symmetric \(nan of its",
        ),
        (lambda: through_average_pool(torch.ones(2, 2).triu(), pool_matrix((4,), 2)), "covariance .* not symmetric"),
        (lambda: pooled_cnn_geometry(TAPS, 1, sw=math.nan), "sw=nan"),
        (lambda: pooled_cnn_evolution(TAPS, torch.ones(3, 3).triu(), 4), "S .* not symmetric"),
        (lambda: pooled_cnn_geometry(TAPS, 0), "n must be at least 1"),
        (
            lambda: pooled_cnn_evolution(TAPS, torch.eye(2), 4),
            r"S \[2, 2\] do not fit",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()


STD = (0.5, 0.7, 1.1)


def recursion() -> Tensor:
    """G of the residual network below, 5 positions, 2 channels."""
    circle = tap_matrices((5,), 2, circular=True)
    at_sum = through_average_pool(dense_head(1, [STD[2] ** 2]), pool_matrix((5,), 5))
    inside = through_sum(at_sum, through_convolution(at_sum, circle, 2, STD[1] ** 2))
    return through_convolution(inside, circle, 2, STD[0] ** 2)


def test_residual_sum_exactly() -> None:
    """Every weight enters g g^T up to its square, so the two-point rule (+-1) over all 2^14 signs is exact."""

    def f(theta: Tensor, x: Tensor) -> Tensor:
        stem, branch = theta[:4].view(2, 1, 2), theta[4:12].view(2, 2, 2)
        h = nn.functional.conv1d(nn.functional.pad(x[None, None], (0, 1), mode="circular"), stem)
        h = h + nn.functional.conv1d(nn.functional.pad(h, (0, 1), mode="circular"), branch)
        return theta[12:] @ h[0].mean(1)

    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=14)), dtype=F64)
    theta = signs * torch.tensor([STD[0]] * 4 + [STD[1]] * 8 + [STD[2]] * 2, dtype=F64)
    g = vmap(grad(f, argnums=1), in_dims=(0, None), chunk_size=4096)(theta, torch.zeros(5, dtype=F64))
    exact = g.T @ g / len(g)
    assert float((recursion() - exact).norm() / exact.norm()) < 1e-12


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 2, 2, padding="same", padding_mode="circular", bias=False)
        self.branch = nn.Conv1d(2, 2, 2, padding="same", padding_mode="circular", bias=False)
        self.head = nn.Linear(2, 1, bias=False)
        for layer, std in zip((self.stem, self.branch, self.head), STD):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x[:, None])
        return self.head((h + self.branch(h)).mean(2))


def test_residual_sum_is_the_sampled_geometry() -> None:
    G = average_geometry(Residual, (5,), n_networks=20_000)
    exact = recursion()
    assert float((G.matrix - exact).norm() / exact.norm()) < 4 * G.relative_error < 0.15
    plain = through_convolution(  # without the skip the geometry is another one
        through_convolution(
            through_average_pool(dense_head(1, [STD[2] ** 2]), pool_matrix((5,), 5)),
            tap_matrices((5,), 2, circular=True), 2, STD[1] ** 2,
        ),
        tap_matrices((5,), 2, circular=True), 2, STD[0] ** 2,
    )  # fmt: skip
    assert float((G.matrix - plain).norm() / exact.norm()) > 0.3
