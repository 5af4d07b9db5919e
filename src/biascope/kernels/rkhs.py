"""How complex a target is for a kernel: its RKHS norm, the bound that needs no inverse, and what follows for errors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.kernels.kernel import Kernel
from biascope.kernels.system import symmetric_matrix, system
from biascope.support.arguments import check_number
from biascope.support.errors import InputError
from biascope.support.signatures import checked
from biascope.support.tables import facts

NEGLIGIBLE = 1e-3  # of the squared norm


@dataclass(frozen=True)
class RKHSNorm:
    """Squared norm of the shortest function in the kernel's space that takes the values y on the examples.

    Attributes:
        squared: y^T K^+ y; equals ||theta - theta_0||^2 of the shortest weight change that interpolates y.
        lower_bound: (y^T y)^2 / y^T K y = ||f||_2^4 / alpha(f) <= squared; equal for a single eigenfunction.
        alpha: y^T K y / n^2.
        condition: largest over smallest eigenvalue used; relative errors of K are amplified by up to this in `squared`.
        rank: eigenvalues used.
        outside: share of y's energy on eigenvectors with eigenvalue zero (up to rounding), which no function of the
            space reaches: the true norm is infinite if this is not rounding itself.
        reached: whether `outside` is rounding: with eigenvalues at the cutoff it would add at most 1e-3 of `squared`.
            If not, `squared` is the norm of the part that is reached, and the norm of y itself is infinite, or the
            kernel is not precise enough to tell.
    """

    squared: float
    lower_bound: float
    alpha: float
    condition: float
    rank: int
    outside: float
    reached: bool = True

    @property
    def value(self) -> float:
        """The norm itself."""
        return math.sqrt(self.squared)

    def _repr_html_(self) -> str:
        """The norm and what bounds it, for notebooks."""
        rows = {"norm": self.value, "squared": self.squared, "lower bound of it": self.lower_bound, "alpha": self.alpha}
        rows |= {"rank": self.rank, "condition": self.condition, "outside": self.outside, "reached": self.reached}
        return facts("Norm in the kernel's space", rows)


@checked
def rkhs_norm(K: Kernel | Tensor, y: Tensor, cutoff: float | None = None) -> RKHSNorm:
    """RKHS norm of targets on the sample, with everything needed to judge whether it can be trusted.

    Several columns are added up.

    Args:
        K: kernel K(x, x), [n, n] or full.
        y: targets as for `kernel_regression`.
        cutoff: eigenvalues up to cutoff times the largest count as zero (default: rounding).

    Example:
        >>> import torch
        >>> rkhs_norm(torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([2.0, 0.0])).squared
        1.0
    """
    sys = system(K, cutoff)
    energy = (sys.vectors.mT @ sys.columns(y)).square().sum(1)
    total = float(energy.sum())
    kept = sys.kept
    top = float((sys.values * energy).sum())
    squared, left = float((energy[kept] / sys.values[kept]).sum()), float(energy[~kept].sum())
    floor = max(sys.cutoff, len(kept) * torch.finfo(torch.float64).eps * float(sys.values[0]))
    return RKHSNorm(
        squared=squared,
        lower_bound=total**2 / top if top > 0 else math.inf if total > 0 else 0.0,
        alpha=top / sys.n**2,
        condition=sys.condition,
        rank=int(kept.sum()),
        outside=left / total if total > 0 else 0.0,
        reached=left <= NEGLIGIBLE * squared * floor,
    )


@checked
def generalization_bound(K: Kernel | Tensor, y: Tensor | None = None, norm_squared: float | None = None) -> float:
    """sqrt(||f||_k^2 mean k(x, x) / n), the complexity term of R(f) <= R_hat(f) + O(this).

    It equals (B / n) sqrt(tr K), the Rademacher bound of the ball of radius B = ||f||_k. The constant in O() depends on
    the loss. The norm is that of the targets y unless given; it is infinite, and so is the bound, where y has more than
    rounding on eigenvectors with eigenvalue zero (`RKHSNorm.reached`). In float32 that is often all that can be said of
    labels: compute the kernel in float64, or bound a function in the space by its own `norm_squared`.

    Args:
        K: kernel K(x, x), [n, n] or full.
        y: targets as for `kernel_regression`.
        norm_squared: ||f||_k^2, instead of y.
    """
    if (y is None) == (norm_squared is None):
        raise InputError("give either y or norm_squared")
    if y is not None:
        norm = rkhs_norm(K, y)
        squared = norm.squared if norm.reached else math.inf
    else:
        squared = check_number(norm_squared, "norm_squared", least=0)
    M, n, _ = symmetric_matrix(K)
    diagonal = M.diagonal().double()
    if not float(diagonal.min()) >= 0:
        raise InputError(f"the kernel has {float(diagonal.min()):.3g} on its diagonal, where k(x, x) >= 0 stands")
    return math.sqrt(squared * float(diagonal.sum())) / n
