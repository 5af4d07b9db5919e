"""Exact linear regions of a ReLU network on a segment and on a rectangle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from biascope.spectral.relu_network import ReLUNetwork, affine_map, certify, relu_network
from biascope.support.errors import InputError
from biascope.support.limits import Count, check_shapes
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts, one_line

MERGE = 1e-12  # knots closer than this share of the segment are one, and values below this share of their terms 0
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Segments:
    """A piecewise linear function of one variable t: knots [m + 1], values there [m + 1, c], slopes [m, c].

    Example:
        >>> hat = Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, 0.0])
        >>> hat.slopes.flatten().tolist()
        [1.0, -1.0]
    """

    knots: Tensor
    values: Tensor
    slopes: Tensor = field(repr=False)
    __repr__ = one_line

    @classmethod
    def through(cls, knots: Sequence[float] | Tensor, values: Sequence[float] | Tensor) -> Segments:
        """The function of one output through the points (knots [m + 1], values [m + 1])."""
        t, y = (torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in (knots, values))
        if t.shape != y.shape or t.dim() != 1 or len(t) < 2 or not bool((t.diff() > 0).all()):
            raise InputError(f"knots {list(t.shape)} must rise, and values {list(y.shape)} be as many")
        return cls(t, y[:, None], (y.diff() / t.diff())[:, None])

    def __len__(self) -> int:
        return len(self.knots) - 1

    def _repr_html_(self) -> str:
        """How many pieces, where, how steep, for notebooks."""
        rows = {"pieces": len(self), "from": float(self.knots[0]), "to": float(self.knots[-1])}
        return facts("Piecewise linear function", rows | {"steepest slope": float(self.slopes.abs().max())})


@dataclass(frozen=True)
class Polygons:
    """A piecewise linear function on a polygon-shaped part of the plane.

    Attributes:
        vertices: of every region, [v, 2] counter-clockwise.
        weights: W_eps [r, c, 2].
        biases: b_eps [r, c].
    """

    vertices: tuple[Tensor, ...] = field(repr=False)
    weights: Tensor
    biases: Tensor
    __repr__ = one_line

    def __len__(self) -> int:
        return len(self.vertices)

    @property
    def areas(self) -> Tensor:
        """Area of every region, [r]."""
        return torch.stack([_area(v) for v in self.vertices])

    def _repr_html_(self) -> str:
        """How many regions, how large, for notebooks."""
        rows = {"regions": len(self), "area": float(self.areas.sum()), "largest": float(self.areas.max())}
        return facts("Piecewise linear function of the plane", rows)


@checked
@without_autocast()
def linear_regions_1d(
    model: nn.Module | ReLUNetwork, low: float | Tensor, high: float | Tensor, max_knots: Count = 1_000_000
) -> Segments:
    """All breakpoints of f on a segment, exactly: layer by layer, a knot where a unit changes sign between two knots.

    low, high: numbers for a network of one input (knots are then values of x), or points [d] (knots are distances
    from `low`). Pieces whose pattern differs but whose slope does not are kept apart.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> _ = net.load_state_dict({"0.weight": torch.tensor([[1.0], [1.0]]), "0.bias": torch.tensor([0.0, -0.5]),
        ...                      "2.weight": torch.tensor([[1.0, -2.0]]), "2.bias": torch.zeros(1)})
        >>> linear_regions_1d(net, -1.0, 1.0).knots.tolist()
        [-1.0, 0.0, 0.5, 1.0]
    """
    net = relu_network(model)
    start = torch.as_tensor(low, dtype=torch.float64, device="cpu").reshape(-1)
    stop = torch.as_tensor(high, dtype=torch.float64, device="cpu").reshape(-1)
    check_shapes(f"low [{net.widths[0]}], high [{net.widths[0]}]", start, stop)
    along = isinstance(low, Tensor) and low.dim() > 0
    length = float((stop - start).norm())
    if not 0 < length < math.inf or (not along and float(stop) < float(start)):
        raise InputError(f"the segment from {low} to {high} is empty or not finite; give low < high")

    def point(t: Tensor) -> Tensor:
        return start + t[:, None] * (stop - start) / length

    certify(model, net, point(length * torch.linspace(0, 1, 65, dtype=torch.float64, device="cpu")))
    t = torch.tensor([0.0, length], dtype=torch.float64, device="cpu")
    for layer in range(len(net.weights) - 1):
        z = net.preactivations(point(t))[layer]
        left, right = z[:-1], z[1:]
        piece, unit = (left.sign() * right.sign() < 0).nonzero(as_tuple=True)  # products may underflow
        a, b = left[piece, unit], right[piece, unit]
        crossing = t[piece] + (t[piece + 1] - t[piece]) * a / (a - b)
        t = torch.cat([t, crossing]).sort().values
        keep = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), t.diff() > MERGE * length])
        t = t[keep]
        t[-1] = length
        if len(t) > max_knots:
            raise InputError(f"more than {max_knots} knots in layer {layer + 1}; raise max_knots or shorten it")
    direction = (stop - start) / length
    slopes = affine_map(net, point((t[1:] + t[:-1]) / 2))[0] @ direction
    values = net(point(t))
    return Segments(t if along else t + start, values, slopes)


@checked
@without_autocast()
def linear_regions_2d(
    model: nn.Module | ReLUNetwork,
    low: tuple[float, float] = (-1.0, -1.0),
    high: tuple[float, float] = (1.0, 1.0),
    max_regions: Count = 200_000,
) -> Polygons:
    """All linear regions of f on a rectangle, exactly: the rectangle is cut by the zero line of every unit in turn.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
        >>> found = linear_regions_2d(net)
        >>> round(float(found.areas.sum()), 9)
        4.0
    """
    net = relu_network(model)
    (x0, y0), (x1, y1) = low, high
    if not (-math.inf < x0 < x1 < math.inf and -math.inf < y0 < y1 < math.inf):
        raise InputError(f"the rectangle from {tuple(low)} to {tuple(high)} is empty or not finite; give low < high")
    axes = [torch.linspace(a, b, 9, dtype=torch.float64, device="cpu") for a, b in ((x0, x1), (y0, y1))]
    certify(model, net, torch.cartesian_prod(*axes))
    box = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], dtype=np.float64)
    # each polygon with the affine map of the layer's input on it
    todo: list[tuple[Array, Array, Array]] = [(box, np.eye(2), np.zeros(2))]
    for w, b in zip([w.numpy() for w in net.weights[:-1]], [b.numpy() for b in net.biases[:-1]]):
        done = []
        for polygon, slope, shift in todo:
            m, v = w @ slope, w @ shift + b
            z = polygon @ m.T + v
            # rounding of z, unit by unit: relative to the terms it is summed from, so that no scale of a unit matters
            terms = np.abs(polygon) @ (np.abs(w) @ np.abs(slope)).T + np.abs(w) @ np.abs(shift) + np.abs(b)
            tolerance = MERGE * terms.max(0)
            pieces = [polygon]
            for unit in np.flatnonzero((z.min(0) < -tolerance) & (z.max(0) > tolerance)):
                pieces = [half for piece in pieces for half in _cut(piece, m[unit], v[unit], tolerance[unit])]
            for piece in pieces:
                active = piece.mean(0) @ m.T + v > 0
                done.append((piece, m * active[:, None], v * active))
            if len(done) > max_regions:
                raise InputError(f"more than {max_regions} regions; raise max_regions or take a smaller rectangle")
        todo = done
    last, offset = net.weights[-1].numpy(), net.biases[-1].numpy()
    return Polygons(
        tuple(torch.from_numpy(polygon) for polygon, _, _ in todo),
        torch.from_numpy(np.stack([last @ slope for _, slope, _ in todo])),
        torch.from_numpy(np.stack([last @ shift + offset for _, _, shift in todo])),
    )


def _cut(polygon: Array, normal: Array, offset: float, tolerance: float) -> list[Array]:
    """The parts of a convex polygon on both sides of the line normal · x + offset = 0."""
    z = polygon @ normal + offset
    if z.min() >= -tolerance or z.max() <= tolerance:
        return [polygon]
    sides: list[list[Array]] = [[], []]
    for i in range(len(polygon)):
        p, q, a, b = polygon[i], polygon[(i + 1) % len(polygon)], z[i], z[(i + 1) % len(polygon)]
        if a >= -tolerance:
            sides[0].append(p)
        if a <= tolerance:
            sides[1].append(p)
        if min(a, b) < -tolerance and max(a, b) > tolerance:
            crossing = p + (q - p) * (a / (a - b))
            sides[0].append(crossing)
            sides[1].append(crossing)
    return [np.stack(side) for side in sides if len(side) >= 3]


def _area(vertices: Tensor) -> Tensor:
    x, y = vertices.T
    area: Tensor = (x * y.roll(-1) - x.roll(-1) * y).sum() / 2
    return area
