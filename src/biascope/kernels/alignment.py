"""Labels as targets of a kernel, and the alignment of kernels with labels and with each other (CKA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.kernels.spectrum import centre

if TYPE_CHECKING:
    from biascope.kernels.kernel import Kernel


def targets(y: Tensor, n: int, outputs: int | None) -> Tensor:
    """Labels as float64 targets [n, d].

    Floats and booleans are values. Integers [n] are class indices and become one-hot, unless they are all -1 or +1
    (signs) or the model has one output (values). `outputs` is the number of outputs, None if the kernel has none of
    its own ([n, n]) and the model has several, or it is not known how many: then there are as many classes as the
    largest index says.
    """
    if not isinstance(y, Tensor):
        raise InputError(f"y must be a tensor of labels [n] or targets [n, d], not {type(y).__name__}")
    if y.dim() == 0 or y.shape[0] != n:
        raise InputError(f"y has {y.shape[0] if y.dim() else 'no'} labels for {n} examples")
    if y.is_complex():
        raise InputError(f"y is {y.dtype}; real labels are needed")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        bad = int((~torch.isfinite(y.reshape(n, -1)).all(1)).nonzero()[0])
        raise InputError(f"y has a NaN or infinity, first for example {bad}")
    column = y.dim() == 2 and y.shape[1] == 1 and y.dtype != torch.bool and not y.is_floating_point()
    if column and outputs != 1 and not bool((y.abs() == 1).all()):
        raise InputError(f"y is a column of integers {list(y.shape)}: pass y[:, 0] for classes, y.double() for values")
    values = y.is_floating_point() or y.dtype == torch.bool or y.dim() > 1 or outputs == 1
    if values or bool((y.abs() == 1).all() & (y.min() == -1)):
        return y.double().reshape(n, -1)
    low, high = int(y.min()), int(y.max())
    if low < 0 or (outputs is not None and high >= outputs):
        wrong = low if low < 0 else high
        allowed = (
            "the classes start at 0" if outputs is None else f"the model has {outputs} outputs, 0 to {outputs - 1}"
        )
        raise InputError(f"y has class {wrong}, but {allowed}")
    return torch.nn.functional.one_hot(y.long(), high + 1 if outputs is None else outputs).double()


def label_columns(K: Kernel, y: Tensor) -> Tensor:
    """Labels [N, d] in the space `K.matrix()` acts on: one column [n * c] for "full", [n, d] otherwise."""
    n = K.n[0]
    if K.mode == "trace":
        return targets(y, n, _one_output(K)).to(K.values.device)
    return _output_targets(K, y).reshape(-1, 1)


def _one_output(K: Kernel) -> int | None:
    """1 for a kernel [n, n] of a model with one output, else None."""
    return 1 if K.model_outputs == 1 else None


def _output_targets(K: Kernel, y: Tensor) -> Tensor:
    """Labels [n, c], one column per output of the kernel."""
    c = K.values.shape[0]
    t = targets(y, K.n[0], c).to(K.values.device)
    if t.shape[1] != c:
        raise InputError(f"y has {t.shape[1]} columns, the kernel {c} outputs; give class indices [n] or [n, {c}]")
    return t


def alignment(K: Kernel, other: Tensor | Kernel, centred: str | bool) -> float:
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


def centring(centred: str | bool) -> str:
    """The name of a centring: "per-output", "global", or "" for none."""
    kind = {True: "per-output", False: "", "": ""}.get(centred, centred)
    if kind not in {"per-output", "global", ""}:
        raise InputError(f"centering {centred!r} is not known; choose 'per-output', 'global' or False")
    return str(kind)


def centre_targets(Y: Tensor, kind: str) -> Tensor:
    """Centre targets [n, d] as the kernel is centred: over examples for every column, or over all entries."""
    if not kind:
        return Y
    return Y - (Y.mean(0) if kind == "per-output" else Y.mean())


def _with_labels(K: Kernel, Kc: Tensor, y: Tensor, kind: str) -> float:
    if K.mode == "trace":  # one value per example: both centrings are over examples, column by column
        raw = targets(y, K.n[0], _one_output(K)).to(Kc.device)
        Y = centre_targets(raw, "per-output" if kind else "")
        return _ratio((Y * (Kc @ Y)).sum(), _norm(K, Kc, kind), _label_norm(Y.mT @ Y, raw))
    raw = _output_targets(K, y)
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
    return float(top / (one * two.to(one)))
