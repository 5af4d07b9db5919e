"""Paths through input space that stay inside one class: nudged elastic band without springs, and AutoNEB.

A path is a chain of pivots between two inputs that the network puts into class c. Each step moves the inner pivots up
the logit of c (the text once says "minimised"; the class is kept by maximising), only across the path, never along it;
then the pivots are put back to the relative distances they had (that replaces the springs). After each round AutoNEB
adds a pivot where the path between two pivots is worst.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from biascope.network.door import refuse_batch_dependence
from biascope.support.arguments import check_tensor
from biascope.support.errors import InputError
from biascope.support.estimate import mean
from biascope.support.limits import Count, FiniteTensor, Positive, Share, check_shapes
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked
from biascope.support.tables import grid, one_line

Classifier = Callable[[Tensor], Tensor]  # inputs [n, ...] -> logits [n, classes]


@dataclass(frozen=True)
class Paths:
    """p paths of m pivots.

    Attributes:
        pivots: [p, m, ...].
        length_ratio: [p], length over that of the straight line.
        min_probability: [p], the smallest softmax probability of the class on the path (sampled between pivots).
        straight_probability: [p], the same for the straight line.
        connected: [p], whether the class is predicted at every sampled point (not where a point or a logit is NaN).
        straight_connected: [p], the same for the straight line.
    """

    pivots: Tensor = field(repr=False)
    length_ratio: Tensor
    min_probability: Tensor
    straight_probability: Tensor
    connected: Tensor
    straight_connected: Tensor
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """How many hold, beside straight lines, for notebooks."""
        paths = ("path", self.connected, self.min_probability, self.length_ratio)
        ones = torch.ones_like(self.length_ratio)
        lines = ("straight line", self.straight_connected, self.straight_probability, ones)
        rows = [(name, int(c.sum()), p.tolist(), r.tolist()) for name, c, p, r in (paths, lines)]
        return grid(
            f"{len(self.pivots)} paths of {self.pivots.shape[1]} pivots",
            ["", "connected", "least probability", "length over the straight line"],
            [(name, count, mean(p), mean(r)) for name, count, p, r in rows],
        )


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def autoneb(
    classify: Classifier,
    start: FiniteTensor,
    stop: FiniteTensor,
    target: Tensor,
    *,
    pivots: Count = 5,
    rounds: Count = 4,
    steps: Count = 10,
    lr: Positive = 1e-3,
    momentum: Share = 0.9,
    samples: Count = 4,
) -> Paths:
    """Bend the straight lines from start [p, ...] to stop [p, ...] so that class target [p] is predicted all along.

    Args:
        classify: logits [n, classes] of inputs [n, ...]; its parameters get no gradient here. A module with batch norm
            or dropout must be in eval mode.
        start: first ends.
        stop: last ends.
        target: class of each path.
        pivots: at the beginning, ends included; one is added after each round but the last.
        rounds: of NEB (the paper: 4).
        steps: of SGD in each round (10).
        lr: step size (0.001).
        momentum: 0.9.
        samples: points between two pivots at which the class is predicted.

    Example:
        >>> ring = lambda x: torch.stack([1 - (x.norm(dim=1) - 1).abs(), torch.full((len(x),), 0.7)], 1)
        >>> ends = torch.tensor([[1.0, 0.0]]), torch.tensor([[-0.1, 1.0]])
        >>> found = autoneb(ring, *ends, torch.tensor([0]), lr=0.05)
        >>> found.straight_connected.item(), found.connected.item()
        (False, True)
    """
    check_shapes("start [p, ...], stop [p, ...], target [p]", check_tensor(start, "start", floating=True), stop, target)
    if target.is_floating_point() or pivots < 3:
        raise InputError(f"target is {target.dtype}, pivots {pivots}: whole numbers and at least 3 are needed")
    if isinstance(classify, nn.Module):
        refuse_batch_dependence(classify)
    shape, p = start.shape[1:], len(start)
    line = torch.linspace(0, 1, pivots, device=start.device, dtype=start.dtype)[None, :, None]
    a, b = start.detach().flatten(1)[:, None], stop.detach().flatten(1)[:, None]
    path = torch.cat([(a + line * (b - a))[:, :-1], b], 1)

    def logits(points: Tensor) -> Tensor:
        """[p, m, features] -> [p, m, classes]"""
        return classify(points.reshape(-1, *shape)).reshape(p, points.shape[1], -1)

    lowest, highest = (int(value) for value in torch.aminmax(target)) if p else (0, 0)

    def of_class(out: Tensor) -> Tensor:
        if not 0 <= lowest <= highest < out.shape[2]:
            raise InputError(f"target goes from {lowest} to {highest}: the {out.shape[2]} classes are 0, 1, ...")
        return out.gather(2, target.to(out.device).view(-1, 1, 1).expand(-1, out.shape[1], 1))[..., 0]

    def probabilities(points: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of the class and whether it is predicted, [p, (m - 1) samples + 1], between pivots too."""
        points = _between(points, samples)
        with torch.no_grad():
            out = logits(points)
        # argmax takes NaN for the largest, and a path that has diverged is none
        sound = out.isfinite().all(2) & points.isfinite().all(2).to(out.device)
        wins = (out.argmax(2) == target.to(out.device)[:, None]) & sound
        return of_class(out.softmax(2)), wins

    straight, straight_wins = probabilities(path)
    for turn in range(rounds):
        spacing = _positions(path)
        velocity = torch.zeros_like(path[:, 1:-1])
        for _ in range(steps):
            inner = path[:, 1:-1].detach().requires_grad_(True)
            with torch.enable_grad():
                (up,) = torch.autograd.grad(of_class(logits(inner)).sum(), inner)
            tangent = path[:, 2:] - path[:, :-2]
            tangent = tangent / tangent.norm(dim=2, keepdim=True).clamp(min=1e-12)
            up = up - (up * tangent).sum(2, keepdim=True) * tangent
            velocity = momentum * velocity + up
            path = torch.cat([path[:, :1], path[:, 1:-1] + lr * velocity, path[:, -1:]], 1)
            path = _redistribute(path, spacing)
        if turn < rounds - 1:
            path = _insert(path, probabilities(path)[0], samples)
    found, wins = probabilities(path)
    length = path.diff(dim=1).norm(dim=2).sum(1)
    direct = (b - a)[:, 0].norm(dim=1).clamp(min=1e-12)
    return Paths(
        path.reshape(p, -1, *shape), length / direct, found.amin(1), straight.amin(1), wins.all(1), straight_wins.all(1)
    )


