"""Alignment of kernels with labels and with each other (CKA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from biascope.errors import InputError
from biascope.kernels.spectrum import centre

if TYPE_CHECKING:
    from biascope.kernels.kernel import Kernel


def targets(y: Tensor, n: int, outputs: int) -> Tensor:
    """Labels as float64 targets [n, d]: class indices become one-hot with `outputs` columns (d >= 2), or signs stay."""
    if y.shape[0] != n:
        raise InputError(f"y has {y.shape[0]} labels for {n} examples")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise InputError("y has a NaN or infinity")
    if y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool and outputs != 1:
        if int(y.min()) < 0 or int(y.max()) >= outputs:
            raise InputError(
                f"y has class {int(y.max())} (smallest {int(y.min())}), but the model has {outputs} outputs"
            )
        return torch.nn.functional.one_hot(y.long(), outputs).double()
    return y.double().reshape(n, -1)


def label_vector(K: Kernel, y: Tensor) -> Tensor:
    """Labels as a vector in the space the kernel's matrix acts on: [n * c] for "full", [n] otherwise."""
    n = K.n[0]
    if K.mode == "full":
        c = K.values.shape[0]
        t = targets(y, n, c)
        if t.shape[1] != c:
            raise InputError(f"y has {t.shape[1]} columns, the kernel {c} outputs; give class indices [n] or [n, {c}]")
        return t.flatten()
    t = targets(y, n, 1)
    if t.shape[1] != 1:
        raise InputError(f"this kernel acts on one value per example; y has shape {list(y.shape)}")
    return t[:, 0]


def alignment(K: Kernel, other: Tensor | Kernel, centred: str | bool) -> float:
    """<K_c, L_c> / (||K_c|| ||L_c||), L the other kernel or the labels' Gram matrix."""
    K._square("alignment")
    Kc = centre(K.values.double(), K.mode, str(centred)) if centred else K.values.double()
    if isinstance(other, Tensor):
        return _with_labels(K, Kc, other, centred)
    if other.values.shape != K.values.shape:
        raise InputError(f"kernels of different shapes: {list(K.tensor.shape)} and {list(other.tensor.shape)}")
    other._square("alignment")
    Lc = centre(other.values.double(), other.mode, str(centred)) if centred else other.values.double()
    return float((Kc * Lc).sum() / (Kc.norm() * Lc.norm()))


def _with_labels(K: Kernel, Kc: Tensor, y: Tensor, centred: str | bool) -> float:
    n = K.n[0]
    if K.mode == "full":
        Y = label_vector(K, y).to(Kc.device).view(n, -1)
        if centred == "per-output":
            Y = Y - Y.mean(0)
        elif centred:
            Y = Y - Y.mean()
        v = Y.mT.reshape(-1)  # the kernel's values are output-major
        M = Kc.reshape(len(v), len(v))
        return float(v @ M @ v / (Kc.norm() * v.square().sum()))
    Y = targets(y, n, int(y.max()) + 1 if not y.is_floating_point() and y.dim() == 1 else 1).to(Kc.device)
    Y = Y - Y.mean(0) if centred else Y
    L = Y @ Y.mT
    Ks = Kc if K.mode == "diagonal" else Kc[None]
    return float(sum((k * L).sum() for k in Ks) / (Kc.norm() * L.norm() * len(Ks) ** 0.5))
