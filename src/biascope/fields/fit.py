"""Fit a coordinate network to samples of a signal, and how well it does, in decibels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from biascope.arguments import check_number
from biascope.errors import InputError
from biascope.linearize.anchored import copy_of
from biascope.precision import without_autocast
from biascope.progress import progress
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.tables import facts


@checked
def psnr(prediction: Tensor, target: Tensor, peak: float = 1.0) -> float:
    """-10 log10(MSE / peak^2) in dB, the mean over all entries in float64; infinite for equal tensors.

    Example:
        >>> round(psnr(torch.zeros(4), torch.full((4,), 0.1)), 6)
        20.0
    """
    if prediction.shape != target.shape:
        raise InputError(f"prediction {list(prediction.shape)} and target {list(target.shape)} must have one shape")
    return decibels(float((prediction.double() - target.double().to(prediction.device)).square().mean()), peak)


def decibels(mse: float, peak: float = 1.0) -> float:
    """Mean squared error as PSNR.

    Example:
        >>> decibels(0.0), round(decibels(0.001), 6)
        (inf, 30.0)
    """
    check_number(peak, "peak", above=0)
    return -10 * math.log10(mse / peak**2) if mse > 0 else (math.inf if mse == 0 else math.nan)


@dataclass(frozen=True)
class Fit:
    """A fitted network and its course.

    model; losses [steps]: the mean squared error of every step, before its update. steps_seen [m]: after how many
    updates PSNR was measured; train_psnr, test_psnr [m] in dB (test_psnr: on points held out, NaN if there are none).
    """

    model: nn.Module = field(repr=False)
    losses: Tensor = field(repr=False)
    steps_seen: Tensor = field(repr=False)
    train_psnr: Tensor = field(repr=False)
    test_psnr: Tensor = field(repr=False)
    seed: int

    @property
    def psnr(self) -> float:
        """PSNR on the fitted points at the end."""
        return float(self.train_psnr[-1])

    def _repr_html_(self) -> str:
        """Where it began and ended, for notebooks."""
        rows = {"updates": len(self.losses), "PSNR before": float(self.train_psnr[0]), "PSNR after": self.psnr}
        return facts("Fit", {**rows, "PSNR on held-out points": float(self.test_psnr[-1])})


@checked
@without_autocast()
def fit(
    model: nn.Module,
    r: Tensor,
    values: Tensor,
    *,
    steps: int = 2000,
    lr: float = 1e-4,
    optimiser: str = "adam",
    fitted: Tensor | None = None,
    batch_size: int | None = None,
    every: int | None = None,
    peak: float = 1.0,
    seed: int = 0,
) -> Fit:
    """Fit a copy of a coordinate network to values at coordinates by mean squared error; full batch as in the paper.

    Anything sampled will do: audio (d = 1), an image (2), a signed distance (2, 3) or a video (3).

    Args:
        model: [..., d] -> [..., c]; not changed.
        r: coordinates [*grid, d], see `coordinates`.
        values: [*grid, c], or [*grid] for one output.
        steps: number of updates.
        lr: learning rate.
        optimiser: "adam", or "gd" (plain gradient descent; the paper's choice for a meta-learned start, with 1e-2).
        fitted: mask [*grid] of the points that are fitted; PSNR on the others tells how well it generalises.
        batch_size: points per update, drawn anew with replacement; None for all.
        every: measure PSNR after every so many updates; None for before and after only.
        peak: the largest value of the signal, for PSNR.
        seed: of the batches.

    Example:
        >>> from biascope.fields import coordinates
        >>> from biascope.nets import build
        >>> r = coordinates(64, 0.0, 1.0)
        >>> tone = torch.sin(2 * torch.pi * 3 * r[:, 0])
        >>> found = fit(build("siren", seed=0, in_features=1, hidden=(32, 32)), r, tone, steps=100, lr=1e-3)
        >>> bool(found.train_psnr[-1] > found.train_psnr[0] + 10)
        True
    """
    if steps < 1 or not lr > 0 or (every is not None and every < 1) or (batch_size is not None and batch_size < 1):
        raise InputError(f"steps={steps}, lr={lr:g}, every={every}, batch_size={batch_size}: all must be positive")
    if optimiser not in {"adam", "gd"}:
        raise InputError(f"optimiser={optimiser!r} is not known; choose 'adam' or 'gd'")
    net = copy_of(model)
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise InputError("the model has no parameter with requires_grad=True")
    points, targets, inside = _samples(trained[0], r, values, fitted)
    x, y = points[inside], targets[inside]
    others = (points[~inside], targets[~inside])
    with torch.no_grad():
        mse(net, x[:1], y[:1])  # refuses values that the network cannot have
    update = torch.optim.Adam(trained, lr=lr) if optimiser == "adam" else torch.optim.SGD(trained, lr=lr)
    rng = generator(seed, "fit", device=x.device)
    losses, seen = [], []
    for step in progress(range(steps), "fitting", leave=False):
        if step == 0 or (every is not None and step % every == 0):
            seen.append((step, *_measure(net, (x, y), others, peak)))
        batch = (x, y)
        if batch_size is not None:
            index = torch.randint(len(x), (batch_size,), generator=rng, device=x.device)
            batch = (x[index], y[index])
        loss = mse(net, *batch)
        for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):
            p.grad = g
        update.step()
        losses.append(loss.detach())
    seen.append((steps, *_measure(net, (x, y), others, peak)))
    for p in trained:
        p.grad = None
    found = torch.stack(losses).double().cpu()
    if not bool(found.isfinite().all()):
        bad = int((~found.isfinite()).nonzero()[0])
        raise InputError(f"the loss became {found[bad]:g} in step {bad}: use a smaller lr than {lr:g}")
    columns = torch.tensor(seen, dtype=torch.float64, device="cpu").T
    return Fit(net, found, columns[0].long(), columns[1], columns[2], seed)


def mse(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of a network at x [n, d] against y [n, c].

    Example:
        >>> float(mse(nn.Identity(), torch.zeros(3, 1), torch.ones(3, 1)))
        1.0
    """
    out = net(x)
    if out.shape != y.shape:
        raise InputError(f"the network gives {list(out.shape)} at {list(x.shape)}, but the values are {list(y.shape)}")
    loss: Tensor = (out - y).square().mean()
    return loss


def _measure(
    net: nn.Module, here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor], peak: float
) -> tuple[float, float]:
    with torch.no_grad():
        return tuple(psnr(net(x), y, peak) if len(x) else math.nan for x, y in (here, there))  # type: ignore[return-value]


def _samples(like: Tensor, r: Tensor, values: Tensor, fitted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Points [n, d], targets [n, c] and the mask [n] of those to fit, where the network is."""
    grid = r.shape[:-1]
    if r.dim() < 2 or tuple(values.shape[: len(grid)]) != tuple(grid) or values.dim() > len(grid) + 1:
        raise InputError(
            f"coordinates {list(r.shape)} and values {list(values.shape)} do not belong together: give [*grid, d] and "
            "[*grid, c] or [*grid]"
        )
    n = math.prod(grid)
    inside = torch.ones(n, dtype=torch.bool, device="cpu") if fitted is None else fitted.reshape(-1)
    flat = fitted is None or tuple(fitted.shape) in {tuple(grid), (n,)}  # [W, H] has as many entries as [H, W]
    if inside.dtype != torch.bool or not flat or not bool(inside.any()):
        raise InputError(f"fitted must be a mask {list(grid)} of booleans with at least one True")
    if not bool(torch.isfinite(values).all()):
        raise InputError("values has a NaN or infinity")
    points, targets = r.detach().reshape(n, -1).to(like), values.detach().reshape(n, -1).to(like)
    return points, targets, inside.to(like.device)
