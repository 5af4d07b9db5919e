"""Pairs of variables whose mutual information is known, to test estimators against."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from biascope.arguments import check_count, check_number
from biascope.data.dataset import Dataset, Seed, generator, seed_of
from biascope.errors import InputError
from biascope.signatures import checked

Transform = Literal["identity", "cubic", "tanh"]
Function = Literal["linear", "cubic", "sine"]


@checked
def gaussian_mutual_information(dim: int, rho: float) -> float:
    """I = -(dim/2) log(1 - rho^2) nats for `dim` independent pairs of correlation rho.

    Example:
        >>> round(gaussian_mutual_information(20, 0.5), 4)
        2.8768
    """
    if dim < 1 or not -1 < rho < 1:
        raise InputError(f"need dim >= 1 and -1 < rho < 1, got {dim} and {rho}")
    return -0.5 * dim * math.log1p(-rho * rho)


@checked
def correlated_gaussians(
    n: int,
    dim: int = 1,
    rho: float = 0.5,
    *,
    transform: Transform = "identity",
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """x, y [n, dim] standard Gaussian with corr(x_i, y_j) = rho delta_ij; exact nats in info["mutual_information"].

    `transform` is applied to y elementwise ("cubic": y^3, "tanh"); both are invertible, so the information stays the
    same.

    Example:
        >>> d = correlated_gaussians(100, dim=2, rho=0.9, transform="cubic")
        >>> round(d.info["mutual_information"], 4)
        1.6607
    """
    check_count(n, "n")
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
    n: int,
    function: Function = "linear",
    sigma: float = 0.5,
    *,
    dim: int = 2,
    seed: Seed = 0,
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """y = f(x) + sigma noise, x uniform on (-1, 1)^dim, f in x, x^3, sin x; info["mutual_information"] by quadrature.

    The information is not the same for the three functions (the paper's claim of equitability is loose): it differs
    by up to a factor 2.

    Example:
        >>> round(noisy_function(10, "cubic", 0.5).info["mutual_information"], 3)
        0.451
    """
    check_number(sigma, "sigma", above=0)
    check_count(n, "n")
    check_count(dim, "dim")
    rng = generator(seed)
    x = 2 * torch.rand(n, dim, generator=rng, dtype=dtype) - 1
    y = _apply(x, function) + sigma * torch.randn(n, dim, generator=rng, dtype=dtype)
    nats = dim * _noisy_function_information(function, sigma)
    return Dataset(x, y, f"noisy-{function}", seed_of(seed), {"mutual_information": nats, "sigma": sigma, "dim": dim})


def _apply(x: Tensor, function: Function) -> Tensor:
    if function == "linear":
        return x
    if function == "cubic":
        return x**3
    if function == "sine":
        return x.sin()
    raise InputError(f'function must be "linear", "cubic" or "sine", got {function!r}')


def _noisy_function_information(function: Function, sigma: float) -> float:
    """h(y) - h(noise) in one dimension: p(y) = E_x N(y; f(x), sigma^2), both integrals by Gauss-Legendre."""
    order = int(min(4000, 200 + 40 / sigma))
    nodes, weights = np.polynomial.legendre.leggauss(order)
    means = _apply(torch.from_numpy(nodes), function).numpy()
    reach = float(np.abs(means).max()) + 10 * sigma
    y = reach * nodes
    density = np.exp(-(((y[:, None] - means) / sigma) ** 2) / 2) @ (weights / 2) / (sigma * math.sqrt(2 * math.pi))
    entropy = -reach * float(np.sum(weights * density * np.log(np.maximum(density, 1e-300))))
    return entropy - 0.5 * math.log(2 * math.pi * math.e * sigma**2)
