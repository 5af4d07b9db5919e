"""Gaussian inputs whose covariance is a given matrix, or the same matrix with its spectrum reversed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from biascope.arguments import check_tensor
from biascope.data.dataset import Dataset, Labels, Seed, alternating_signs, as_labels, generator, seed_of
from biascope.errors import InputError
from biascope.inputs import check_inputs
from biascope.signatures import checked


def _eigh(g: Tensor) -> tuple[Tensor, Tensor]:
    if g.dim() != 2 or g.shape[0] != g.shape[1]:
        raise InputError(f"expected a square matrix [D, D], got {list(g.shape)}")
    check_inputs(check_tensor(g, "the matrix", floating=True), "the matrix")
    wide = g.detach().cpu().double()
    asymmetry = float((wide - wide.T).abs().max())
    if asymmetry > 1e-4 * max(float(wide.abs().max()), 1e-300):
        raise InputError(
            f"the matrix is not symmetric (largest difference {asymmetry:.3g}); pass (G + G.T) / 2 if meant"
        )
    values, vectors = torch.linalg.eigh((wide + wide.T) / 2)
    return values, vectors


@checked
def flip_spectrum(g: Tensor) -> Tensor:
    """V diag(reversed eigenvalues) V^T: the same eigenvectors and spectrum, with the order of the eigenvalues reversed.

    Example:
        >>> flip_spectrum(torch.diag(torch.tensor([1.0, 2.0, 5.0]))).diagonal().tolist()
        [5.0, 2.0, 1.0]
    """
    values, vectors = _eigh(g)
    return ((vectors * values.flip(0)) @ vectors.T).to(g.dtype)


@checked
def geometry_gaussian(
    g: Tensor,
    n: int = 10_000,
    *,
    flip: bool = False,
    input_shape: Sequence[int] | None = None,
    labels: Labels = "01",
    seed: Seed = 0,
) -> Dataset:
    """x ~ N(0, G/||G||_2), or with `flip` N(0, flip(G)/||G||_2); labels are balanced and independent of x.

    `g` [D, D] is symmetric positive semi-definite, e.g. an average geometry; the covariance used has spectral norm 1.
    `input_shape` reshapes the D features.

    Example:
        >>> d = geometry_gaussian(torch.eye(16), 8, input_shape=(1, 4, 4), seed=0)
        >>> d.x.shape, int(d.y.sum())
        (torch.Size([8, 1, 4, 4]), 4)
    """
    values, vectors = _eigh(g)
    top = float(values[-1])
    if not top > 0 or float(values[0]) < -1e-5 * top:
        raise InputError(
            f"G must be positive semi-definite: its eigenvalues run from {float(values[0]):.3g} to {top:.3g}"
        )
    shape = (len(g),) if input_shape is None else tuple(input_shape)
    if math.prod(shape) != len(g):
        raise InputError(f"input_shape {shape} has {math.prod(shape)} features, G has {len(g)}")
    scale = (values.clamp_min(0) / top).sqrt()
    root = (vectors * (scale.flip(0) if flip else scale)).to(g.dtype)
    signs = alternating_signs(n)
    x = torch.randn(n, len(g), generator=generator(seed), dtype=g.dtype) @ root.T
    name = "flipped-geometry-gaussian" if flip else "geometry-gaussian"
    info = {"spectral_norm": 1.0, "trace": float(values.sum()) / top, "flip": flip}
    return Dataset(x.view(n, *shape), as_labels(signs, labels), name, seed_of(seed), info)
