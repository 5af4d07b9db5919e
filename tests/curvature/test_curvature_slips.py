"""Slips of the hand with metrics and bounds: refused by name; none broadcasts to a number."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope import curvature
from biascope.errors import InputError

X, Y = torch.linspace(-1, 1, 18).reshape(6, 3).sin(), torch.tensor([0, 1, 1, 0, 1, 0])
K = torch.eye(6)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def metric(representation: str = "ekfac") -> curvature.Metric:
    return bs.fisher(net(), X, representation)  # type: ignore[arg-type]


def weights() -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net().named_parameters()}


@pytest.mark.parametrize(
    "call",
    [
        lambda p: curvature.consolidation_penalty(metric(), p, weights()),
        lambda p: curvature.consolidation_penalty(metric(), weights(), p),
        lambda p: curvature.pruning_scores(metric(), p),
        lambda p: curvature.laplace_samples(metric(), p, 6, 1.0),
    ],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(1)}, r"'bias' has shape \[1\], the parameter \[2\]"),  # would broadcast
        ({"bias": np.zeros(2)}, "bias: expected a tensor, got ndarray"),
        ({"bias": None}, "bias: expected a tensor, got NoneType"),
    ],
)
def test_parameters_that_are_not_the_metrics(call: Callable[[Any], Any], change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(weights() | change)


def test_parameters_left_out() -> None:
    few = {"weight": weights()["weight"]}
    for call in (
        lambda: curvature.pruning_scores(metric(), few),
        lambda: curvature.laplace_samples(metric(), few, 6, 1.0),
        lambda: curvature.consolidation_penalty(metric(), few, few),
    ):
        with pytest.raises(InputError, match="'bias' is a parameter of the metric but is not given"):
            call()


@pytest.mark.parametrize("representation", ["ekfac", "dense", "implicit"])
def test_vectors_of_other_lengths(representation: str) -> None:
    F = metric(representation)
    for bad in (torch.zeros(7), torch.zeros(8, 1), torch.zeros(())):
        with pytest.raises(InputError, match=r"a vector \[8\] or rows \[m, 8\]"):
            F.unflatten(bad)
    with pytest.raises(InputError, match=r"damping='0\.1': one number is needed"):
        F.solve(torch.ones(8), damping="0.1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ndarray"):
        F.solve(np.ones(8), damping=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [K[:4], K[0], K[None], K[:0, :0], K > 0, K.to(torch.complex64), K * torch.nan, -K])
@pytest.mark.parametrize(
    "call",
    [lambda k: curvature.ball_bound(1.0, k), lambda k: curvature.multiclass_complexity(1.0, k, 2, 1.0)],
)
def test_bounds_need_a_kernel(call: Callable[[Any], float], bad: Tensor) -> None:
    with pytest.raises(InputError, match="K "):
        call(bad)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), "1", None])
def test_numbers_of_the_bounds(bad: Any) -> None:
    for call in (
        lambda: curvature.ball_bound(bad, K),
        lambda: curvature.ball_complexity(bad, K),
        lambda: curvature.margin_bound(bad, 0.1, 100),
        lambda: curvature.margin_bound(0.1, bad, 100),
        lambda: curvature.learning_flow_bound([bad], [1.0], 4),
    ):
        with pytest.raises(InputError, match="number"):
            call()
    for n in (0, -1):
        with pytest.raises(InputError, match="n must be at least 1"):
            curvature.margin_bound(0.1, 0.1, n)
    with pytest.raises(InputError, match="samples must be at least 2"):
        curvature.ball_complexity(1.0, K, samples=1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y.float(), r"class indices \(integers\), got torch.float32"),
        (Y > 0, r"class indices \(integers\), got torch.bool"),
        (Y - 1, "labels has class -1, but outputs has classes 0 to 2"),
        (Y + 2, "labels has class 3, but outputs has classes 0 to 2"),
        (Y[:4], "outputs must be"),
        (nn.functional.one_hot(Y, 3), "outputs must be"),
    ],
)
def test_labels_of_margins(labels: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        curvature.margin_risk(X, labels, 1.0)
    assert curvature.margin_risk(X, Y.to(torch.uint8), 1.0) == curvature.margin_risk(X, Y, 1.0)


def test_margins_of_nan_are_no_risk() -> None:
    with pytest.raises(InputError, match="outputs has a NaN"):
        curvature.margin_risk(X * torch.nan, Y, 1.0)


def test_complex_targets_do_not_lose_a_part() -> None:
    y = torch.ones(6, 2, dtype=torch.complex64)
    with pytest.raises(InputError, match=r"labels must be real numbers, got torch\.complex64"):
        bs.fisher(net(), (X, y), "dense", "gaussian", "empirical")


def test_samples_are_read_where_the_answer_is_exact_too() -> None:
    with pytest.raises(InputError, match="samples must be at least 1, not 0"):
        curvature.effective_dimension(metric("dense"), 0.1, samples=0)


def test_paths_of_networks_that_are_not_trained() -> None:
    with pytest.raises(InputError, match="Linear has no parameter that is trained"):
        curvature.PathComplexity(X).update(net().requires_grad_(False))
