"""What the paper proves, as printed and exactly: linear regression, Theorems 3.1 to A.3, Corollary A.4, Lemmas A.5-7.

Whether G is a multiple of the identity (Theorem A.2, Lemma A.7) is asked of sampled networks: the share of G that is
not one, ||G - (tr G / D) I||^2 / ||G||^2, from products of independent groups, in which sampling noise has no part.
"""

import math
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from biascope import average_geometry
from biascope.ensembles import record
from biascope.geometry import correlation, linear_cnn, mlp_theory, patch_normalisation
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, generator
from biascope_papers.gih.averages import estimate, gram, squared

F64 = torch.float64
WIDTHS = (100, 300, 1000, 3000, 10_000, 30_000)  # a rate is of large ones


@study("gih/theory", sizes={"smoke": {"networks": 400, "largest": 64}, "laptop": {}, "paper": {}})
def theory(
    run: Run,
    *,
    networks: Annotated[int, "networks in each group, for Theorem A.2 and Lemma A.7"] = 5000,
    groups: Annotated[int, "independent groups"] = 10,
    largest: Annotated[int, "largest dimension of Theorem 3.1; the width is its square"] = 256,
    decay: Annotated[float, "eigenvalue i of the data's S falls as i to minus this"] = 1.5,
) -> StudyResult:
    """Printed statements of the paper against exact and sampled ones."""
    numbers = {**sections_3(largest, decay), **appendix()}
    for name, shape in SHAPES.items():

        def group(i: int, name: str = name, shape: tuple[int, ...] = shape) -> dict[str, Tensor]:
            seed = derive(run.seed, name, i)
            if name == LEMMA:
                d = torch.randn(networks, *shape, generator=generator(seed), dtype=F64)
                return {"matrix": (d / d.norm(dim=1, keepdim=True)).T @ (d / d.norm(dim=1, keepdim=True)) / networks}
            made = average_geometry(record(NETWORKS[name]), shape, networks, seed=seed, probe_std=1.0)
            return {"matrix": made.matrix.double()}

        parts = [torch.as_tensor(each["matrix"]) for each in run.cached_each(name, range(groups), group)]
        numbers[f"{name}: share of it that is no multiple of I"] = not_identity(torch.stack(parts))
    curve = distances(WIDTHS, decay)
    chart = Chart(
        "rate",
        "Theorem 3.2: how fast Delta becomes a multiple of GSG",
        "width",
        "distance of the two, each divided by its norm",
        (
            Series.of("exact", WIDTHS, curve),
            Series.of("1 / width", WIDTHS, [curve[0] * WIDTHS[0] / n for n in WIDTHS], style="dashed"),
        ),
        "The distance falls as one over the width.",
        log_x=True,
        log_y=True,
    )
    shown = {name: number for name, number in numbers.items() if "over" in name or "share" in name}
    return StudyResult(
        measured="; ".join(f"{name} {number}" for name, number in shown.items()) + ".",
        numbers=numbers,
        figures=(chart,),
    )


def spectrum(D: int, decay: float) -> Tensor:
    """A data matrix X [D, D] with X^T X = S of eigenvalues i^-decay, in a random basis."""
    Q = torch.linalg.qr(torch.randn(D, D, generator=generator(0, "basis", D), dtype=F64)).Q
    X: Tensor = torch.diag(torch.arange(1, D + 1, dtype=F64) ** (-decay / 2)) @ Q
    return X


def distances(widths: tuple[int, ...], decay: float, D: int = 9, kernel: int = 3) -> list[float]:
    """Distance [widths] of Delta and GSG of the linear CNN, both divided by their norms (Delta is negative)."""
    taps, X = linear_cnn.tap_matrices((D,), kernel), spectrum(D, decay)
    S, K = X.T @ X, linear_cnn.patch_overlap(taps)
    target = K @ S @ K / (K @ S @ K).norm()
    found = [linear_cnn.pooled_cnn_evolution(taps, S, n) for n in widths]
    return [float((each / each.norm() + target).norm()) for each in found]


