"""What the studies of EKFAC share: data, batches in a fixed order, errors of a metric."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import data
from biascope.curvature.kronecker import EigenPiece
from biascope.optim.preconditioner import Preconditioner
from biascope.seeds import generator
from biascope.studies.runs import Run


def images(name: str, n: int, run: Run) -> tuple[Tensor, Tensor]:
    """The first n training images [n, d] in [0, 1] and their labels, on the run's device."""
    found = data.load(name, "train")
    return found.x[:n].flatten(1).to(run.device), found.y[:n].to(run.device)


def batch(run: Run, seed: int, step: int, n: int, size: int) -> Tensor:
    """Indices of the batch of a step: the same for every optimiser."""
    return torch.randint(n, (size,), generator=generator(run.seed, "batch", seed, step)).to(run.device)


def reconstruction(net: nn.Module, x: Tensor) -> Tensor:
    """Cross-entropy of the pixels, summed over pixels, averaged over examples."""
    return F.binary_cross_entropy_with_logits(net(x), x, reduction="sum") / len(x)


def flow(watch: Preconditioner, unit: str) -> tuple[Tensor, Tensor]:
    """Homogeneous inputs [n, i + 1] and output gradients of the individual (mean) losses [n, o] of a linear layer."""
    found = next(u for u in watch.units if u.name == unit)
    call = watch.watcher.records[found.module].calls[0]
    assert call.input is not None
    assert call.grad is not None
    a = torch.cat([call.input, call.input.new_ones(len(call.input), 1)], 1)
    return a.double(), call.grad.double() * len(a)


def gram(a: Tensor, g: Tensor) -> Tensor:
    """K [n, n] with the eigenvalues of the layer's second moment F = (1/n) sum vec(g a^T) vec(g a^T)^T."""
    return (a @ a.T) * (g @ g.T) / len(a)


def relative_error(K: Tensor, true: Tensor, used: Tensor) -> float:
    """||F - Q diag(used) Q^T|| / ||F|| where `true` is the diagonal of F in the basis Q, and ||F|| = ||K||."""
    norm = K.square().sum()
    squared = norm - 2 * (true.double() * used.double()).sum() + used.double().square().sum()
    return float((squared.clamp_min(0.0) / norm).sqrt())


def kfac_scalings(E: EigenPiece) -> Tensor:
    """S_B S_A [g, e, o, i], the scalings that KFAC uses in the same basis."""
    return (E.s_B[:, :, None] * E.s_A[:, None, :])[:, None].expand_as(E.s)
