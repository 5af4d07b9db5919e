"""Slips of the hand with kernels: refused by name, and no number comes out of what is no kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope import kernels
from biascope.kernels.regression import gradient_step_modes, steps_to_loss, time_constants
from biascope.kernels.rkhs import generalization_bound
from biascope.support.errors import InputError

X, Y = torch.linspace(-1, 1, 18).reshape(6, 3).sin(), torch.tensor([0, 1, 1, 0, 1, 0])
F64 = torch.float64
EYE = torch.diag(torch.arange(1.0, 7.0, dtype=F64))


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("bad", [1.5, "10", None, True, [2]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sketch", lambda v: kernels.label_alignment(net(), X, Y, sketch=v)),
        ("dim", lambda v: kernels.sketched_ntk(net(), X, dim=v)),
        ("seed", lambda v: kernels.sketched_ntk(net(), X, dim=4, seed=v)),
        ("seed", lambda v: kernels.metric_eigenpairs(net(), X, seed=v)),
        ("k", lambda v: bs.ntk(net(), X).energy_concentration(torch.ones(6, 2), v)),
        ("k", lambda v: bs.ntk(net(), X).pca(v)),
        ("j", lambda v: kernels.metric_eigenpairs(net(), X).vector(v)),
    ],
)
def test_counts_and_seeds(name: str, call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match=f"^{name}"):
        call(bad)


@pytest.mark.parametrize("bad", [None, "0.1", [0.1], torch.tensor([0.1, 0.2]), 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "call",
    [
        lambda v: kernels.gradient_descent(EYE, EYE[0], 3, lr=v),
        lambda v: gradient_step_modes(EYE, EYE[0], lr=v),
        lambda v: time_constants(EYE.diagonal(), lr="0" if v is None else v),  # None is the default
        lambda v: steps_to_loss(EYE, EYE[0], 0.1, lr="0" if v is None else v),
    ],
)
def test_rates(call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match="lr"):
        call(bad)


@pytest.mark.parametrize("bad", [{"K": EYE}, None, EYE.to(torch.complex64), EYE[0]])
@pytest.mark.parametrize(
    "call",
    [
        lambda K: kernels.kernel_regression(K, EYE[0]),
        lambda K: kernels.kernel_regression(EYE, EYE[0], K_test=EYE[0] if K is None else K),  # None is the default
        lambda K: kernels.gradient_flow(K, EYE[0], 1.0),
        lambda K: kernels.rkhs_norm(K, EYE[0]),
        lambda K: generalization_bound(K, EYE[0]),
        lambda K: kernels.local_energy(K),
    ],
)
def test_what_is_no_kernel(call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match=r"K|kernel"):
        call(bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((EYE.numpy(), "trace", "trace", True), r"values of mode 'trace': .* not a ndarray \[6, 6\] float64"),
        ((EYE, "trace", "full", True), r"values of mode 'full': .* not a Tensor \[6, 6\]"),
        ((EYE.long(), "trace", "trace", True), "values of mode 'trace': .* torch.int64"),
        ((EYE, "trace", "trac", True), r"values of mode 'trac': .*\(trace\)"),
        ((EYE[:4], "trace", "trace", True), r"a symmetric kernel is square, not \[4, 6\]"),
    ],
)
def test_kernels_of_ones_own(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kernels.Kernel(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": 0}, "params=0: .*a string or a sequence or a function"),
        ({"params": [1, 2]}, r"params=\[1, 2\]: .*a string or a sequence or a function"),
        ({"precision": ["float32"]}, "there is float32, float64"),
        ({"outputs": ["full"]}, "outputs"),
        ({"x2": (X * 10).long()}, "x is torch.float32 and x2 is torch.int64"),
        ({"output": 1}, "output=1: a function is needed"),
        ({"by_layer": "yes"}, "by_layer='yes': True or False"),
    ],
)
def test_options_of_the_kernel(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bs.ntk(net(), X, **options)


@pytest.mark.parametrize("params", [0, [1, 2], (None,)])
def test_parameters_are_chosen_by_name(params: Any) -> None:
    with pytest.raises(InputError, match=r"params=.*: names, 'all' or a function \(name, tensor\) -> bool are needed"):
        bs.Jacobian(net(), X, params=params)
    assert bs.Jacobian(net(), X, params={"0", "2.bias"}).p == 18  # type: ignore[arg-type]


def test_a_class_is_no_network() -> None:
    with pytest.raises(InputError, match=r"the class Linear: pass .*Linear\(...\)"):
        bs.ntk(nn.Linear, X)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"got the class Linear: pass Linear\(...\)"):
        bs.Jacobian(nn.Linear, X)  # type: ignore[arg-type]


def test_a_file_is_no_folder_of_tiles(tmp_path: Path) -> None:
    (tmp_path / "kernel").write_text("")
    with pytest.raises(InputError, match="is a file: a kernel is stored in a folder"):
        bs.ntk(net(), X, store=tmp_path / "kernel")
    with pytest.raises(InputError, match="store=3: a string or a path or None is needed"):
        bs.ntk(net(), X, store=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [kernels.binarization_overlap, kernels.fourier_power])
def test_vectors_without_an_overlap_or_a_frequency(call: Callable[[Any], Any]) -> None:
    for bad in (EYE[None], EYE.to(torch.complex64)):
        with pytest.raises(InputError, match="vector"):
            call(bad)


def test_products_of_the_jacobian_name_what_does_not_fit() -> None:
    J = bs.Jacobian(net(), X)
    with pytest.raises(InputError, match=r"u must be \[6, 2\] or \[12\], got \[2, 6\]"):
        J.vjp(torch.ones(2, 6))  # as many numbers, in another order
    with pytest.raises(InputError, match="u: expected a tensor, got ndarray"):
        J.vjp(np.ones((6, 2)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"0\.bias: expected a tensor, got ndarray"):
        J.jvp({"0.bias": np.ones(4)})  # type: ignore[dict-item]
    torch.testing.assert_close(J.vjp(torch.ones(12)).as_subclass(torch.Tensor), J.vjp(torch.ones(6, 2)).clone())


def test_a_column_of_classes_is_not_taken_for_values() -> None:
    K, three = bs.ntk(net(), X, outputs="trace"), torch.tensor([0, 1, 2, 0, 2, 1])
    assert K.alignment(three[:, None]) == K.alignment(three)
    signs = 2 * Y - 1
    assert K.alignment(signs[:, None]) == pytest.approx(K.alignment(signs.double()), rel=1e-12)
    assert K.alignment(three[:, None].double()) != pytest.approx(K.alignment(three), rel=1e-3)
