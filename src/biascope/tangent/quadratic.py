"""The quadratic model: a network simple enough to be solved in both regimes, standard (non-linear) and linearised.

f(x) = theta^T x with theta = sum_l theta_l v_l, theta_l = w_l^2 / 2, on data X = sum_l sqrt(mu_l) u_l v_l^T with
y_l = u_l^T y >= 0. Gradient flow of 0.5 ||f - y||^2 on w decouples into modes. With theta*_l = y_l / sqrt(mu_l) and
y~_l = sqrt(mu_l) y_l = mu_l theta*_l

    non-linear    theta' = -2 mu theta (theta - theta*)      a mode takes a time ~ 1 / (2 y~):     labels decide
    linearised    theta' = -2 mu theta0 (theta - theta*)     a mode takes a time ~ 1 / (2 mu theta0): inputs decide

Errata of the thesis, corrected here: the rate of the linearised model (5.4.6) is 2 mu theta0, not mu theta0; the times
(5.4.7) are half as long as printed; the ratio of two times is y~'/y~ (printed upside down); the sequentialisation limit
(5.4.8) has the power r - 1 of sigma. The linearised predictor is w w0 - w0^2 / 2, whose constant is dropped in print.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.tables import one_line


@dataclass(frozen=True, eq=False)
class QuadraticModel:
    """The modes of a quadratic model, float64: mu [r] >= 0, theta_star [r] >= 0, theta0 [r] >= 0.

    Make one with `quadratic_model`. A mode that the data do not see (mu = 0) stays where it is: theta* = theta0.
    """

    mu: Tensor
    theta_star: Tensor
    theta0: Tensor
    __repr__ = one_line

    @property
    def y_tilde(self) -> Tensor:
        """y~ = mu theta* [r]: twice it is the late rate of the non-linear model."""
        return self.mu * self.theta_star

    @property
    def linear_rates(self) -> Tensor:
        """2 mu theta0 [r], the rates of the linearised model."""
        return 2 * self.mu * self.theta0

    def nonlinear(self, t: float | Sequence[float] | Tensor) -> Tensor:
        """theta(t) [T, r] of gradient flow on the model itself; theta0 = 0 is a fixed point.

        theta0 theta* / (theta0 - exp(-2 y~ t) (theta0 - theta*)), written so that theta* = 0 and mu = 0 need no cases.
        """
        time = _times(t)
        z = 2 * self.y_tilde * time
        decay, learnt = torch.exp(-z), -torch.expm1(-z)
        early = 2 * self.mu * time * torch.where(z > 0, learnt / z.clamp_min(1e-300), 1.0)
        late = learnt / self.theta_star  # the same number; the product above is infinity times 0 at the end of time
        theta = self.theta0 / (decay + self.theta0 * torch.where(z > 1, late, early))
        return torch.where(self.theta0 > 0, theta, 0.0)

    def linearised(self, t: float | Sequence[float] | Tensor) -> Tensor:
        """theta(t) [T, r] of gradient flow on the model linearised at its start: theta* + e^(-2 mu theta0 t) (...)."""
        decay = torch.exp(-self.linear_rates * _times(t))
        return self.theta_star + decay * (self.theta0 - self.theta_star)

    def times(self, eps: float) -> ConvergenceTimes:
        """When every mode is within eps of theta*; infinity for one that never moves (theta0 = 0)."""
        gap = self.theta0 - self.theta_star
        target = torch.where(gap < 0, (self.theta_star - eps).clamp_min(0.0), self.theta_star + eps)
        ratio = self.theta0 * (self.theta_star - target) / (target * -gap)  # exp(-2 y~ t)
        to_zero = (self.theta0 / eps - 1) / self.linear_rates  # theta0 / (1 + 2 mu theta0 t) = eps
        nonlinear = torch.where(self.theta_star > 0, -ratio.log() / (2 * self.y_tilde), to_zero)
        linear = (gap.abs() / eps).log() / self.linear_rates
        there = gap.abs() <= eps
        return ConvergenceTimes(torch.where(there, 0.0, nonlinear), torch.where(there, 0.0, linear), eps)

    def asymptotic_times(self, eps: float) -> ConvergenceTimes:
        """The same for theta0 and eps much smaller than theta*: log(theta*^2 / (eps theta0)) / (2 y~) and
        log(theta* / eps) / (2 mu theta0).
        """
        nonlinear = (self.theta_star.square() / (eps * self.theta0)).log() / (2 * self.y_tilde)
        return ConvergenceTimes(nonlinear, (self.theta_star / eps).log() / self.linear_rates, eps)

    def ranking(self, tolerance: float = 1e-9) -> Ranking:
        """In which order the modes are learnt, and whether another basis of the same data could change it.

        Modes with equal mu (to `tolerance` times the largest) span an eigenspace in which the SVD basis is arbitrary,
        and the model depends on that basis. Where such a space holds some of the labels, this warns.
        """
        groups = equal_values(self.mu, tolerance)
        y_mode = self.theta_star * self.mu.sqrt()
        bound = self.y_tilde.clone()
        for group in groups:
            index = torch.tensor(group, device="cpu")
            bound[index] = self.mu[index].max().sqrt() * y_mode[index].norm()
        loaded = [g for g in groups if float(bound[g[0]]) > 1e-9 * float(self.y_tilde.max())]
        if loaded:
            share = f"{sum(map(len, loaded))} of {len(self.mu)} modes share their mu with another one"
            choice = "the basis of such a space, and with it the order of learning, is a choice; see y_tilde_bound"
            warnings.warn(f"{share}: {choice}", stacklevel=2)
        first = int(self.y_tilde.argmax())
        alone = all(first not in group for group in loaded)
        rivals = bound[torch.arange(len(bound), device="cpu") != first]
        certain = alone and (len(rivals) == 0 or float(self.y_tilde[first]) > float(rivals.max()))
        first_to_last = self.y_tilde.argsort(descending=True, stable=True)
        linear = self.linear_rates.argsort(descending=True, stable=True)
        return Ranking(first_to_last, linear, self.y_tilde, bound, tuple(map(tuple, groups)), certain)


@dataclass(frozen=True, eq=False)
class ConvergenceTimes:
    """Times [r] until |theta - theta*| <= eps in both regimes."""

    nonlinear: Tensor
    linear: Tensor
    eps: float
    __repr__ = one_line


@dataclass(frozen=True, eq=False)
class Ranking:
    """Orders of learning: modes, first learnt first, by y~, and of the linearised model by mu theta0.

    y_tilde_bound [r] is the largest y~ that a mode could have in another basis of its eigenspace, `degenerate` are
    groups of modes with equal mu, `leader_certain` says whether the first mode is first in every basis.
    """

    nonlinear: Tensor
    linear: Tensor
    y_tilde: Tensor
    y_tilde_bound: Tensor
    degenerate: tuple[tuple[int, ...], ...]
    leader_certain: bool
    __repr__ = one_line


def quadratic_model(
    mu: Tensor | Sequence[float], y: Tensor | Sequence[float], theta0: float | Tensor | Sequence[float] = 1e-3
) -> QuadraticModel:
    """The model with these modes. For data x, y: mu and y_mode of `data.quadratic_model.quadratic_task`.

    Args:
        mu: eigenvalues of X X^T, [r].
        y: y_l = u_l^T y >= 0, [r] (flip the sign of u_l and v_l where it is negative).
        theta0: start, w0^2 / 2; one number or [r]. (A start w0 = sqrt(sigma) 1 is theta0 = sigma / 2.)

    Example:
        >>> model = quadratic_model([4.0, 1.0], [2.0, 3.0], theta0=0.01)
        >>> model.y_tilde.tolist(), model.ranking().nonlinear.tolist(), model.ranking().linear.tolist()
        ([4.0, 3.0], [0, 1], [0, 1])
    """
    values, labels = (torch.as_tensor(v, dtype=torch.float64).detach().cpu() for v in (mu, y))
    start = torch.as_tensor(theta0, dtype=torch.float64).detach().cpu().expand(values.shape).clone()
    if values.dim() != 1 or len(values) == 0 or labels.shape != values.shape:
        raise InputError(f"mu and y must be [r] of one length, got {list(values.shape)} and {list(labels.shape)}")
    seen = values > 0
    every = torch.stack([values, labels, start])
    if not bool((every >= 0).all() & every.isfinite().all()) or bool((labels[~seen] > 0).any()):
        raise InputError(
            "mu, y and theta0 must be finite and >= 0 (flip the sign of a mode's vectors), and y = 0 where mu = 0"
        )
    theta_star = torch.where(seen, labels / values.clamp_min(1e-300).sqrt(), start)
    return QuadraticModel(values, theta_star, start)


def equal_values(values: Tensor, tolerance: float = 1e-9) -> list[list[int]]:
    """Groups of two and more positions whose values are equal to `tolerance` times the largest, zeros left out."""
    order = [int(i) for i in values.argsort(descending=True, stable=True) if float(values[i]) > 0]
    width = tolerance * float(values.max())
    groups: list[list[int]] = []
    for i in order:
        if groups and float(values[groups[-1][-1]] - values[i]) <= width:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [group for group in groups if len(group) > 1]


def sequential_value(r: float, sigma: float, eps: float, theta_star: float = 1.0, start: float = 1.0) -> float:
    """Where a second mode is when the first has been learnt to eps: theta'(t), both started at sigma times `start`.

    theta*' start / (start + theta*' (eps start / theta*^2)^r sigma^(r - 1)) with r = y~'/y~, the same theta* for both
    (corrected (5.4.8)). As sigma -> 0 it tends to theta* if r > 1 and to 0 if r < 1: modes are learnt one after the
    other. Near r = 1 that is slow.
    """
    log = r * math.log(eps * start / theta_star**2) + (r - 1) * math.log(sigma) + math.log(theta_star / start)
    return theta_star / (1 + math.exp(min(log, 700.0)))


def simulate(model: QuadraticModel, lr: float, steps: Sequence[int], linearised: bool = False) -> Tensor:
    """theta [T, r] after some steps of gradient descent on w; time is lr times the step."""
    if list(steps) != sorted(steps):
        raise InputError("steps must be in ascending order")
    w0 = (2 * model.theta0).sqrt()
    w, found, done = w0.clone(), [], 0
    for stop in steps:
        for _ in range(done, stop):
            theta = w * w0 - w0.square() / 2 if linearised else w.square() / 2
            w = w - lr * model.mu * (theta - model.theta_star) * (w0 if linearised else w)
        done = stop
        found.append(w * w0 - w0.square() / 2 if linearised else w.square() / 2)
    return torch.stack(found)


def example_errors(theta: Tensor, mu: Tensor, u: Tensor, y: Tensor) -> Tensor:
    """Squared errors (f_i - y_i)^2 [T, n] of every example: f = sum_l sqrt(mu_l) theta_l u_l, u [n, r], y [n]."""
    return ((theta * mu.sqrt()) @ u.T - y).square()


def _times(t: float | Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(t, dtype=torch.float64, device="cpu").reshape(-1, 1)
