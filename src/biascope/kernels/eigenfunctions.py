"""Eigenfunctions of a kernel as tasks, how the kernel turns towards a task, and their frequencies in one dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope.arguments import check_tensor
from biascope.errors import InputError
from biascope.functional import ParamSelection, functional
from biascope.jacobian import Jacobian
from biascope.kernels.kernel import Kernel
from biascope.kernels.pullback import Stream, group_size, pull_back
from biascope.kernels.spectrum import Spectrum
from biascope.precision import arithmetic
from biascope.signatures import checked
from biascope.tables import one_line


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
    size = len(K.vectors) if isinstance(K, Spectrum) else len(K.matrix())
    held = K.vectors.shape[1] if isinstance(K, Spectrum) else size
    if not wanted or min(wanted) < 0 or max(wanted) >= held:
        raise InputError(f"index={index}: eigenfunctions 0 to {held - 1} are there")
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
    norm = check_tensor(vectors, "vectors", dims=(1, 2), floating=True).norm(dim=0)
    if not bool(((norm > 0) & norm.isfinite()).all()):
        raise InputError("a vector that is zero or not finite has no overlap with its signs")
    overlap: Tensor = vectors.abs().sum(0) / (norm * len(vectors) ** 0.5)
    return overlap


@checked
def target_alignments(
    model: nn.Module,
    x: Any,
    targets: Tensor,
    normalize: bool = True,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    *,
    precision: str = "float32",
    batch_size: int | None = None,
) -> Tensor:
    """alpha of many targets at once without a Gram matrix: ||J^T y_j||^2, [k] in float64.

    Args:
        model: any nn.Module whose examples do not mix.
        x: the n examples: tensor, dict or re-iterable of batches in a fixed order.
        targets: [n, k] for a model with one output; otherwise [n * c, k], examples major as eigenvectors of K.
        normalize: divide by ||y_j||^2, so that an eigenvector of K gives its eigenvalue; otherwise by n^2, the papers'
            alpha under the empirical measure.
        params: which parameters to differentiate.
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64"; sums are in float64.
        batch_size: split larger batches into pieces of this size.

    Example:
        >>> target_alignments(nn.Linear(1, 1, bias=False), torch.ones(4, 1), torch.ones(4, 1))
        tensor([4.], dtype=torch.float64)
    """
    f = functional(model, params, output, precision)
    stream = Stream(f, x, batch_size).survey()
    if stream.shuffles:
        raise InputError("x is a DataLoader that shuffles, so the targets do not belong to it; switch shuffling off")
    n, c = stream.n, stream.outputs
    if targets.dim() != 2 or len(targets) != n * c or targets.shape[1] == 0 or targets.is_complex():
        raise InputError(f"targets has shape {list(targets.shape)}; {n} examples and {c} outputs need [{n * c}, k]")
    if not bool(torch.isfinite(targets).all()):
        raise InputError("targets has a NaN or infinity")
    empty = ~targets.any(0)
    if bool(empty.any()):
        raise InputError(f"target {int(empty.nonzero()[0])} is zero on all examples")
    k = targets.shape[1]
    rows = targets.detach().mT.reshape(k, n, c)
    size = group_size(f, k)
    found = []
    with arithmetic(precision):
        for start in range(0, k, size):
            group = rows[start : start + size]

            def cotangents(s: slice, _: Tensor | None, group: Tensor = group) -> Iterator[Tensor]:
                yield from group[:, s]

            found.append(pull_back(stream, len(group), cotangents).square().sum(1))
    alpha = torch.cat(found)
    scale = rows.to(alpha).square().sum((1, 2)) if normalize else float(n) ** 2
    return alpha / scale


@dataclass(frozen=True)
class Rotation:
    """How a kernel turned: gains [k] of the targets' alignment relative to the median gain, and the alignments."""

    gains: Tensor
    before: Tensor
    after: Tensor
    median_gain: float
    __repr__ = one_line


