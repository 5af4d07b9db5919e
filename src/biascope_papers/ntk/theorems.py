"""Theorems 4.1 and 4.2, checked to rounding on small networks in float64.

4.1: the alignment of f* with the tangent kernel is ||E_x f*(x) grad_theta f(x)||^2, and ||f*||_2^4 divided by it bounds
the norm of f* in the kernel's space from below. 4.2: for Gaussian inputs and f* = <u, x> it is ||E_x d2f / dtheta dx
u||^2. Networks with polynomial activations have exact Gaussian means by quadrature.
"""

import itertools
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from biascope import nets, ntk
from biascope.fields import Polynomial
from biascope.kernels import target_alignments
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, generator


@study("ntk/theorems", sizes={"smoke": {"n": 24, "networks": 2}, "laptop": {}, "paper": {}})
def theorems(
    run: Run,
    *,
    n: Annotated[int, "inputs of the kernel"] = 60,
    networks: Annotated[int, "drawn networks"] = 5,
    points: Annotated[int, "of the quadrature in each of three dimensions"] = 10,
) -> StudyResult:
    """Alignment with the tangent kernel: two ways to it, its bound, and Stein's lemma."""

    def bound(i: int) -> dict[str, Tensor]:
        rng = generator(run.seed, "x", i)
        x, y = (torch.randn(n, k, generator=rng, dtype=torch.float64) for k in (6, 5))
        net = nets.build("mlp", seed=derive(run.seed, i), in_features=6, hidden=(24, 24), outputs=1).double()
        K = ntk(net, x, precision="float64").matrix().double()
        values, vectors = torch.linalg.eigh(K / n)
        f = torch.cat([y, vectors[:, -3:] * n**0.5], 1)  # of any kind, and eigenfunctions
        slow = (f * (K @ f)).sum(0) / n**2
        fast = target_alignments(net, x, f, normalize=False, precision="float64").to(slow)
        squares = ((vectors.T @ f / n**0.5).square() / values.clamp_min(1e-300)[:, None]).sum(0)  # ||f||_k^2
        return {"apart": (fast / slow - 1).abs().max(), "ratio": squares * slow / f.square().mean(0).square()}

    def stein(i: int) -> dict[str, Tensor]:
        return {"ratio": _two_sides(_small(derive(run.seed, "stein", i)), points, derive(run.seed, i))}

    bounds = run.cached_each("4.1", range(networks), bound)
    sides = run.cached_each("4.2", range(networks), stein)
    ratio = torch.stack([torch.as_tensor(row["ratio"]) for row in bounds])  # [networks, targets]
    exact = max(float((torch.as_tensor(row["ratio"]) - 1).abs().max()) for row in sides)
    largest = max(float(torch.as_tensor(row["apart"])) for row in bounds)
    numbers = {
        "largest relative difference of the two alignments": Estimate(largest),
        "smallest ||f||_k^2 alpha(f) / ||f||_2^4": Estimate(float(ratio.min())),
        "largest of it for an eigenfunction, minus 1": Estimate(float((ratio[:, -3:] - 1).abs().max())),
        "smallest of it for other functions": Estimate(float(ratio[:, :-3].min())),
        "largest relative difference of the two sides of theorem 4.2": Estimate(exact),
    }
    chart = Chart(
        "bound", "Norm in the kernel's space times alignment", "target", "||f||_k^2 alpha(f) / ||f||_2^4",
        (Series.of("five functions, then three eigenfunctions", range(1, 9), ratio.mean(0), style="points"),),
        alt="Points above 1 for any function, at 1 for eigenfunctions.", log_y=True,
    )  # fmt: skip
    return StudyResult(
        measured=f"The two alignments differ by {largest:.1e} at most; the bound's ratio is at least "
        f"{float(ratio.min()):.6f}, for eigenfunctions 1 to {float((ratio[:, -3:] - 1).abs().max()):.1e}. Theorem 4.2 "
        f"holds to {exact:.1e} for polynomial activations. {networks} networks.",
        numbers=numbers,
        figures=(chart,),
    )


def _small(seed: int) -> nn.Module:
    """Two hidden layers on three inputs, with z^2 + z / 2 between."""
    act = Polynomial([0.1, 0.5, 1.0])
    net = nn.Sequential(nn.Linear(3, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 1)).double()
    rng = generator(seed, "weights")
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    return net


def _two_sides(net: nn.Module, points: int, seed: int) -> Tensor:
    """||E d2f/dtheta dx u||^2 / alpha(<u, .>) for three directions u, means by Gauss-Hermite quadrature."""
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(points))
    x = torch.tensor(list(itertools.product(nodes.tolist(), repeat=3)), dtype=torch.float64)
    w = torch.tensor(list(itertools.product(weights.tolist(), repeat=3)), dtype=torch.float64).prod(1)
    w = w / w.sum()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def gradient(point: Tensor) -> Tensor:  # [m]
        made = jacrev(lambda p: functional_call(net, p, (point,))[0])(params)
        return torch.cat([each.flatten() for each in made.values()])

    first, mixed = vmap(gradient)(x), vmap(jacrev(gradient))(x)  # [N, m], [N, m, 3]
    u = torch.linalg.qr(torch.randn(3, 3, generator=generator(seed, "u"), dtype=torch.float64)).Q
    alpha = torch.einsum("n,nm,nk->mk", w, first, x @ u).square().sum(0)
    sides: Tensor = (torch.einsum("n,nmd->md", w, mixed) @ u).square().sum(0) / alpha
    return sides
