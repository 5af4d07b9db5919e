"""Labels as targets of a kernel, and the alignment of kernels with labels and with each other (CKA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from biascope.kernels.spectrum import Centring, centre
from biascope.support.arguments import check_finite, check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked

if TYPE_CHECKING:
    from biascope.kernels.kernel import Kernel


def targets(y: Tensor, n: int, outputs: int | None) -> Tensor:
    """Labels as float64 targets [n, d].

    Booleans and floats are values, but for whole ones, one per example, where there are several outputs: those and
    integers [n] are class indices and become one-hot, unless they are all -1 or +1 (signs) or the model has one output
    (values). `outputs` is the number of outputs, None if the kernel has none of its own ([n, n]) and the model has
    several, or it is not known how many: then there are as many classes as the largest index says.
    """
    if check_tensor(y, "y").dim() == 0 or len(y) != n:
        raise InputError(f"y has {len(y) if y.dim() else 'no'} labels for {n} examples")
    whole = not check_finite(y, "y").is_floating_point() and y.dtype != torch.bool
    if outputs not in (None, 1) and y.numel() == n and bool((y == y.long()).all()):
        y, whole = y.reshape(n).long(), True
    signs = whole and bool((y.abs() == 1).all()) and bool(y.min() == -1)
    if outputs is None and y.dim() == 2 and y.shape[1] == 1 and whole and not signs:
        y = y[:, 0]  # classes in a column
    if signs and outputs not in (None, 1) and y.dim() == 1:
        raise InputError(f"y holds -1 and 1, values of one output: as classes of {outputs} pass (y > 0).long()")
    if not whole or y.dim() > 1 or outputs == 1 or signs:
        return y.double().reshape(n, -1)
    low, high = int(y.min()), int(y.max())
    last = high if outputs is None else outputs - 1
    if low < 0 or high > last:
        raise InputError(f"y has classes {low} to {high}, but the model has outputs 0 to {last}")
    return torch.nn.functional.one_hot(y.long(), last + 1).double()


def kernel_targets(y: Tensor, n: int, outputs: int | None, one_output: bool) -> Tensor:
    """Targets [n, d] of a kernel [n, n] (`outputs` None), or [n, outputs] of one with outputs of its own."""
    t = targets(y, n, outputs or (1 if one_output else None))
    if outputs is not None and (d := t.shape[1]) != outputs:
        places = outputs % d == 0 < d and not y.is_floating_point()  # of pixels, tokens
        fix = (
            f", for a class per place one_hot(y, {outputs // d}).movedim(-1, 1).flatten(1)" if places and d > 1 else ""
        )
        raise InputError(f"y has {d} columns for {outputs} outputs; give class indices [n] or [n, {outputs}]{fix}")
    return t


def targets_of(K: Kernel, y: Tensor) -> Tensor:
    """`kernel_targets` of labels y, on the kernel's device."""
    outputs = None if K.mode == "trace" else K.values.shape[0]
    return kernel_targets(y, K.n[0], outputs, K.model_outputs == 1).to(K.values.device)


def alignment(K: Kernel, other: Tensor | Kernel, centred: Centring | bool) -> float:
    """<K_c, L_c> / (||K_c|| ||L_c||), L the other kernel or the labels' Gram matrix.

    Labels of a "full" kernel are one vector of length n * c, so L = y y^T has rank 1 and the alignment is
    y_c^T K_c y_c / (||K_c|| ||y_c||^2); a "diagonal" kernel is the full one with zeros between outputs. A kernel [n, n]
    is compared with L = Y Y^T, summed over the columns of Y [n, d].
    """
    K._square("alignment")
    kind = centring(centred)
    Kc = centre(K.values.double(), K.mode, kind) if kind else K.values.double()
    if isinstance(other, Tensor):
        return _with_labels(K, Kc, other, kind)
    if other.values.shape != K.values.shape:
        raise InputError(f"kernels of different shapes: {list(K.tensor.shape)} and {list(other.tensor.shape)}")
    other._square("alignment")
    Lc = centre(other.values.double(), other.mode, kind) if kind else other.values.double()
    return _ratio((Kc * Lc.to(Kc.device)).sum(), _norm(K, Kc, kind), _norm(other, Lc, kind))


@checked
def centring(centred: Centring | bool) -> str:
    """The name of a centring: "per-output", "global", or "" for none."""
    return centred if isinstance(centred, str) else "per-output" if centred else ""


def centre_targets(Y: Tensor, kind: str) -> Tensor:
    """Centre targets [n, d] as the kernel is centred: over examples for every column, or over all entries."""
    if not kind:
        return Y
    return Y - (Y.mean(0) if kind == "per-output" else Y.mean())


def _with_labels(K: Kernel, Kc: Tensor, y: Tensor, kind: str) -> float:
    raw = targets_of(K, y)
    if K.mode == "trace":  # one value per example: both centrings are over examples, column by column
        Y = centre_targets(raw, "per-output" if kind else "")
        return _ratio((Y * (Kc @ Y)).sum(), _norm(K, Kc, kind), _label_norm(Y.mT @ Y, raw))
    Y = centre_targets(raw, kind).mT  # [c, n]; the kernel's values are output-major
    if K.mode == "full":
        v = Y.reshape(-1)
        top = v @ (Kc.reshape(len(v), len(v)) @ v)
    else:
        top = (Y * (Kc @ Y[..., None])[..., 0]).sum()
    return _ratio(top, _norm(K, Kc, kind), _label_norm(Y.square().sum()[None, None], raw))


def _norm(K: Kernel, Kc: Tensor, kind: str) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(Kc)
    eps = torch.finfo(K.values.dtype).eps
    if not norm > 10 * eps * torch.linalg.vector_norm(K.values.double()):
        what = "is zero after centring: all examples have the same tangent features" if kind else "is zero"
        raise InputError(f"a kernel {what}; it has no alignment")
    return norm


def _label_norm(G: Tensor, raw: Tensor) -> Tensor:
    """Norm of the centred labels' Gram matrix; what rounding leaves of equal labels is refused."""
    norm: Tensor = torch.linalg.matrix_norm(G)
    rounding = 100 * torch.finfo(raw.dtype).eps
    if not norm > rounding**2 * raw.square().sum():
        raise InputError("all labels are equal: after centring nothing is left to align with")
    return norm


def _ratio(top: Tensor, one: Tensor, two: Tensor) -> float:
    return min(max(float(top / (one * two.to(one))), -1.0), 1.0)  # rounding must not leave [-1, 1]
