"""Theorem 1, Lemmas 1 and 2, Eqs. 4 and 5, Examples 2 to 4: what is printed against what is exact.

"Exact over printed" is 1 where the paper is right, and "sampled over exact", from networks drawn here, must be 1 for
the correction (`biascope.geometry.closed_forms`) to be right. Where the two differ by a factor alone, nothing that the
paper concludes from the formula changes: directions and their order are compared apart.
"""

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from biascope.geometry import analytic_geometry, closed_forms
from biascope.geometry.pooling import box_prefilter, pooling_bayes_accuracy, transfer
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import Array
from biascope.support import generator

F64 = torch.float64
POOLINGS = (2, 4, 8)


@study("nad/theory", sizes={"smoke": {"draws": 2000}, "laptop": {}, "paper": {}})
def theory(
    run: Run,
    *,
    D: Annotated[int, "dimension of the models that are sampled"] = 16,
    S: Annotated[int, "their pooling factor"] = 4,
    hidden: Annotated[int, "hidden units of Example 3"] = 7,
    draws: Annotated[int, "networks in each group"] = 20_000,
    groups: Annotated[int, "independent groups, for the errors"] = 10,
    eps: Annotated[float, "signal"] = 1.0,
    sigma: Annotated[float, "noise of Lemma 1"] = 0.5,
    bayes_length: Annotated[int, "length of the signals of Theorem 1"] = 128,
) -> StudyResult:
    """Printed formulas of the paper against exact ones, and these against sampled networks."""
    m, l = torch.as_tensor(np.abs(transfer(box_prefilter(S, D)))).double(), 1  # noqa: E741
    A, x = closed_forms.aliasing_matrix(D, S), torch.randn(D, generator=generator(run.seed, "x"), dtype=F64)
    power = m.square()
    printed_Xi = closed_forms.xi_matrix(x)
    printed_Xi = printed_Xi - torch.diag(printed_Xi.diagonal()) + (1 - 2 / math.pi) / 2 * torch.eye(D, dtype=F64)
    signal = torch.diag(power * (torch.arange(D) == l))
    cases: dict[str, tuple[Tensor, Tensor, Callable[[torch.Generator], Tensor]]] = {
        "Lemma 1": (
            2 * eps**2 * signal + 2 * sigma**2 * torch.diag(power),
            closed_forms.deep_linear_hessians(m, S, l, eps, sigma)[1],
            lambda rng: _curvature(rng, draws, A, m, l, eps, sigma),
        ),
        "Eq. 4": (
            torch.diag(power),
            closed_forms.linear_pooling_covariance(m, S),
            lambda rng: _moment((_normal(rng, draws, len(A)) @ A) * _normal(rng, draws, D) * m),
        ),
        "Eq. 5": (
            (1 + 1 / S) * torch.diag(power),
            closed_forms.linear_pooling_mixed(m, S),
            lambda rng: _mixed(rng, draws, A, m),
        ),
        "Example 2": (torch.eye(D, dtype=F64), torch.eye(D, dtype=F64), lambda rng: _moment(_normal(rng, draws, D))),
        "Example 3": (
            torch.eye(D, dtype=F64) / 2,
            closed_forms.mlp_geometry_constant(D, [hidden], [1.0, 1.0]) * torch.eye(D, dtype=F64),
            lambda rng: _hidden_layer(rng, draws, hidden, x),
        ),
        "Example 4": (
            (A.T @ A) * torch.outer(m, m) * printed_Xi,
            closed_forms.nonlinear_pooling_covariance(m, S, x),
            lambda rng: _moment(_nonlinear(rng, draws, A, m, x)),
        ),
    }
    numbers: dict[str, Estimate] = {}
    for name, (printed, exact, sample) in cases.items():

        def drawn(i: int, name: str = name, sample: Callable[[torch.Generator], Tensor] = sample) -> dict[str, Tensor]:
            return {"moment": sample(generator(run.seed, name, i))}

        made = run.cached_each(name, range(groups), drawn)
        sizes = [float((torch.as_tensor(each["moment"]) * exact).sum() / exact.square().sum()) for each in made]
        numbers[f"{name}: exact over printed"] = Estimate(float((exact * printed).sum() / printed.square().sum()))
        numbers[f"{name}: correlation of exact and printed"] = Estimate(correlation(exact, printed))
        numbers[f"{name}: sampled over exact"] = Estimate.of(sizes)
    off = {S: bayes_errors(S, bayes_length, eps) for S in POOLINGS}
    for k, against in enumerate(("real signals", "the complex model of the proof")):
        for S_ in POOLINGS:
            numbers[f"Theorem 1, S = {S_}: largest error of the printed formula, {against}"] = Estimate(off[S_][k])
    # g = 0.1 t^2 and f = theta x: |g'| = 0.2 t, so that alpha = 0.2 and the gradient of q by theta is 0.2 theta x^2
    numbers["App. E: cosine of G of three channels and of its product form"] = Estimate(channels(3))
    numbers["Lemma 2: left side over the printed right side"] = Estimate(0.2 / 0.2**2)
    numbers["Lemma 2: left side over the right side with alpha"] = Estimate(1.0)
    ratios = [numbers[f"{name}: exact over printed"].value for name in cases]
    chart = Chart(
        "ratios",
        "Exact over printed",
        "formula",
        "exact over printed",
        (
            Series.of("exact over printed", range(1, len(cases) + 1), ratios, style="points"),
            Series.of("as printed", [1, len(cases)], [1.0, 1.0], style="dashed"),
        ),
        alt="; ".join(f"{name} {ratio:.3g}" for name, ratio in zip(cases, ratios)) + ".",
        x_names=tuple(cases),
    )
    return StudyResult(
        measured="Exact over printed: "
        + "; ".join(f"{name} {ratio:.3g}" for name, ratio in zip(cases, ratios))
        + ". Lemma 2 with alpha^2 fails for g = 0.1 t^2.",
        numbers=numbers,
        figures=(chart,),
    )


