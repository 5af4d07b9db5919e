"""Fourier transform of a polytope: from its faces down to its corners (Diaz, Le and Robins), and a series near k = 0.

For a face F of dimension m and the part kp of k along it:

    F~(k) = i sum_G (kp . N_F(G)) / |kp|^2  G~(k)      over the facets G of F, N_F(G) the outward normal inside aff(F)
    F~(k) = vol(F) e^{-i k . x0}                       if kp = 0, for any x0 in F

with F~(k) = ∫_F e^{-i k . x} dx. The phase is -k . x0 (the text also prints +k . x0). The recursion divides small
numbers by small numbers when |kp| times the size of F is small; there the transform is summed as a power series over
simplices, which contains kp = 0 and is exact to rounding.
"""

import math

import numpy as np
import torch
from scipy.spatial import ConvexHull, QhullError
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import check_shapes
from biascope.support.signatures import checked

TERMS = 24  # of the power series; |kp| radius <= 1 makes the first omitted term 1e-20
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Complex = np.ndarray[tuple[int, ...], np.dtype[np.complex128]]


@checked
def polytope_transform(vertices: Tensor, k: Tensor) -> Tensor:
    """∫_P e^{-i k . x} dx of the convex hull P of vertices [m, d], at wave vectors k [n, d]: complex128 [n].

    The work grows with the product of facet numbers over the dimensions: meant for d <= 3 and small polytopes.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> polytope_transform(square, torch.zeros(1, 2)).real.tolist()
        [1.0]
    """
    points = vertices.detach().to("cpu", torch.float64).numpy()
    waves = k.detach().to("cpu", torch.float64).numpy()
    check_shapes("vertices [m, d], k [n, d]", points, waves)
    if len(points) <= points.shape[1] or _dimension(points) < points.shape[1]:
        raise InputError(f"the {len(points)} vertices span less than {points.shape[1]} dimensions: the volume is 0")
    return torch.from_numpy(_transform(points, waves))


def simplex_series(corners: Array, weights: Array | None = None) -> Complex:
    """∫ g e^{-i l} over a simplex divided by its volume, from the values l of the phase at its corners [..., m + 1].

    g is linear with the corner values `weights` [..., m + 1] (1 everywhere if None). The integral is m! times a divided
    difference of exp, summed as a series of complete homogeneous polynomials: exact to rounding for |l| <= 1.
    """
    m = corners.shape[-1] - 1
    if weights is None:
        return math.factorial(m) * _series(corners, m)
    total = np.zeros(corners.shape[:-1], dtype=np.complex128)
    for j in range(m + 1):  # the corner's own barycentric coordinate: its node counted twice
        total = total + weights[..., j] * _series(np.concatenate([corners, corners[..., j : j + 1]], -1), m + 1)
    return math.factorial(m) * total


def _series(corners: Array, order: int) -> Complex:
    """sum_n (-i)^n h_n(corners) / (n + order)!"""
    h = [np.ones(corners.shape[:-1])] * corners.shape[-1]  # h_n of the first 1, 2, ... corners
    total = h[-1].astype(np.complex128) / math.factorial(order)
    for n in range(1, TERMS):
        new = [corners[..., 0] * h[0]]
        for j in range(1, corners.shape[-1]):
            new.append(new[-1] + corners[..., j] * h[j])
        h = new
        total = total + (-1j) ** n * h[-1] / math.factorial(n + order)
    return np.asarray(total)


def _transform(points: Array, k: Array) -> Complex:
    """The face spanned by points [v, d], at k [n, d]."""
    if len(points) == 1:
        return np.asarray(np.exp(-1j * (k @ points[0])))
    centre = points.mean(0)
    basis = _basis(points - centre)
    along = k @ basis.T  # [n, m], the part of k inside the face
    local = (points - centre) @ basis.T
    radius = np.linalg.norm(local, axis=1).max()
    length = np.linalg.norm(along, axis=1)
    small = length * radius <= 1.0
    facets, simplices = _faces(local)
    out = np.zeros(len(k), dtype=np.complex128)
    if small.any():
        for simplex in simplices:
            m = len(simplex) - 1
            volume = abs(np.linalg.det(simplex[1:] - simplex[0])) / math.factorial(m)
            out[small] += volume * simplex_series(along[small] @ simplex.T)
        out[small] *= np.exp(-1j * (k[small] @ centre))
    if not small.all():
        far = ~small
        for normal, members in facets:
            weight = 1j * (along[far] @ normal) / length[far] ** 2
            out[far] += weight * _transform(points[members], k[far])
    return out


def _faces(local: Array) -> tuple[list[tuple[Array, list[int]]], list[Array]]:
    """Facets (outward normal, indices of their vertices) and a triangulation of a full-dimensional polytope [v, m]."""
    if local.shape[1] == 1:
        low, high = int(local[:, 0].argmin()), int(local[:, 0].argmax())
        return [(np.array([-1.0]), [low]), (np.array([1.0]), [high])], [local[[low, high]]]
    try:
        hull = ConvexHull(local)
    except QhullError as error:
        raise InputError(f"a face of the polytope is degenerate: {str(error).splitlines()[0]}") from error
    facets: list[tuple[Array, list[int]]] = []
    for normal, corners in zip(hull.equations, hull.simplices):
        for known, members in facets:
            if np.abs(known - normal[:-1]).max() < 1e-9 and np.abs(local[members[0]] @ known + normal[-1]) < 1e-9:
                members.extend(int(i) for i in corners if i not in members)
                break
        else:
            facets.append((normal[:-1], [int(i) for i in corners]))
    inside = local.mean(0)
    return facets, [np.vstack([inside, local[corners]]) for corners in hull.simplices]


def _basis(centred: Array) -> Array:
    """Orthonormal basis [m, d] of the space spanned by the rows."""
    _, s, vt = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(vt[s > 1e-10 * s[0]])


def _dimension(points: Array) -> int:
    s = np.linalg.svd(points - points.mean(0), compute_uv=False)
    return int((s > 1e-10 * max(s[0], 1e-300)).sum())
