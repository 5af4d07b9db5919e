"""Exact Fourier transform of a piecewise linear function, f~(k) = ∫ f(x) e^{-i k . x} dx, from its linear regions.

Lemma 3.1 with the sign corrected (the printed one is for e^{+i k x}; magnitudes are the same):

    f~(k) = -i sum_eps (W_eps k / k^2) 1~_eps(k)  +  (i / k^2) ∮ (k . n) f e^{-i k . x} ds

The lemma is the first term. It is the whole transform if f vanishes on the border; a network cut off at a box needs the
second term as well, and has it here. The inverse carries (2 pi)^{-d} (printed: (2 pi)^{d/2}).
"""

import numpy as np
import torch
from scipy.special import spherical_jn
from torch import Tensor

from biascope.spectral.polytope import simplex_series
from biascope.spectral.regions import Polygons, Segments
from biascope.support.errors import InputError
from biascope.support.limits import check_shapes
from biascope.support.signatures import checked

BLOCK = 2_000_000  # (wave vectors x edges) at a time


@checked
def fourier_transform(regions: Segments | Polygons, k: Tensor, boundary: bool = True) -> Tensor:
    """f~(k) of a function given by its linear regions: complex128 [n], or [n, c] for c > 1 outputs.

    Args:
        regions: from `linear_regions_1d` or `linear_regions_2d`.
        k: wave numbers [n], or wave vectors [n, d].
        boundary: True cuts f off at the border of the regions; False leaves the border's term out, which is the sum of
            Lemma 3.1: the transform where f has compact support, and the part that theorem 3.3 speaks of elsewhere.
            It needs k != 0.

    Example:
        >>> hat = Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, 0.0])
        >>> fourier_transform(hat, torch.tensor([7.3])).numpy().round(6)
        array([-0.061421+0.034228j])
    """
    k = torch.as_tensor(k, dtype=torch.float64).cpu()
    dim = 1 if isinstance(regions, Segments) else 2
    waves = k.reshape(-1, 1) if k.dim() <= 1 and dim == 1 else k
    check_shapes(f"k [n, {dim}]", waves)
    if not boundary and bool((waves.norm(dim=1) == 0).any()):
        raise InputError("boundary=False is not defined at k = 0; leave k = 0 out")
    found = _line(regions, waves[:, 0], boundary) if isinstance(regions, Segments) else _plane(regions, waves, boundary)
    return found[:, 0] if found.shape[1] == 1 else found


def transform_from_jumps(knots: Tensor, jumps: Tensor, k: Tensor) -> Tensor:
    """f~(k) = -k^{-2} sum_j dw_j e^{-i k t_j}, k not 0, for compact support; dw [m] are the slope's jumps at t [m]."""
    t, w, k = (v.to("cpu", torch.float64) for v in (knots, jumps, k))
    phase = torch.exp(-1j * k[:, None] * t)
    return -(phase @ w.to(phase.dtype)) / k**2


