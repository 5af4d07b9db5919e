"""Trace, diagonal and Frobenius norm from products with random vectors, each with its standard error.

Asked for as many products as the operator has columns, every estimator gives the exact value with standard error 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from biascope.arguments import as_whole
from biascope.errors import InputError, UnsupportedError
from biascope.linalg.operator import LinearOperator, need_operator
from biascope.linalg.random import Probes, blocks_of_probes, check_probes, draw, generator_from
from biascope.linalg.stable import column_dots, thin_svd
from biascope.tables import facts, number, one_line


@dataclass(frozen=True)
class Estimate:
    """A sampled number (0-dimensional) or vector, in float64.

    Attributes:
        value: the estimate.
        standard_error: of the value; NaN when one sample cannot tell, 0 when exact.
        samples: independent (or exchangeable) samples behind it.
        matvecs: products with one vector.
        seed: of the probes.
    """

    value: Tensor
    standard_error: Tensor
    samples: int
    matvecs: int
    seed: int
    __repr__ = one_line

    def __float__(self) -> float:
        return float(self.value)

    def _repr_html_(self) -> str:
        """The value with its error, of a vector the first ones, for notebooks."""
        pairs = zip(self.value.flatten()[:5].tolist(), self.standard_error.flatten()[:5].tolist())
        rows = {"value": ", ".join(number(*pair) for pair in pairs) + (", ..." if self.value.numel() > 5 else "")}
        return facts("Estimate", rows | {"samples": self.samples, "products": self.matvecs, "seed": self.seed})


def mean_estimate(samples: Tensor, matvecs: int, seed: int) -> Estimate:
    """Mean and standard error over the first dimension of samples [m, ...]."""
    m = samples.shape[0]
    error = samples.std(0) / math.sqrt(m) if m > 1 else torch.full_like(samples[0], math.nan)
    return Estimate(samples.mean(0), error, m, matvecs, seed)


def hutchinson(
    A: LinearOperator, samples: int = 32, probes: Probes = "rademacher", seed: int = 0, block: int = 32
) -> Estimate:
    """tr A as the mean of z^T A z. Error falls as 1 / sqrt(samples).

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal
        >>> float(hutchinson(Diagonal(torch.arange(50.0)), samples=4))
        1225.0
    """
    _check(A)
    samples, block = check_probes(samples, seed, probes, block)
    if samples >= A.shape[0]:
        return _exact(A.trace(), A, seed)
    with torch.no_grad():
        parts = [column_dots(Z, A._matmat(Z)) for Z in blocks_of_probes(A, samples, seed, probes, block)]
        return mean_estimate(torch.cat(parts), samples, seed)


def hutchpp(A: LinearOperator, matvecs: int = 48, probes: Probes = "rademacher", seed: int = 0) -> Estimate:
    """tr A by Hutch++ (Meyer, Musco, Musco, Woodruff 2021): a third of the products finds the range Q, a third gives
    tr Q^T A Q exactly, the last third samples what is left. Exact when rank A <= matvecs / 3.

    Example:
        >>> import torch
        >>> from biascope.linalg import LowRank
        >>> round(float(hutchpp(LowRank(torch.eye(100)[:, :5]), matvecs=30)), 4)
        5.0
    """
    _check(A)
    check_probes(1, seed, probes)
    third = as_whole(matvecs, "matvecs") // 3
    if third < 1:
        raise InputError(f"hutchpp needs at least 3 matvecs, not {matvecs}")
    if matvecs >= A.shape[0]:
        return _exact(A.trace(), A, seed)
    with torch.no_grad():
        generator = generator_from(seed)
        # the sketch is Gaussian: signs can, with few probes, miss a direction of the range
        Q = torch.linalg.qr(A._matmat(draw(A.shape[0], third, A, generator, "gaussian")))[0]
        head = column_dots(Q, A._matmat(Q)).sum()
        G = draw(A.shape[0], third, A, generator, probes)
        G = G - Q @ (Q.T @ G)
        rest = mean_estimate(column_dots(G, A._matmat(G)), 3 * third, seed)
        return Estimate(head + rest.value, rest.standard_error, third, 3 * third, seed)


def xtrace(A: LinearOperator, matvecs: int = 32, probes: Probes = "gaussian", seed: int = 0) -> Estimate:
    """tr A by XTrace (Epperly, Tropp, Webber 2024): every probe serves both to find the range and, left out, to sample
    the rest. The best of the three for decaying spectra; exact when rank A < matvecs / 2.

    Gaussian probes, once projected off the range, are rescaled to their expected length, which removes the variance of
    the length. Rademacher probes have a small chance (2^-samples) of missing a coordinate direction. The samples share
    their ranges, so their spread would be too small an error (0.6 to 0.95 of the true one on test spectra); instead it
    is a jackknife, from the estimates with one probe taken away altogether: 1 to 3 times the true one, never below.

    Example:
        >>> import torch
        >>> from biascope.linalg import LowRank
        >>> round(float(xtrace(LowRank(torch.eye(100)[:, :5]), matvecs=20)), 4)
        5.0
    """
    _check(A)
    check_probes(1, seed, probes)
    half = as_whole(matvecs, "matvecs") // 2
    if half < 2:
        raise InputError(f"xtrace needs at least 4 matvecs, not {matvecs}")
    if matvecs >= A.shape[0]:
        return _exact(A.trace(), A, seed)
    with torch.no_grad():
        (omega,) = blocks_of_probes(A, half, seed, probes, half)
        Y = A._matmat(omega)
        Q, S, _ = _leave_one_out(Y)
        Z = A._matmat(Q)
        H, W = Q.T @ Z, Q.T @ omega
        head = H.diagonal().sum(dtype=torch.float64) - column_dots(S, H @ S)
        C = W - S * (S * W).sum(0)  # coordinates of probe i in the range found without it
        left, image = omega - Q @ C, Y - Z @ C
        rest, lengths = column_dots(left, image), column_dots(left, left)
        free = A.shape[0] - Q.shape[1] + S.square().sum(0).round()  # dimension off the range found without probe i
        both = Q.T @ image + Z.T @ left

        def without(j: int) -> Tensor:
            """Sample j once probe i too is left out of the range, for all i: one more direction t_i is lost."""
            T = _other_directions(S, S, j)
            tau, tHt = T.T @ W[:, j], (T * (H @ T)).sum(0)
            samples = rest[j] + tau * (T.T @ both[:, j]) + tau.square() * tHt
            if probes == "gaussian":
                samples = samples * (free[j] + T.square().sum(0).round()) / (lengths[j] + tau.square())
            return head[j] - tHt + samples

        samples = head + (rest * free / lengths if probes == "gaussian" else rest)
        return _jackknife(samples, without, half + Q.shape[1], seed)


def diagonal(
    A: LinearOperator,
    samples: int = 64,
    method: Literal["hutchinson", "xdiag"] = "hutchinson",
    seed: int = 0,
    block: int = 32,
) -> Estimate:
    """The diagonal [n] of A.

    hutchinson: mean of z * (A z), Rademacher; error of entry i is about the off-diagonal norm of row i / sqrt(samples).
    xdiag (Epperly, Tropp, Webber 2024): as XTrace, for decaying spectra; needs the adjoint, spends half of `samples` on
    the range, exact when rank A < samples / 2; its standard error is a jackknife, which errs on the large side.

    Example:
        >>> import torch
        >>> from biascope.linalg import Diagonal
        >>> diagonal(Diagonal(torch.arange(3.0)), samples=2).value
        tensor([0., 1., 2.], dtype=torch.float64)
    """
    _check(A)
    if method not in ("hutchinson", "xdiag"):
        raise InputError(f"method must be 'hutchinson' or 'xdiag', not {method!r}")
    samples, block = check_probes(samples, seed, "rademacher", block)
    if samples >= A.shape[0]:
        return _exact(A.diagonal(), A, seed)
    with torch.no_grad():
        if method == "xdiag":
            return _xdiag(A, samples, seed)
        total = torch.zeros(A.shape[0], dtype=torch.float64, device=A.device)
        squares = torch.zeros_like(total)
        for Z in blocks_of_probes(A, samples, seed, "rademacher", block):
            products = (Z * A._matmat(Z)).double()
            total += products.sum(1)
            squares += products.square().sum(1)
        mean = total / samples
        variance = (squares / samples - mean.square()).clamp(min=0)
        error = (variance / (samples - 1)).sqrt() if samples > 1 else torch.full_like(mean, math.nan)
        return Estimate(mean, error, samples, samples, seed)


def frobenius_norm_squared(
    A: LinearOperator, samples: int = 32, probes: Probes = "rademacher", seed: int = 0, block: int = 32
) -> Estimate:
    """||A||_F^2 as the mean of ||A z||^2, for any shape and without adjoint.

    Example:
        >>> import torch
        >>> from biascope.linalg import Dense
        >>> float(frobenius_norm_squared(Dense(torch.ones(5, 2)), samples=2))
        10.0
    """
    need_operator(A)
    samples, block = check_probes(samples, seed, probes, block)
    if samples >= A.shape[1]:
        return _exact(_frobenius(A, block), A, seed)
    with torch.no_grad():
        parts = []
        for Z in blocks_of_probes(A, samples, seed, probes, block):
            Y = A._matmat(Z)
            parts.append(column_dots(Y, Y))
        return mean_estimate(torch.cat(parts), samples, seed)


def _xdiag(A: LinearOperator, samples: int, seed: int) -> Estimate:
    if not A.has_adjoint:
        raise UnsupportedError(f"xdiag needs the adjoint, which {A!r} has not; use method='hutchinson'")
    half = samples // 2
    if half < 2:
        raise InputError(f"xdiag needs at least 4 samples, not {samples}")
    (omega,) = blocks_of_probes(A, half, seed, "rademacher", half)
    Q, S, R = _leave_one_out(A._matmat(omega))
    Z = A._rmatmat(Q)
    QS, ZS = Q @ S, Z @ S
    head = (Q * Z).sum(1, dtype=torch.float64)
    each = omega * QS * (S * R).sum(0) - QS * ZS  # [n, half]

    def without(j: int) -> Tensor:
        T, QT, ZT = (_other_directions(X, S, j) for X in (S, QS, ZS))
        change = omega[:, j : j + 1] * QT * (T.T @ R[:, j]) - QT * ZT
        return (head.unsqueeze(1) + each[:, j : j + 1] + change).T

    return _jackknife((head.unsqueeze(1) + each).T, without, half + Q.shape[1], seed)


def _leave_one_out(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q [n, r] spanning Y [n, k]; s_i (columns of S [r, k]) with span(Y without column i) = Q (I - s_i s_i^T); Q^T Y.

    s_i is the unit vector orthogonal to all columns of Q^T Y but i; zero where column i depends on the others, so that
    leaving it out leaves the span as it is (leverage below 1).
    """
    Q, values, Vh = thin_svd(Y)
    rank = max(1, int((values > max(Y.shape) * torch.finfo(Y.dtype).eps * values[0]).sum()))
    Q, values, Vh = Q[:, :rank], values[:rank, None], Vh[:rank]
    S = Vh * torch.where(values > 0, values[0] / values, 1.0)
    alone = Vh.square().sum(0) > 1 - torch.finfo(Y.dtype).eps ** 0.5
    return Q, torch.where(alone, S / S.norm(dim=0), 0.0), values * Vh


