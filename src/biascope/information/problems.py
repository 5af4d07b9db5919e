"""Pairs whose mutual information is known, together with the critic that attains it: log p(x, y) / (p(x) p(y))."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.special import k0
from torch import Tensor

from biascope.data import correlated_gaussians, noisy_function
from biascope.data.mutual import FUNCTIONS, Map, gaussian_mutual_information
from biascope.support.arguments import check_count, check_number
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope.support.signatures import checked

Draw = Callable[[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """A joint distribution with `nats` of mutual information; `sample(n, seed)` gives pairs x, y [n, ...] in float64.

    `log_ratio(x, y)` [n] is log p(x, y) / (p(x) p(y)): the best critic, and the information of every single pair.
    """

    name: str
    nats: float
    draw: Draw = field(repr=False)
    log_ratio: Callable[[Tensor, Tensor], Tensor] = field(repr=False)

    @checked
    def sample(self, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """n independent pairs; labels are int64."""
        return self.draw(n, seed)


@checked
def gaussian_problem(
    dim: int = 1, rho: float = 0.5, transform: Literal["identity", "cubic", "tanh"] = "identity"
) -> Problem:
    """`dim` independent pairs of standard Gaussians of correlation rho: -(dim/2) log(1 - rho^2) nats.

    `transform` is applied to y elementwise ("cubic": y^3, "tanh"), and takes no information away.

    Example:
        >>> problem = gaussian_problem(dim=20, rho=0.5)
        >>> x, y = problem.sample(1000)
        >>> round(problem.nats, 4), problem.log_ratio(x, y).shape
        (2.8768, torch.Size([1000]))
    """

    correlated_gaussians(1, dim, rho, transform=transform)  # checks the arguments, now and not at the first draw

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        data = correlated_gaussians(n, dim, rho, transform=transform, seed=seed, dtype=torch.float64)
        return data.x, data.y

    def log_ratio(x: Tensor, y: Tensor) -> Tensor:
        if transform == "cubic":
            y = y.sign() * y.abs() ** (1 / 3)
        elif transform == "tanh":
            y = y.atanh()
        return _gaussian_log_ratio(x, y, rho).sum(1)

    name = f"gaussians-{dim}d-rho{rho:g}" + ("" if transform == "identity" else f"-{transform}")
    return Problem(name, gaussian_mutual_information(dim, rho), draw, log_ratio)


def _gaussian_log_ratio(x: Tensor, y: Tensor, rho: float) -> Tensor:
    kept = 1 - rho * rho
    return (rho * x * y - rho * rho * (x.square() + y.square()) / 2) / kept - math.log(kept) / 2


@checked
def noisy_function_problem(
    function: Literal["linear", "cubic", "sine"] = "linear", sigma: float = 0.5, dim: int = 2
) -> Problem:
    """y = f(x) + sigma noise with x uniform on (-1, 1)^dim and f = x, x^3 or sin x; the information by quadrature.

    It differs between the three functions by up to a factor 2 at equal noise: equitability is approximate. Both the
    information and `log_ratio` are right to about 1e-10 at every noise: where p(y) is integrated moves with y.

    Example:
        >>> [round(noisy_function_problem(f, 0.5).nats, 3) for f in ("linear", "cubic", "sine")]
        [0.837, 0.451, 0.729]
    """
    nats = float(noisy_function(1, function, sigma, dim=dim).info["mutual_information"])  # checks the arguments
    f, inverse = FUNCTIONS[function]

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        data = noisy_function(n, function, sigma, dim=dim, seed=seed, dtype=torch.float64)
        return data.x, data.y

    def log_ratio(x: Tensor, y: Tensor) -> Tensor:
        logs = torch.cat([_log_density(part, f, inverse, sigma) for part in torch.split(y, 4096)])
        return (-(((y - f(x)) / sigma) ** 2) / 2 - logs).sum(1)

    return Problem(f"noisy-{function}-sigma{sigma:g}", nats, draw, log_ratio)


def _log_density(y: Tensor, f: Map, inverse: Map, sigma: float) -> Tensor:
    """log p(y) of every entry, without the constant that log p(y | x) has too: over the x whose f(x) is near y alone.

    f is increasing. A fixed rule on (-1, 1) would miss noise narrower than its steps.
    """
    nodes, weights = (torch.from_numpy(v).to(y) for v in np.polynomial.legendre.leggauss(200))
    top = f(torch.ones_like(y))
    inside = torch.minimum(torch.maximum(y, -top), top)
    low, high = (inverse(torch.minimum(torch.maximum(inside + d, -top), top)) for d in (-12 * sigma, 12 * sigma))
    half = ((high - low) / 2)[..., None]
    x = ((high + low) / 2)[..., None] + half * nodes
    return (-(((y[..., None] - f(x)) / sigma) ** 2) / 2 + (half * weights / 2).log()).logsumexp(-1)


@checked
def sign_mixture_problem(rho: float = 0.9) -> Problem:
    """Standard Gaussians x, y [n, 1] of correlation +rho or -rho with equal chances: uncorrelated, yet dependent.

    The information is a sum over the density of the product x y, right to about 1e-14 at every rho (see
    `_sign_mixture_nats`).

    Example:
        >>> problem = sign_mixture_problem(0.9)
        >>> x, y = problem.sample(10_000)
        >>> round(problem.nats, 3), bool((x * y).mean().abs() < 0.05)
        (0.408, True)
    """
    if not -1 < rho < 1:
        raise InputError(f"need -1 < rho < 1, got {rho}")

    def log_ratio(x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([_gaussian_log_ratio(x, y, rho), _gaussian_log_ratio(x, y, -rho)])
        return (both.logsumexp(0) - math.log(2)).squeeze(-1)

    def pair(x: Tensor, noise: Tensor) -> Tensor:
        return rho * x + math.sqrt(1 - rho * rho) * noise

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        rng = generator(seed, "sign mixture")
        x, noise = torch.randn(2, n, 1, generator=rng, dtype=torch.float64, device="cpu")
        sign = 2 * torch.randint(2, (n, 1), generator=rng, device="cpu") - 1
        return x, sign * pair(x, noise)

    return Problem(f"sign-mixture-rho{rho:g}", _sign_mixture_nats(abs(rho)), draw, log_ratio)


def _sign_mixture_nats(rho: float) -> float:
    """-log(1 - rho^2) / 2 - log 2 + E log(1 + e^(-2 rho u)), u = x y / (1 - rho^2) at correlation rho in [0, 1).

    The first term is the information with the sign known; the rest is what the unknown sign takes away, at most log 2.
    u has the density sqrt(1 - rho^2) / pi e^(rho u) K_0(|u|): u and -u together fall at least like e^-u whatever rho
    is, so nothing gets narrow as rho nears 1 (a rule on x and y would have to resolve a ridge of that width). With
    u = e^v the integrand is analytic for |Im v| < pi / 2 and falls on both sides: the plain sum over v converges like
    e^(-pi^2 / step), which is below rounding here.
    """
    step = 0.1
    u = np.exp(np.arange(-45.0, 6.6, step))  # e^-45 and K_0(e^6.6) are nothing
    kept = (1 - rho) * (1 + rho)
    both = 2 * np.cosh(rho * u) * np.log1p(np.exp(-2 * rho * u)) + 2 * rho * u * np.exp(-rho * u)
    lost = math.sqrt(kept) / math.pi * step * float((both * k0(u) * u).sum())
    return lost - math.log(2) - math.log(kept) / 2


@checked
def mixture_problem(classes: int = 3, distance: float = 2.0) -> Problem:
    """x [n, 1] is Gaussian around distance * label, y [n] the label (int64), all labels alike; at most log(classes).

    The information is a Gauss-Hermite sum.
    """
    check_count(classes, "classes", least=2)
    means = check_number(distance, "distance") * torch.arange(classes, dtype=torch.float64, device="cpu")

    def log_ratio(x: Tensor, y: Tensor) -> Tensor:
        logs = -((x - means.to(x)) ** 2) / 2
        own = logs.gather(1, y[:, None])[:, 0]
        return own - logs.logsumexp(1) + math.log(classes)

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        rng = generator(seed, "mixture")
        y = torch.randint(classes, (n,), generator=rng, device="cpu")
        return (means[y] + torch.randn(n, generator=rng, dtype=torch.float64, device="cpu"))[:, None], y

    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(200))
    chances = weights / weights.sum()
    parts = [
        chances @ log_ratio((m + nodes)[:, None], torch.full((200,), c, device="cpu")) for c, m in enumerate(means)
    ]
    return Problem(f"mixture-{classes}-distance{distance:g}", float(torch.stack(parts).mean()), draw, log_ratio)


@checked
def discrete_problem(table: Tensor) -> Problem:
    """Labels x, y [n] (int64) with joint probabilities `table` [a, b]: sum p log(p / (p_x p_y)) nats."""
    p = table.detach().cpu().double()
    if p.dim() != 2 or not bool((p >= 0).all()) or not abs(float(p.sum()) - 1) <= 1e-6:  # NaN neither
        raise InputError(
            f"table must be [a, b] with entries >= 0 that sum to 1, got {list(p.shape)}, sum {float(p.sum()):.6g}"
        )
    p = p / p.sum()
    ratio = (p / (p.sum(1, keepdim=True) * p.sum(0))).log()

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        cells = torch.multinomial(p.flatten(), n, replacement=True, generator=generator(seed, "discrete"))
        return cells // p.shape[1], cells % p.shape[1]

    def log_ratio(x: Tensor, y: Tensor) -> Tensor:
        return ratio.to(x.device)[x, y]

    nats = float(torch.where(p > 0, p * ratio, 0.0).sum())
    return Problem(f"discrete-{p.shape[0]}x{p.shape[1]}", nats, draw, log_ratio)
