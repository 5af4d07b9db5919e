"""Fig. B.3: which norm measures capacity? Rademacher bounds for minimum-norm interpolation with RBF features.

Labels are the sign of the first eigenfunction (of which each sign has a tenth of the points). Singular values are
interpolated, l^c = 1 + c (l - 1), from white (c = 0) to the features' own (c = 1). The bound of the ball ||w|| <=
||w*|| (A = Id) is compared with that in the best norm of the eigenbasis, (1/n) sum_j |u_j^T y| whatever the
eigenvalues. How large the first is at c = 1 is set by `cutoff`: the spectrum ends in rounding.
"""

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from biascope.curvature.complexity import optimal_norm_bound
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import generator, progress

SCALES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@study("lazy/figB.3", sizes={"smoke": {"N": 300, "P": 300, "draws": 20}, "laptop": {}, "paper": {}})
def fig_b_3(
    run: Run,
    *,
    N: Annotated[int, "points of the interval"] = 1000,
    P: Annotated[int, "random features"] = 1000,
    a: Annotated[float, "the interval is [-a, a]"] = 10.0,
    gamma: Annotated[float, "RBF kernel exp(-gamma |x - x'|^2)"] = 1.0,
    n: Annotated[int, "points of a training sample"] = 50,
    draws: Annotated[int, "training samples"] = 100,
    scales: Annotated[tuple[float, ...], "values of c, ascending, the last one 1"] = SCALES,
    cutoff: Annotated[float, "eigenvalues below this share of the largest are left out of the bounds"] = 1e-14,
) -> StudyResult:
    """Complexity bounds and test error over the anisotropy of the features."""
    psi, values = rbf_modes(N, P, a, gamma, run.seed)
    _, y, minority = labels_of(psi)

    def bounds(c: float) -> dict[str, Tensor]:
        return _bounds(psi, 1 + c * (values - 1), y, n, draws, run.seed, cutoff)

    found = [run.cached(f"c={c:g}", partial(bounds, c)) for c in progress(scales, "scales")]
    rows = {key: [torch.as_tensor(part[key]) for part in found] for key in ("identity", "optimal", "error")}
    identity, optimal = ([float(row.median()) for row in rows[key]] for key in ("identity", "optimal"))
    errors = [Estimate.of(row) for row in rows["error"]]
    numbers = {
        "growth of the A = Id bound in the last step of c": Estimate(identity[-1] / identity[-2]),
        "share of the rarer class": Estimate(minority),
    }
    for c, large, small, error in zip(scales, identity, optimal, errors):
        numbers[f"A = Id bound, c = {c:g}, median"] = Estimate(large)
        numbers[f"optimal bound, c = {c:g}, median"] = Estimate(small)
        numbers[f"test error, c = {c:g}"] = error
    return StudyResult(
        measured=f"Median A = Id bound {identity[-2]:.2f} at c = {scales[-2]:g} and {identity[-1]:.3g} at "
        f"{scales[-1]:g}, where it is set by the cutoff of {cutoff:g}; optimal bound at most {max(optimal):.2f}.",
        numbers=numbers,
        figures=(
            Chart("bounds", "Bounds and test error", "c, from white to the features' own singular values",
                  "median over samples",
                  (Series.of("bound with A = Id", scales, identity),
                   Series.of("bound in the optimal norm", scales, optimal),
                   Series.of("test error", scales, [e.value for e in errors], style="dashed")),
                  alt="The A = Id bound jumps up at c = 1; the optimal bound stays flat like the test error.",
                  log_y=True),
        ),
    )  # fmt: skip


def rbf_modes(N: int, P: int, a: float, gamma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors psi [N, r] (columns) and squared singular values l [r] of random Fourier features
    sqrt(2 / P) cos(w x + b), w ~ N(0, 2 gamma), b uniform.
    """
    rng = generator(seed, "rbf")
    x = torch.linspace(-a, a, N, dtype=torch.float64)
    w = math.sqrt(2 * gamma) * torch.randn(P, generator=rng, dtype=torch.float64)
    b = 2 * math.pi * torch.rand(P, generator=rng, dtype=torch.float64)
    features = math.sqrt(2 / P) * torch.cos(x[:, None] * w + b)
    psi, s, _ = torch.linalg.svd(features, full_matrices=False)
    return psi, s.square()


def labels_of(psi: Tensor, least: float = 0.1) -> tuple[int, Tensor, float]:
    """(index, sign [N], share of the rarer class) of the first eigenfunction of which both signs have that share."""
    for mode in range(psi.shape[1]):
        y = torch.where(psi[:, mode] > 0, 1.0, -1.0).double()
        share = float(torch.minimum((y > 0).double().mean(), (y < 0).double().mean()))
        if share >= least:
            break
    return mode, y, share


def _bounds(psi: Tensor, values: Tensor, y: Tensor, n: int, draws: int, seed: int, cutoff: float) -> dict[str, Tensor]:
    """Both bounds and the test error [draws] for random samples of n points; the kernel is psi diag(values) psi^T."""
    found: dict[str, list[float]] = {"identity": [], "optimal": [], "error": []}
    features = psi * values.clamp_min(0).sqrt()
    for draw in range(draws):
        order = torch.randperm(len(y), generator=generator(seed, "sample", draw))
        own, rest = order[:n], order[n:]
        K = features[own] @ features[own].T
        bounds = optimal_norm_bound(K, y[own], cutoff=cutoff)
        # minimum norm interpolation through the singular values of the features, which is better conditioned than K
        w = torch.linalg.lstsq(features[own], y[own, None], driver="gelsd").solution[:, 0]
        guess = (features[rest] @ w).sign()
        found["identity"].append(bounds.euclidean)
        found["optimal"].append(bounds.optimal)
        found["error"].append(float((guess != y[rest]).double().mean()))
    return {key: torch.tensor(rows, dtype=torch.float64) for key, rows in found.items()}
