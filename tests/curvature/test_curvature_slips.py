"""Slips of the hand with metrics and bounds: refused by name; none broadcasts to a number."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope import curvature
from biascope.curvature import complexity
from biascope.support.errors import InputError

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
        ({"bias": torch.zeros(1)}, r"'bias', a tensor of shape \[2\], got shape \[1\]"),  # would broadcast
        ({"bias": np.zeros(2)}, r"'bias', a tensor of shape \[2\], got ndarray"),
        ({"bias": None}, r"'bias', a tensor of shape \[2\], got NoneType"),
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
        with pytest.raises(InputError, match="needs the parameter 'bias'"):
            call()


@pytest.mark.parametrize("representation", ["ekfac", "dense", "implicit"])
def test_vectors_of_other_lengths(representation: str) -> None:
    F = metric(representation)
    for bad in (torch.zeros(7), torch.zeros(8, 1), torch.zeros(())):
        with pytest.raises(InputError, match=r"a vector \[8\] or rows \[m, 8\]"):
            F.space.unflatten(bad)
    with pytest.raises(InputError, match=r"damping='0\.1': one number is needed"):
        F.solve(torch.ones(8), damping="0.1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ndarray"):
        F.solve(np.ones(8), damping=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [K[:4], K[0], K[None], K[:0, :0], K.to(torch.complex64), K * torch.nan, -K])
@pytest.mark.parametrize(
    "call",
    [lambda k: complexity.ball_bound(1.0, k), lambda k: complexity.multiclass_complexity(1.0, k, 2, 1.0)],
)
def test_bounds_need_a_kernel(call: Callable[[Any], float], bad: Tensor) -> None:
    with pytest.raises(InputError, match="K"):
        call(bad)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), "1", None])
def test_numbers_of_the_bounds(bad: Any) -> None:
    for call in (
        lambda: complexity.ball_bound(bad, K),
        lambda: complexity.ball_complexity(bad, K),
        lambda: complexity.margin_bound(bad, 0.1, 100),
        lambda: complexity.margin_bound(0.1, bad, 100),
        lambda: complexity.learning_flow_bound([bad], [1.0], 4),
    ):
        with pytest.raises(InputError, match="number"):
            call()
    for n in (0, -1):
        with pytest.raises(InputError, match="n must be at least 1"):
            complexity.margin_bound(0.1, 0.1, n)
    with pytest.raises(InputError, match="samples must be at least 2"):
        complexity.ball_complexity(1.0, K, samples=1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y.float(), "not torch.float32"),
        (Y > 0, "not torch.bool"),
        (Y - 1, r"class indices \[6\] from 0 to 2"),
        (Y + 2, r"class indices \[6\] from 0 to 2"),
        (Y[:4], r"class indices \[6\]"),
        (nn.functional.one_hot(Y, 3), r"class indices \[6\]"),
    ],
)
def test_labels_of_margins(labels: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        complexity.margin_risk(X, labels, 1.0)
    assert complexity.margin_risk(X, Y.to(torch.uint8), 1.0) == complexity.margin_risk(X, Y, 1.0)


def test_complex_targets_do_not_lose_a_part() -> None:
    y = torch.ones(6, 2, dtype=torch.complex64)
    with pytest.raises(InputError, match=r"gaussian labels, torch\.complex64 .* do not fit"):
        bs.fisher(net(), (X, y), "dense", "gaussian", "empirical")


def test_paths_of_networks_that_are_not_trained() -> None:
    with pytest.raises(InputError, match="no parameter has requires_grad"):
        complexity.PathComplexity(X).update(net().requires_grad_(False))