@checked
def rotation_gain(
    before: nn.Module,
    after: nn.Module,
    x: Any,
    targets: Tensor | Spectrum,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    *,
    precision: str = "float32",
    batch_size: int | None = None,
) -> Rotation:
    """g_j = [alpha_after(phi_j) / alpha_before(phi_j)] / median over j, for eigenfunctions of the initial kernel.

    Training on phi_k makes g_k stand out; the median takes the general growth of the gradients out. Targets whose
    initial alignment is rounding (up to 10 eps of the largest, eps of the less precise of targets and weights) are
    refused by name: their gain is noise, and would move the median.

    Args:
        before: the network with its initial weights.
        after: the same network with other weights (a copy).
        x: the examples the eigenfunctions are given on.
        targets: eigenfunctions [N, k], or the spectrum of the initial kernel.
        params: which parameters to differentiate.
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        batch_size: split larger batches into pieces of this size.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> rotation_gain(net, net, torch.randn(5, 2), torch.randn(5, 3)).gains.tolist()
        [1.0, 1.0, 1.0]
    """
    if isinstance(targets, Spectrum):
        targets.refuse_unresolved()
    columns = targets.vectors if isinstance(targets, Spectrum) else targets
    a, b = (
        target_alignments(m, x, columns, True, params, output, precision=precision, batch_size=batch_size)
        for m in (before, after)
    )
    floor = 10 * _coarsest(before, columns, precision) * float(a.max())
    if not bool((a > floor).all()):
        bad = int((a <= floor).nonzero()[0])
        raise InputError(
            f"target {bad} has no alignment with the initial kernel ({float(a[bad]):.1e}, the largest is "
            f"{float(a.max()):.1e}; up to {floor:.1e} is rounding): its gain is not defined, leave it out"
        )
    ratio = b / a
    median = float(ratio.quantile(0.5))
    if not median > 0:
        raise InputError("the other weights give a kernel that is zero on most targets: no gain can be told")
    return Rotation(ratio / median, a, b, median)


def _coarsest(model: nn.Module, columns: Tensor, precision: str) -> float:
    """The larger eps of the targets and of the arithmetic."""
    used = functional(model, precision=precision).dtype
    return max(torch.finfo(t).eps for t in (used, columns.dtype) if t.is_floating_point)


@checked
def centred_prediction(
    model: nn.Module,
    x: Any,
    displacement: dict[str, Tensor] | Tensor,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    *,
    precision: str = "float32",
) -> Tensor:
    """The centred linear model of a kernel swap, J(x; theta*) (theta - theta_0) [n, c]: zero at zero displacement.

    `model` carries the weights theta* whose kernel is tried; theta_0 is only the origin of the displacement (the
    printed formula reads as if the kernel were taken there). Its training curve is `gradient_flow(ntk(model, x), y, t)`
    with no f0, and `steps_to_loss` compares kernels.

    Example:
        >>> centred_prediction(nn.Linear(2, 1), torch.ones(3, 2), torch.zeros(3)).abs().sum().item()
        0.0
    """
    out: Tensor = Jacobian(model, x, params, output, precision) @ displacement
    return out


@checked
def fourier_power(vectors: Tensor) -> Tensor:
    """Share of every frequency in the energy of vectors [n, k] (or [n]) on a uniform grid: [n // 2 + 1, k].

    Frequency j counts periods over the grid; the shares of a column add up to 1.

    Example:
        >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(16) / 16)
        >>> int(fourier_power(wave).argmax())
        3
    """
    if vectors.dim() not in (1, 2) or len(vectors) < 2 or vectors.numel() == 0 or vectors.is_complex():
        got = f"{vectors.dtype} {list(vectors.shape)}"
        raise InputError(f"real vectors on a grid [n] or [n, k] with n >= 2 are needed, not {got}")
    n = len(vectors)
    power: Tensor = torch.fft.rfft(vectors.double(), dim=0).abs().square()
    power[1 : (n + 1) // 2] *= 2  # these stand for a pair of conjugate frequencies
    total = power.sum(0)
    if not bool(((total > 0) & total.isfinite()).all()):
        raise InputError("a vector that is zero or not finite has no frequency")
    return power / total


@checked
def dominant_frequency(vectors: Tensor) -> Tensor:
    """The frequency with the largest share for each of the vectors [n, k] (or [n]): [k] whole numbers of periods.

    Example:
        >>> dominant_frequency(torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -1.0]]))
        tensor([0, 2])
    """
    return fourier_power(vectors).argmax(0)
