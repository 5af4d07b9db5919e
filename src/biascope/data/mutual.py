"""Pairs of variables whose mutual information is known, to test estimators against."""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from biascope.data.dataset import Dataset, Seed, generator, seed_of
from biascope.support.errors import InputError
from biascope.support.limits import Count, Positive
from biascope.support.signatures import checked

Transform = Literal["identity", "cubic", "tanh"]
Function = Literal["linear", "cubic", "sine"]
Map = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, tuple[Map, Map]] = {  # increasing and odd, with their inverses on (-1, 1)
    "linear": (lambda x: x, lambda m: m),
    "cubic": (lambda x: x**3, lambda m: m.sign() * m.abs() ** (1 / 3)),
    "sine": (torch.sin, torch.asin),
}


@checked
def gaussian_mutual_information(dim: Count, rho: float) -> float:
    """I = -(dim/2) log(1 - rho^2) nats for `dim` independent pairs of correlation rho."""
    if not -1 < rho < 1:
        raise InputError(f"need -1 < rho < 1, got rho={rho}")
    return -0.5 * dim * math.log1p(-rho * rho)


@checked
def correlated_gaussians(
    n: Count,
    dim: Count = 1,
    rho: float = 0.5,
    *,
    transform: Transform = "identity",
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """x, y [n, dim] standard Gaussian with corr(x_i, y_j) = rho delta_ij; exact nats in info["mutual_information"].

    `transform` is applied to y elementwise ("cubic": y^3, "tanh"); both are invertible, so the information stays the
    same.
    """
    nats = gaussian_mutual_information(dim, rho)
    rng = generator(seed)
    x = torch.randn(n, dim, generator=rng, dtype=dtype)
    y = rho * x + math.sqrt(1 - rho * rho) * torch.randn(n, dim, generator=rng, dtype=dtype)
    if transform == "cubic":
        y = y**3
    elif transform == "tanh":
        y = y.tanh()
    info = {"mutual_information": nats, "rho": rho, "dim": dim, "transform": transform}
    return Dataset(x, y, "correlated-gaussians", seed_of(seed), info)


@checked
def noisy_function(
    n: Count,
    function: Function = "linear",
    sigma: Positive = 0.5,
    *,
    dim: Count = 2,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """y = f(x) + sigma noise, x uniform on (-1, 1)^dim, f in x, x^3, sin x; info["mutual_information"] by quadrature.

    The information is not the same for the three functions (the paper's claim of equitability is loose): it differs
    by up to a factor 2.
    """
    rng = generator(seed)
    x = 2 * torch.rand(n, dim, generator=rng, dtype=dtype) - 1
    y = FUNCTIONS[function][0](x) + sigma * torch.randn(n, dim, generator=rng, dtype=dtype)
    nats = dim * _noisy_function_information(function, sigma)
    return Dataset(x, y, f"noisy-{function}", seed_of(seed), {"mutual_information": nats, "sigma": sigma, "dim": dim})


def _noisy_function_information(function: Function, sigma: float) -> float:
    """h(y) - h(noise) in one dimension, p(y) = E_x N(y; f(x), sigma^2) even in y, both integrals by Gauss-Legendre.

    p has features of size sigma at 0 (where the cube is flat) and at the end f(1): panels of that size lie there, and
    twice as wide ones away from them, so that every sigma is resolved. f is increasing, so what lies within 10 sigma of
    y comes from one interval of x.
    """
    f, inverse = FUNCTIONS[function]
    top = float(f(torch.ones(1, dtype=torch.float64)))
    steps = sigma * np.concatenate([np.arange(11.0), 10 * 2.0 ** np.arange(1, max(2, math.ceil(3 - math.log2(sigma))))])
    near = np.concatenate([steps, top - steps, top + steps[:11]])
    edges = np.unique(near[(near >= 0) & (near <= top + 10 * sigma)])
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(edges) / 2
    y = ((edges[1:] + edges[:-1]) / 2 + half * nodes[:, None]).ravel()
    low, high = (inverse(torch.from_numpy(y + d).clamp(-top, top)).numpy() for d in (-10 * sigma, 10 * sigma))
    inner, share = np.polynomial.legendre.leggauss(200)
    x = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * inner
    distance = (y[:, None] - f(torch.from_numpy(x)).numpy()) / sigma
    density = (np.exp(-(distance**2) / 2) @ share) * (high - low) / (4 * sigma * math.sqrt(2 * math.pi))
    entropy = -2 * float(np.sum((half * weights[:, None]).ravel() * density * np.log(np.maximum(density, 1e-300))))
    return entropy - 0.5 * math.log(2 * math.pi * math.e * sigma**2)
