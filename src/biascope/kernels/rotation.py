"""How the kernel of a network turns towards a task: alignments of many targets, before and after training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope.kernels.pullback import add_pulled, group_size, no_vectors
from biascope.kernels.spectrum import Spectrum
from biascope.network.functional import ParamSelection, functional
from biascope.network.stream import Cut, Stream
from biascope.support.arguments import check_finite
from biascope.support.errors import InputError
from biascope.support.limits import Count
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked
from biascope.support.tables import one_line


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
    batch_size: Count | None = None,
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
    stream = Stream(f, x, Cut(batch_size, ordered=True))
    n, c = stream.count(), stream.outputs
    if targets.dim() != 2 or len(targets) != n * c or targets.shape[1] == 0:
        raise InputError(f"targets has shape {list(targets.shape)}; {n} examples and {c} outputs need [{n * c}, k]")
    check_finite(targets, "targets")
    k = targets.shape[1]
    rows = targets.detach().mT.reshape(k, n, c)
    size = group_size(f, k)
    found = []
    with arithmetic(precision):
        for start in range(0, k, size):
            group = rows[start : start + size]
            pulled = no_vectors(f, len(group))
            for part in stream.parts():
                add_pulled(pulled, f, part, group[:, part.at])
            found.append(pulled.square().sum(1))
    alpha = torch.cat(found)
    scale = rows.to(alpha).square().sum((1, 2)).clamp_min(torch.finfo(alpha.dtype).tiny)
    return alpha / (scale if normalize else float(n) ** 2)


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
    batch_size: Count | None = None,
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
    used = functional(before, precision=precision).dtype, columns.dtype
    floor = 10 * max(torch.finfo(t).eps for t in used if t.is_floating_point) * float(a.max())
    if not bool((a > floor).all()):
        bad = int((a <= floor).nonzero()[0])
        raise InputError(f"target {bad} has no alignment with the initial kernel (up to {floor:.1e} is rounding)")
    ratio = b / a
    median = float(ratio.quantile(0.5))
    return Rotation(ratio / median, a, b, median)