def correlation(one: Tensor, other: Tensor) -> float:
    """Cosine of two matrices."""
    return min(max(float((one * other).sum() / (one.norm() * other.norm())), -1.0), 1.0)


def channels(K: int, side: int = 8) -> float:
    """Cosine of the exact G of a linear CNN with K input channels and of I x G of one channel (App. E)."""

    def build(k: int) -> nn.Module:
        first, second = (nn.Conv2d(c, 6, 3, padding=1) for c in (k, 6))
        return nn.Sequential(
            first, nn.AvgPool2d(2), second, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6 * side**2 // 16, 1)
        )

    one, all_ = (analytic_geometry(lambda k=k: build(k), (k, side, side)) for k in (1, K))  # type: ignore[misc]
    return correlation(all_, torch.kron(torch.eye(K, dtype=one.dtype), one))


def bayes_errors(S: int, D: int, eps: float, sigma: float = 3.0) -> tuple[float, float]:
    """Largest error of the printed Theorem 1: for real signals, and for the circular complex ones of its proof.

    Over frequencies that do not alias onto their own conjugates; the theorem is not meant for the others.
    """
    box, M = box_prefilter(S, D), D // S
    ordinary = [k for k in range(1, D // 2) if (2 * k) % M]

    def accuracy(variant: str) -> Array:
        return np.array([pooling_bayes_accuracy(box, S, k, eps, sigma, variant) for k in ordinary])  # type: ignore[arg-type]

    printed = accuracy("printed")
    return float(np.abs(printed - accuracy("exact")).max()), float(np.abs(printed - accuracy("complex")).max())


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=F64)


def _moment(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def _curvature(
    rng: torch.Generator,
    draws: int,
    A: Tensor,
    m: Tensor,
    l: int,  # noqa: E741
    eps: float,
    sigma: float,
) -> Tensor:
    """Hessian of (y - f)^2 by phi, in which f is linear: 2 r r^T with r = (A^T theta) . m . x."""
    y = 2.0 * (torch.arange(draws) % 2) - 1
    x = sigma * _normal(rng, draws, len(m))
    x[:, l] += eps * y
    return 2 * _moment((_normal(rng, draws, len(A)) @ A) * m * x)


def _mixed(rng: torch.Generator, draws: int, A: Tensor, m: Tensor) -> Tensor:
    """H^T H: the block of theta is A diag(m . phi), that of phi is diag(A^T theta . m)."""
    theta, phi = _normal(rng, draws, len(A)), _normal(rng, draws, len(m))
    return (A.T @ A) * _moment(m * phi) + torch.diag(((theta @ A) * m).square().mean(0))


def _hidden_layer(rng: torch.Generator, draws: int, hidden: int, x: Tensor) -> Tensor:
    Phi, theta = _normal(rng, draws, hidden, len(x)), _normal(rng, draws, hidden)
    return _moment(torch.einsum("kh,khd->kd", theta * (Phi @ x > 0), Phi))


def _nonlinear(rng: torch.Generator, draws: int, A: Tensor, m: Tensor, x: Tensor) -> Tensor:
    phi = _normal(rng, draws, len(m))
    return (_normal(rng, draws, len(A)) @ A) * (phi * x >= 0) * phi * m