def slope(x: tuple[int, ...], y: list[float]) -> float:
    """On logarithmic axes."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def sections_3(largest: int, decay: float) -> dict[str, Estimate]:
    """Linear regression and Theorems 3.1 and 3.2."""
    X = spectrum(16, decay)
    Delta, S = mlp_theory.linear_regression_evolution(X.T @ X), X.T @ X
    numbers = {
        "linear regression: exact Delta over the printed -s^2 S": Estimate(float(Delta.norm() / S.norm())),
        "linear regression: Corr(Delta, S)": Estimate(correlation(Delta, S)),
    }
    sizes = [largest // 16, largest // 4, largest]
    for D in sizes:
        X = spectrum(D, decay)
        found = abs(correlation(mlp_theory.mlp_evolution(X, D**2), X.T @ X))
        numbers[f"Theorem 3.1: 1 - |Corr(Delta, S)|, D = {D}, width D^2"] = Estimate(1 - found)
    first, last = (numbers[f"Theorem 3.1: 1 - |Corr(Delta, S)|, D = {D}, width D^2"] for D in (sizes[0], sizes[-1]))
    numbers["Theorem 3.1: 1 - |Corr(Delta, S)|, largest D over smallest"] = Estimate(last.value / first.value)
    n = 1000
    exact, _ = mlp_theory.large_dimension_constants(n, 10**6)
    printed = 2 * n * (1 / 4 + (n - 1) / 3 + 1 / 2 + (n - 1) / 3)
    numbers["Theorem 3.1: exact over printed factor of S, width 1000, unit variances"] = Estimate(exact / printed)
    numbers["Theorem 3.2: slope of the distance from GSG over the width"] = Estimate(
        slope(WIDTHS, distances(WIDTHS, decay))
    )
    numbers["Theorem 3.2: exact over printed factor of GSG, width 4"] = Estimate((4 * 5 + 4 * 6) / (2 * 4**2))
    return numbers


def appendix() -> dict[str, Estimate]:
    """Theorem A.3, Corollary A.4, Lemmas A.5 and A.6."""
    taps = linear_cnn.tap_matrices((9,), 3)
    K = linear_cnn.patch_overlap(taps)
    covered = taps.sum((0, 2)).double()
    off = K - torch.diag(K.diagonal())
    numbers = {
        "Theorem A.3: share of G off its diagonal": Estimate(float(off.square().sum() / K.square().sum())),
        "Theorem A.3: correlation of the diagonal with how often an input is read": Estimate(
            float(torch.corrcoef(torch.stack([K.diagonal(), covered]))[0, 1])
        ),
    }
    moments = [each @ each.T + 0.1 * torch.eye(3, dtype=F64) for each in _draws("patches", 2, 3, 3)]
    moment = patch_normalisation.normalised_moment(moments[0], moments[1])
    ends = [torch.linalg.eigvalsh(each) for each in moments]
    values = torch.linalg.eigvalsh((moment + moment.T) / 2)
    low, high = (1 / float((ends[0][i] * ends[1][i]).sqrt()) for i in (-1, 0))
    lower, upper = patch_normalisation.normalised_moment_bounds(moments[0], moments[1])
    numbers |= {
        "Corollary A.4: smallest eigenvalue over the printed lower bound": Estimate(float(values[0]) / low),
        "Corollary A.4: largest eigenvalue over the printed upper bound": Estimate(float(values[-1]) / high),
        "Corollary A.4: smallest eigenvalue over the lower bound with 1/p": Estimate(float(values[0] / lower)),
        "Corollary A.4: largest eigenvalue over the upper bound with 1/p": Estimate(float(values[-1] / upper)),
    }
    sizes, errors = (10, 30, 100, 300), list[float]()
    for D in sizes:
        pairs = _draws("A.5", 50, 2, D)
        errors.append(sum(orthant_error(a, b) for a, b in pairs) / len(pairs))
    numbers["Lemma A.5: slope of the relative error over D"] = Estimate(slope(sizes, errors))
    for D in (2, 1000):
        mean, square = mlp_theory.both_active_moments(D)
        numbers[f"Lemma A.6: mean, D = {D}"] = Estimate(mean)
        numbers[f"Lemma A.6: mean of the square, D = {D}"] = Estimate(square)
    return numbers


def orthant_error(a: Tensor, b: Tensor) -> float:
    """Distance of E[1(d.a > 0) 1(d.b > 0) d d^T] / P from I, over the norm of I (Lemma A.5)."""
    p = mlp_theory.both_active(math.acos(float(a @ b / (a.norm() * b.norm()))))
    distance = (mlp_theory.active_second_moment(a, b) / p - torch.eye(len(a), dtype=F64)).norm()
    return float(distance) / math.sqrt(len(a))


def _draws(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, name, *shape), dtype=F64)


def not_identity(parts: Tensor) -> Estimate:
    """||M - (tr M / D) I||^2 / ||M||^2 of the mean of independent estimates [R, D, D], without their noise."""
    eye = torch.eye(parts.shape[1], dtype=F64)
    rest = parts - parts.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye
    inner, whole = gram(rest), gram(parts)
    return estimate(lambda w: squared(inner, w) / squared(whole, w), len(parts))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))


def _cnn(circular: bool) -> nn.Module:
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular"} if circular else {}
    side = 6 if circular else 2
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, **options), nn.ReLU(), nn.Conv2d(6, 6, 3, **options), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * side**2, 1),
    )  # fmt: skip


LEMMA = "Lemma A.7, mean of d d^T / |d|^2"
NETWORKS = {
    "Theorem A.2, MLP": _mlp,
    "Theorem A.2, CNN with valid padding": lambda: _cnn(circular=False),
    "Theorem A.2, CNN with circular padding": lambda: _cnn(circular=True),
}
SHAPES: dict[str, tuple[int, ...]] = {**dict.fromkeys(NETWORKS, (1, 6, 6)), LEMMA: (10,)}