def _other_directions(X: Tensor, S: Tensor, j: int) -> Tensor:
    """X s for X = M S [m, k], made into M t_i: t_i is s_i less its part along s_j, of unit length (zero for i = j)."""
    overlap = S.T @ S[:, j]
    length = (S.square().sum(0) - overlap.square()).clamp(min=0).sqrt()
    alone = length > torch.finfo(S.dtype).eps ** 0.5
    alone[j] = False
    return torch.where(alone, (X - X[:, j : j + 1] * overlap) / torch.where(alone, length, 1.0), 0.0)


def _jackknife(samples: Tensor, without: Callable[[int], Tensor], matvecs: int, seed: int) -> Estimate:
    """Mean of leave-one-out samples [k, ...]; `without(j)` [k, ...] is sample j had probe i not been drawn."""
    k, samples = len(samples), samples.double()
    totals = torch.zeros_like(samples)
    for j in range(k):
        each = without(j).double()
        each[j] = 0.0  # with probe j gone there is no sample j
        totals += each
    fewer = totals / (k - 1)
    error = ((k - 1) / k * (fewer - fewer.mean(0)).square().sum(0)).sqrt()
    return Estimate(samples.mean(0), error, k, matvecs, seed)


def _frobenius(A: LinearOperator, block: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=A.device)
    with torch.no_grad():
        for _, E in A._identity(block):
            total += A._matmat(E).square().sum(dtype=torch.float64)
    return total


def _exact(value: Tensor, A: LinearOperator, seed: int) -> Estimate:
    value = value.detach().double()
    return Estimate(value, torch.zeros_like(value), A.shape[1], A.shape[1], seed)


def _check(A: LinearOperator) -> None:
    need_operator(A)._need_square("a trace or diagonal")
