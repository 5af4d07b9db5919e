"""Fit a coordinate network to samples of a signal on a grid, and how well it does, in decibels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.limits import Count, FiniteTensor, Positive, shaped
from biascope.support.precision import without_autocast
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts, one_line
from biascope.tangent.anchored import copy_of

Coordinates = Annotated[Tensor, shaped(2, 3, 4, 5)]  # [*grid, d]


@checked
def coordinates(
    shape: Count | Sequence[Count], low: float = -1.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The points of a grid on [low, high)^d: [*shape, d], the last axis in the order of the axes of the grid.

    The end point is left out, so that whole frequencies fall on exact DFT bins. With the end point included, as
    `linspace` has it, the energies that theory says are zero are not.

    Args:
        shape: samples per axis: 128 or (128,) for a signal, (H, W) for an image, (T, H, W) for a video.
        low: first coordinate of every axis.
        high: where the next sample would be.
        dtype: of the coordinates.

    Example:
        >>> coordinates(4, 0.0, 1.0).flatten().tolist()
        [0.0, 0.25, 0.5, 0.75]
        >>> coordinates((2, 3)).shape
        torch.Size([2, 3, 2])
    """
    if not low < high:
        raise InputError(f"low={low:g} must be below high={high:g}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    axes = [(low + (high - low) * torch.arange(n, dtype=torch.float64, device="cpu") / n).to(dtype) for n in sizes]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


@checked
def psnr(prediction: Tensor, target: Tensor, peak: Positive = 1.0) -> float:
    """-10 log10(MSE / peak^2) in dB, the mean over all entries in float64; infinite for equal tensors."""
    if prediction.shape != target.shape:
        raise InputError(f"prediction {list(prediction.shape)} and target {list(target.shape)} must have one shape")
    return decibels(float((prediction.double() - target.double().to(prediction.device)).square().mean()), peak)


def decibels(mse: float, peak: float = 1.0) -> float:
    """Mean squared error as PSNR."""
    return -10 * math.log10(mse / peak**2) if mse > 0 else (math.inf if mse == 0 else math.nan)


@dataclass(frozen=True)
class Fit:
    """A fitted network and its course.

    model; losses [steps]: the mean squared error of every step, before its update. steps_seen [m]: after how many
    updates PSNR was measured; train_psnr, test_psnr [m] in dB (test_psnr: on points held out, NaN if there are none).
    """

    model: nn.Module = field(repr=False)
    losses: Tensor = field(repr=False)
    steps_seen: Tensor
    train_psnr: Tensor
    test_psnr: Tensor
    seed: int
    __repr__ = one_line

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
    r: Coordinates,
    values: FiniteTensor,
    *,
    steps: Count = 2000,
    lr: Positive = 1e-4,
    optimiser: Literal["adam", "gd"] = "adam",
    fitted: Tensor | None = None,
    batch_size: Count | None = None,
    every: Count | None = None,
    peak: Positive = 1.0,
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
        fitted: mask [*grid] of the points that are fitted; PSNR on the others shows how well it generalises.
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
    net = copy_of(model)
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise InputError("the model has no parameter with requires_grad=True")
    points, targets = on_grid(trained[0], r, values)
    x, y, others = _split(points, targets[0], fitted, r.shape[:-1])
    with torch.no_grad():
        squared_error(net(x[:1]), y[:1])  # refuses values that the network cannot have
    update = torch.optim.Adam(trained, lr=lr) if optimiser == "adam" else torch.optim.SGD(trained, lr=lr)
    rng = generator(seed, "fit", device=x.device)
    losses, seen = [], []

    @torch.no_grad()
    def measured(step: int) -> tuple[float, ...]:
        return step, *(psnr(net(a), b, peak) if len(a) else math.nan for a, b in ((x, y), others))

    for step in progress(range(steps), "fitting", leave=False):
        if step == 0 or (every is not None and step % every == 0):
            seen.append(measured(step))
        batch = (x, y)
        if batch_size is not None:
            index = torch.randint(len(x), (batch_size,), generator=rng, device=x.device)
            batch = (x[index], y[index])
        loss = squared_error(net(batch[0]), batch[1])
        for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):
            p.grad = g
        update.step()
        losses.append(loss.detach())
    seen.append(measured(steps))
    for p in trained:
        p.grad = None
    columns = torch.tensor(seen, dtype=torch.float64, device="cpu").T
    return Fit(net, finite_losses(losses), columns[0].long(), columns[1], columns[2], seed)


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of outputs [n, c] against values [n, c]; other shapes would be broadcast and are refused."""
    if out.shape != y.shape:
        raise InputError(f"the network gives {list(out.shape)}, but the values are {list(y.shape)}")
    return (out - y).square().mean()


def finite_losses(losses: Sequence[Tensor]) -> Tensor:
    """The losses of all steps [steps] in float64; refused where training diverged."""
    found = torch.stack(list(losses)).double().cpu()
    if not bool(found.isfinite().all()):
        bad = int((~found.isfinite()).nonzero()[0])
        raise InputError(f"the loss became {found[bad]:g} in step {bad}: use a smaller lr")
    return found


def on_grid(like: Tensor, r: Tensor, signals: Tensor, several: bool = False) -> tuple[Tensor, Tensor]:
    """Points [N, d] and targets [n, N, c], where a parameter is, of one signal [*grid] or [*grid, c], or several."""
    grid, first = tuple(r.shape[:-1]), int(several)
    if tuple(signals.shape[first : first + len(grid)]) != grid or signals.dim() > first + len(grid) + 1:
        need = "[n, *grid] or [n, *grid, c]" if several else "[*grid] or [*grid, c]"
        raise InputError(f"values {list(signals.shape)} do not belong to coordinates {list(r.shape)}: give {need}")
    n, N = (len(signals) if several else 1), math.prod(grid)
    return r.detach().reshape(N, -1).to(like), signals.detach().reshape(n, N, -1).to(like)


def _split(
    points: Tensor, targets: Tensor, fitted: Tensor | None, grid: torch.Size
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Points and targets to fit, and the others."""
    mask = torch.ones(grid, dtype=torch.bool, device="cpu") if fitted is None else fitted
    same = mask.shape in (grid, points.shape[:1])  # [W, H] has as many entries as [H, W]
    if mask.dtype != torch.bool or not same or not bool(mask.any()):
        raise InputError(f"fitted must be a mask {list(grid)} of booleans with at least one True")
    inside = mask.reshape(-1).to(points.device)
    return points[inside], targets[inside], (points[~inside], targets[~inside])
