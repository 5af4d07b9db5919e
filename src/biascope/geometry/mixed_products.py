"""Algorithm 2 of the NAD paper, and NTK-NADs, with exact derivatives: by products with d2f/dtheta dx alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from biascope.ensembles import Initialiser, Networks
from biascope.ensembles.engines import try_input
from biascope.ensembles.evaluate import Scalarise
from biascope.errors import InputError, UnsupportedError
from biascope.geometry.few_passes import few_passes, resolved
from biascope.geometry.mixed import NO_MIXED, MixedDerivative
from biascope.geometry.nad_result import NADs
from biascope.progress import progress
from biascope.seeds import generator


def by_products(
    initialiser: Initialiser,
    x: Tensor,
    method: str,
    n_networks: int,
    top: int,
    n_points: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    scalarise: Scalarise | None,
    operator: bool,
) -> NADs:
    """Algorithm 2 and NTK-NADs by block Krylov."""
    if any(parameter.is_complex() for parameter in initialiser.template.parameters()):
        raise UnsupportedError(
            f"method={method!r} needs real parameters; {type(initialiser.template).__name__} has complex ones: use "
            "'autograd' or 'finite-difference', or make real and imaginary parts parameters of their own"
        )
    D, ntk = x.numel(), method == "ntk"
    T = 1 if ntk else n_networks
    points = x[None]
    if ntk:
        points = torch.randn(n_points, *x.shape, generator=generator(seed, "points"), device="cpu").to(x)
    try_input(initialiser.draw(seed, 0, 1, device, dtype), points)
    H = MixedDerivative(initialiser.template, points, scalarise)
    weight = sum(p.numel() for p in initialiser.template.parameters()) * (top + 10) * 4
    group = max(1, min(T, initialiser.block, 2**27 // max(1, weight)))
    group = min(group, max(1, T // 8)) if operator else group  # some to leave out, for the errors

    def groups() -> Iterator[Networks]:
        for start in range(0, T, group):
            yield initialiser.draw(seed, start, min(start + group, T), device, dtype)

    def product(X: Tensor) -> Tensor:
        if operator:
            return H.mean_gram(groups, X).to(X)
        total = torch.zeros(X.shape, dtype=torch.float64, device=X.device)
        for networks in progress(groups(), "networks", leave=False):
            total += H.gram(networks, X)
        return (total / T).to(X)

    tol = 1e-8 if x.dtype == torch.float64 else 1e-3  # of each eigenvalue
    kind = torch.promote_types(x.dtype, torch.float32)  # torch has no factorisations of halves
    pairs = few_passes(product, D, top, passes=20, tol=tol, seed=seed, device=device, dtype=kind)
    if not bool(pairs.values[0] > 0):
        raise InputError(NO_MIXED)
    if ntk:
        errors = H.jackknife(initialiser.draw(seed, 0, 1, device, dtype), pairs.vectors, groups=16)
    elif operator:
        errors = H.mean_jackknife(groups, pairs.vectors)[1]
    else:
        energies = torch.cat([H.energies(networks, pairs.vectors) for networks in groups()])
        errors = energies.std(0) / T**0.5 if T > 1 else torch.full((top,), float("nan"), device="cpu")
    return NADs(
        pairs.vectors.T.reshape(-1, *x.shape).cpu().contiguous(),
        pairs.values.double().cpu(),
        errors.cpu(),
        float("nan"),  # the trace would cost D products
        T,
        seed,
        method,
        0.0,
        fallback=dict(initialiser.reasons),
        resolved=resolved(pairs),
        x=None if ntk else x.cpu(),
    )