def _between(path: Tensor, samples: int) -> Tensor:
    """Pivots and `samples` - 1 points between neighbours: [p, (m - 1) samples + 1, features]."""
    share = torch.arange(samples, device=path.device, dtype=path.dtype)[:, None] / samples
    filled = path[:, :-1, None] + share * path.diff(dim=1)[:, :, None]
    return torch.cat([filled.flatten(1, 2), path[:, -1:]], 1)


def _positions(path: Tensor) -> Tensor:
    """Relative arc length of every pivot, [p, m] from 0 to 1."""
    steps = path.diff(dim=1).norm(dim=2)
    run = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)
    return run / run[:, -1:].clamp(min=1e-12)


def _redistribute(path: Tensor, spacing: Tensor) -> Tensor:
    """The pivots moved along their own chain to the relative arc lengths `spacing`."""
    now = _positions(path)
    right = torch.searchsorted(now.contiguous(), spacing.contiguous()).clamp(1, path.shape[1] - 1)
    low, high = now.gather(1, right - 1), now.gather(1, right)
    share = ((spacing - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)[..., None]
    index = right[..., None].expand_as(path)
    moved = path.gather(1, index - 1) * (1 - share) + path.gather(1, index) * share
    return torch.cat([path[:, :1], moved[:, 1:-1], path[:, -1:]], 1)


def _insert(path: Tensor, probability: Tensor, samples: int) -> Tensor:
    """One more pivot in each path: the middle of the piece whose inner points are worst."""
    p, m, _ = path.shape
    worst = probability[:, :-1].reshape(p, m - 1, samples).amin(2).argmin(1)
    rows = torch.arange(p, device=path.device)
    middle = (path[rows, worst] + path[rows, worst + 1]) / 2
    order = torch.cat([torch.arange(m, device=path.device).expand(p, m), worst[:, None]], 1).float()
    order[:, -1] += 0.5
    joined = torch.cat([path, middle[:, None]], 1)
    return joined.gather(1, order.argsort(1)[..., None].expand_as(joined))
