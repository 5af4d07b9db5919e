"""A frequency for any data: the eigenvectors of a Gaussian kernel matrix, largest eigenvalue first."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.support.limits import FiniteTensor, Positive
from biascope.support.signatures import checked
from biascope.support.tables import facts, several


@dataclass(frozen=True)
class RBFBasis:
    """Eigenvectors of K_ij = exp(-|x_i - x_j|^2 / width^2); the index n = 1, 2, ... stands for frequency.

    Attributes:
        values: eigenvalues [n], largest first (the appendix says increasing; its figures are as here).
        vectors: [n, n], column j - 1 is the eigenvector phi_j on the samples.
        width: sigma of the kernel.
    """

    values: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)
    width: float

    def _repr_html_(self) -> str:
        """The head of the spectrum, for notebooks."""
        rows = {"samples": len(self.values), "width": self.width, "leading eigenvalues": several(self.values)}
        return facts("Eigenbasis of a Gaussian kernel", rows)

    @checked
    def spectrum(self, f: Tensor) -> Tensor:
        """f~[n] = phi_n . f of values on the samples f [..., n]."""
        return f.to(self.vectors) @ self.vectors

    @checked
    def noise(self, gamma: float = 2.0) -> Tensor:
        """psi_gamma = sum_n (n / N)^gamma phi_n on the samples, [N]: more of it in higher eigenvectors."""
        n = len(self.values)
        weights = (torch.arange(1, n + 1, dtype=self.vectors.dtype, device=self.vectors.device) / n) ** gamma
        return self.vectors @ weights


@checked
def rbf_eigenbasis(x: FiniteTensor, width: Positive) -> RBFBasis:
    """Eigenbasis of the Gaussian kernel exp(-r^2 / width^2) (no factor 2) on samples x [n, ...], in float64.

    Eigenvalues below rounding (about 1e-16 of the first) have arbitrary eigenvectors; take a smaller width then. The
    sign of each vector is fixed: its largest entry is positive.

    Example:
        >>> basis = rbf_eigenbasis(torch.linspace(0, 1, 50)[:, None], width=0.05)
        >>> [int((basis.vectors[1:, n] * basis.vectors[:-1, n] < 0).sum()) for n in (0, 1, 49)]
        [0, 1, 49]
    """
    flat = x.detach().reshape(len(x), -1).double()
    # not by |x|^2 + |y|^2 - 2 x.y, which cancels where the samples are far from the origin
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    kernel = torch.exp(-(distances / width).square())
    values, vectors = torch.linalg.eigh(kernel)
    values, vectors = values.flip(0), vectors.flip(1)
    peak = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return RBFBasis(values, vectors * peak.sign(), float(width))
