"""Where the eigenfunctions of a kernel live: the local energy of task arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.kernels.kernel import Kernel
from biascope.signatures import checked
from biascope.tables import one_line


@dataclass(frozen=True)
class LocalEnergy:
    """Energy of the eigenfunctions at every point.

    values [m] (or [c, m], one row per output): in [0, 1], total = rank; rank, or one per output; singular_values
    [min(n, m)] (or [c, ...]), descending.
    """

    values: Tensor
    rank: int | tuple[int, ...]
    singular_values: Tensor
    __repr__ = one_line

    @checked
    def split(self, task: int) -> tuple[float, float]:
        """Means over the first `task` points and over the others: 1 and 0 if perfectly localised.

        With n task points in the rows, n task and n control points in the columns and full rank their sum is 1.
        """
        m = self.values.shape[-1]
        if not 0 < task < m:
            raise InputError(f"task={task}: between 1 and {m - 1} of the {m} points must belong to the task")
        return float(self.values[..., :task].mean()), float(self.values[..., task:].mean())


@checked
def local_energy(K: Kernel | Tensor, rank: int | None = None) -> LocalEnergy:
    """E_loc(x_j) = sum of phi(x_j)^2 over the right singular vectors phi of a rectangular kernel K(task, all points).

    Args:
        K: K(x_task, x_all): Kernel or tensor [n, m], or [c, n, m] for one kernel per output ("diagonal").
        rank: how many singular vectors, the largest first; all above rounding if None. Rounding is max(n, m) eps of the
            largest singular value, and the measured error of a Kernel that has one. eps is float32's also for a float64
            kernel whose entries are all float32 numbers: it was computed in float32, a wider type adds no digits. For a
            float64 kernel that is exact in float32 (such as one of integers), say the rank.

    Example:
        >>> local_energy(torch.eye(2, 4)).values
        tensor([1., 1., 0., 0.], dtype=torch.float64)
    """
    if isinstance(K, Kernel):
        if K.mode == "full":
            raise InputError("local_energy takes one kernel per output: use outputs='diagonal' or an output's index")
        T = K.tensor
    else:
        T = K
    if T.dim() not in (2, 3) or 0 in T.shape:
        raise InputError(f"local_energy needs a kernel [n, m] or [c, n, m], not shape {list(T.shape)}")
    if not bool(torch.isfinite(T).all()):
        raise InputError("the kernel has NaN or infinite entries")
    most = min(T.shape[-2:])
    if rank is not None and not 1 <= rank <= most:
        raise InputError(
            f"rank={rank}: a kernel of shape {list(T.shape[-2:])} has between 1 and {most} singular vectors"
        )
    if not T.is_floating_point():
        raise InputError(f"the kernel is {T.dtype}: convert it to float64")
    eps, error = _eps(T), (K.error or 0.0) if isinstance(K, Kernel) and rank is None else 0.0
    energies, ranks, spectra = [], [], []
    for M in T.double() if T.dim() == 3 else T.double()[None]:
        _, s, Vh = torch.linalg.svd(M, full_matrices=False)
        cut = max(max(M.shape) * (eps if rank is None else torch.finfo(T.dtype).eps) * s[0], error * M.norm())
        r = min(rank or most, int((s > cut).sum()))
        energies.append(Vh[:r].square().sum(0))
        ranks.append(r)
        spectra.append(s)
    if T.dim() == 2:
        return LocalEnergy(energies[0], ranks[0], spectra[0])
    return LocalEnergy(torch.stack(energies), tuple(ranks), torch.stack(spectra))


def _eps(T: Tensor) -> float:
    """Of the precision a kernel was computed in: a float64 tensor of float32 numbers alone has float32's."""
    narrow = T.dtype == torch.float64 and torch.equal(T.float().double(), T)
    return torch.finfo(torch.float32 if narrow else T.dtype).eps
