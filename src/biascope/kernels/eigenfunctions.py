"""Eigenfunctions of a kernel: as tasks, at new points (Nystrom), their frequencies, and where they live."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.kernels.kernel import Kernel
from biascope.kernels.spectrum import Spectrum
from biascope.kernels.system import as_matrix, check_columns
from biascope.support.arguments import check_between, check_finite, check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked
from biascope.support.tables import one_line


@checked
def eigenfunction_targets(K: Kernel | Spectrum, index: int | Sequence[int], binarize: bool = True) -> Tensor:
    """Eigenfunctions of the kernel as targets on its own examples, [N], or [N, m] for several.

    Args:
        K: a symmetric kernel, or its spectrum. N = n, or n * c (examples major) for a full kernel.
        index: 0 is the largest eigenvalue. Refused where the eigenpair is not resolved (see `Spectrum.resolved`).
        binarize: labels sign(phi) in {-1, +1} (zero counts as +1); otherwise phi itself, with mean square 1.

    Example:
        >>> K = Kernel(torch.diag(torch.tensor([3.0, 2.0])), "trace", "trace", symmetric=True)
        >>> eigenfunction_targets(K, 0, binarize=False)
        tensor([1.4142, 0.0000])
    """
    wanted = [index] if isinstance(index, int) else list(index)
    held = K.vectors.shape[1] if isinstance(K, Spectrum) else len(K.matrix())
    for i in wanted:
        check_between(i, "index", 0, held - 1)
    spec = K if isinstance(K, Spectrum) else K.eigh(max(wanted) + 1)
    spec.refuse_unresolved(wanted)
    vectors = spec.vectors[:, wanted]
    vectors = vectors / vectors.square().mean(0).sqrt()
    chosen = torch.where(vectors < 0, -1.0, 1.0).to(vectors) if binarize else vectors
    return chosen[:, 0] if isinstance(index, int) else chosen


@checked
def binarization_overlap(vectors: Tensor) -> Tensor:
    """<sign(phi) / sqrt(N), phi> for unit phi, columns of [N, k] or [N]: sqrt(2 / pi) = 0.798 for Gaussian entries.

    Example:
        >>> binarization_overlap(torch.tensor([3.0, -4.0]))
        tensor(0.9899)
    """
    check_tensor(vectors, "vectors", dims=(1, 2), floating=True)
    overlap: Tensor = vectors.abs().sum(0) / (vectors.norm(dim=0) * len(vectors) ** 0.5)
    return overlap


@checked
def fourier_power(vectors: Tensor) -> Tensor:
    """Share of every frequency in the energy of vectors [n, k] (or [n]) on a uniform grid: [n // 2 + 1, k].

    Frequency j counts periods over the grid; the shares of a column add up to 1 (NaN for a vector of zeros).

    Example:
        >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(16) / 16)
        >>> int(fourier_power(wave).argmax())
        3
    """
    n = len(check_tensor(vectors, "vectors", dims=(1, 2)))
    power: Tensor = torch.fft.rfft(vectors.double(), dim=0).abs().square()
    power[1 : (n + 1) // 2] *= 2  # these stand for a pair of conjugate frequencies
    return power / power.sum(0)


@checked
def nystrom_extension(K_new: Kernel | Tensor, spectrum: Spectrum) -> Tensor:
    """Eigenfunctions at new points: phi_j(x) = K(x, X) u_j / lambda_j, [N_new, k] in float64.

    On the points of the spectrum itself this gives the eigenvectors back, in their normalisation. A spectrum that was
    normalised gives eigenfunctions of mean square 1 under the empirical measure.

    Args:
        K_new: K(x_new, x): rows are the new points.
        spectrum: of K(x, x), from `K.eigh(k)`.

    Example:
        >>> K = torch.diag(torch.tensor([3.0, 2.0]))
        >>> spec = Spectrum(torch.tensor([3.0, 2.0]), torch.eye(2), torch.zeros(2))
        >>> nystrom_extension(K[:1], spec)
        tensor([[1., 0.]], dtype=torch.float64)
    """
    M = as_matrix(K_new, "K_new")[0].double()
    vectors, values = spectrum.vectors.to(M), spectrum.values.to(M)
    check_columns(M, len(vectors), "K_new")
    floor = len(vectors) * torch.finfo(spectrum.values.dtype).eps * float(values.max())
    if not bool((values > floor).all()):
        bad = int((values <= floor).nonzero()[0])
        raise InputError(f"eigenvalue {bad} is zero up to rounding and has no extension: ask for the top {bad}")
    spectrum.refuse_unresolved()
    values = values * spectrum.n if spectrum.normalized else values
    return M @ vectors / values


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
    if isinstance(K, Kernel) and K.mode == "full":
        raise InputError("local_energy takes one kernel per output: use outputs='diagonal' or an output's index")
    T = check_tensor(K.tensor if isinstance(K, Kernel) else K, "K", dims=(2, 3), floating=True)
    check_finite(T, "the kernel")
    most = min(T.shape[-2:])
    if rank is not None:
        check_between(rank, "rank", 1, most)
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