def _line(f: Segments, k: Tensor, boundary: bool) -> Tensor:
    """Each piece about its middle: ∫ (m + s u) e^{-iku} du over |u| <= h is 2h (m j_0(kh) - i s h j_1(kh))."""
    middle = (f.knots[1:] + f.knots[:-1]) / 2
    h = f.knots.diff() / 2
    out = []
    for part in torch.split(k, max(1, BLOCK // max(1, len(h)))):
        phase = torch.exp(-1j * part[:, None] * middle)
        u = part[:, None] * h
        j0 = _bessel(0, u)
        if boundary:
            level = ((f.values[1:] + f.values[:-1]) / 2)[None] * j0[..., None]
            tilt = (f.slopes * h[:, None])[None] * _bessel(1, u)[..., None]
            out.append((phase[..., None] * (2 * h)[:, None] * (level - 1j * tilt)).sum(1))
        else:
            out.append((phase[..., None] * (2 * h * j0)[..., None] * f.slopes).sum(1) / (1j * part[:, None]))
    return torch.cat(out)


def _plane(f: Polygons, k: Tensor, boundary: bool) -> Tensor:
    edges = _Edges(f)
    parts = [_plane_block(f, edges, part, boundary) for part in torch.split(k, max(1, BLOCK // len(edges.p)))]
    return torch.cat(parts)


class _Edges:
    """The edges and triangles of all polygons in flat arrays."""

    def __init__(self, f: Polygons) -> None:
        starts, stops, owner, triangles, of_triangle = [], [], [], [], []
        for r, v in enumerate(f.vertices):
            starts.append(v)
            stops.append(v.roll(-1, 0))
            owner += [r] * len(v)
            triangles += [torch.stack([v[0], v[i], v[i + 1]]) for i in range(1, len(v) - 1)]
            of_triangle += [r] * (len(v) - 2)
        self.p, self.q = torch.cat(starts), torch.cat(stops)
        self.owner, self.of_triangle = torch.tensor(owner, device="cpu"), torch.tensor(of_triangle, device="cpu")
        self.triangles = torch.stack(triangles)  # [T, 3, 2]
        self.centres = torch.stack([v.mean(0) for v in f.vertices])
        self.radii = torch.stack([(v - v.mean(0)).norm(dim=1).max() for v in f.vertices])
        along = self.q - self.p
        self.normals = torch.stack([along[:, 1], -along[:, 0]], 1)  # outward, times the edge's length


def _plane_block(f: Polygons, edges: _Edges, k: Tensor, boundary: bool) -> Tensor:
    n, c = len(k), f.biases.shape[1]
    small = k.norm(dim=1)[:, None] * edges.radii <= 1.0  # [n, r]: there the series, elsewhere the divergence theorem
    square = k.square().sum(1).clamp(min=1e-300)
    half = (k @ (edges.q - edges.p).T) / 2
    phase = torch.exp(-1j * (k @ ((edges.p + edges.q) / 2).T))
    flux = (k @ edges.normals.T) * phase  # k . n times the edge's length and phase
    j0 = _bessel(0, half)
    indicator = torch.zeros(n, len(f), dtype=torch.complex128, device="cpu").index_add_(1, edges.owner, flux * j0)
    indicator = 1j * indicator / square[:, None]
    slope = torch.einsum("rcd,nd->nrc", f.weights, k) / square[:, None, None]

    pair_n, pair_t = small[:, edges.of_triangle].nonzero(as_tuple=True)
    owner, corners = edges.of_triangle[pair_t], edges.triangles[pair_t]
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    area = (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2
    level = torch.einsum("pd,pvd->pv", k[pair_n], corners - edges.centres[owner][:, None])
    factor = area * torch.exp(-1j * (k[pair_n] * edges.centres[owner]).sum(1))
    series = factor * torch.from_numpy(simplex_series(level.numpy()))
    near = torch.zeros(n, len(f), dtype=torch.complex128, device="cpu").index_put_(
        (pair_n, owner), series, accumulate=True
    )
    indicator = torch.where(small, near, indicator)
    if not boundary:
        return -1j * (slope * indicator[..., None]).sum(1)

    total = torch.zeros(n, c, dtype=torch.complex128, device="cpu")
    j1 = _bessel(1, half)
    for output in range(c):
        w, bias = f.weights[:, output][edges.owner], f.biases[:, output][edges.owner]
        at_p, at_q = (w * edges.p).sum(1) + bias, (w * edges.q).sum(1) + bias
        around = flux * ((at_p + at_q) / 2 * j0 - 1j * (at_q - at_p) / 2 * j1)
        ring = torch.zeros(n, len(f), dtype=torch.complex128, device="cpu").index_add_(1, edges.owner, around)
        far = -1j * slope[..., output] * indicator + 1j * ring / square[:, None]
        values = torch.einsum("pvd,pd->pv", corners, f.weights[owner, output]) + f.biases[owner, output][:, None]
        linear = factor * torch.from_numpy(simplex_series(level.numpy(), values.numpy()))
        close = torch.zeros_like(ring).index_put_((pair_n, owner), linear, accumulate=True)
        total[:, output] = torch.where(small, close, far).sum(1)
    return total


def _bessel(order: int, u: Tensor) -> Tensor:
    """Spherical Bessel function j_0 or j_1, odd or even as it should be for negative arguments."""
    values = torch.from_numpy(np.asarray(spherical_jn(order, u.abs().numpy())))
    return values * u.sign() if order % 2 else values
