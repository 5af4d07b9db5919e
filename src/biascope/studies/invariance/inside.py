"""How networks move their geometry along training, and how much of it lies within given subspaces (Conjecture 2)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.ensembles import Networks, record
from biascope.geometry import containment
from biascope.geometry.later_evolution import moving_gradients
from biascope.linalg import psd_eigh
from biascope.seeds import derive
from biascope.studies.invariance.averages import squared
from biascope.studies.invariance.factors import estimate
from biascope.studies.invariance.networks import factory
from biascope.studies.invariance.tracking import Descent, Task, watched
from biascope.studies.result import Estimate
from biascope.studies.runs import Run

KINDS = ("Delta^t", "G^t - G^0")


def moved(
    run: Run,
    net: str,
    shape: tuple[int, ...],
    x: Tensor,
    y: Tensor,
    probes: Tensor,
    runs: int,
    descent: Descent,
    times: list[int],
) -> list[tuple[str, int, Tensor]]:
    """(kind, epoch, matrices [runs, D, D]) of trained networks: Delta^t at all times, G^t - G^0 after the start."""
    device = torch.device(run.device)
    recorded, signs = record(factory(net, shape, norm=False)), torch.where(y > 0, 1.0, -1.0)
    task = Task(recorded, derive(run.seed, "moved", net), x.to(device), y.to(device), descent)
    room = None if device.type == "cuda" else "1GB"

    def look(networks: Networks) -> dict[str, Tensor]:
        batch = min(descent.micro, 250)
        g, u = moving_gradients(networks, probes, x, signs, "logistic", max_memory=room, batch=batch)
        return {"g": g, "u": u}

    factors = watched(run, f"moved {net}", task, runs, times, look)
    found = []
    for t in times:
        g, u = factors["g", t], factors["u", t]
        B = torch.einsum("rpi,rpj->rij", u, g)
        found.append((KINDS[0], t, B + B.mT))
        if t > 0:
            first = factors["g", 0]
            found.append((KINDS[1], t, torch.einsum("rpi,rpj->rij", g, g) - torch.einsum("rpi,rpj->rij", first, first)))
    return found


@dataclass(frozen=True)
class Inside:
    """Products between networks of what lies in the first k eigenvectors of each subspace, and of the whole."""

    whole: Tensor = field(repr=False)
    parts: dict[tuple[str, int], Tensor] = field(repr=False)
    random: dict[int, float]

    @classmethod
    def of(cls, matrices: Tensor, subspaces: dict[str, Tensor], ks: list[int]) -> "Inside":
        """From matrices [R, D, D] and the matrices whose leading eigenvectors span the subspaces."""
        parts = {}
        for name, reference in subspaces.items():
            Q = psd_eigh(reference.double()).vectors[:, : max(ks)].to(matrices)
            inner = Q.T @ matrices @ Q
            for k in ks:
                parts[name, k] = _gram(inner[:, :k, :k])
        mean = matrices.mean(0)
        random = containment(mean, next(iter(subspaces.values())), ks).random
        return cls(_gram(matrices), parts, dict(zip(ks, random)))

    def share(self, name: str, k: int) -> Estimate:
        """||Q^T M Q|| / ||M|| of the mean over networks, without their noise.

        NaN without an error where the networks, or all of them but one, have nothing in common: ||M||^2 is not above 0.
        """
        part = self.parts[name, k]

        def ratio(w: Tensor) -> Tensor:
            whole = squared(self.whole, w)
            return (squared(part, w).clamp_min(0) / whole.clamp_min(0)).sqrt() if whole > 0 else whole * math.nan

        found = estimate(ratio, len(part))
        known = found.standard_error is not None and math.isfinite(found.standard_error)
        return found if known else Estimate(math.nan, None, len(part))

    def single(self, name: str, k: int) -> Estimate:
        """The same of every network on its own, mean over networks."""
        part = self.parts[name, k]
        return Estimate.of((part.diagonal() / self.whole.diagonal()).sqrt())


def _gram(matrices: Tensor) -> Tensor:
    flat = matrices.flatten(1)
    return (flat @ flat.T).double().cpu()
