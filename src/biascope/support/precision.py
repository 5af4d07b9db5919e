"""Precision of the arithmetic inside a computation.

torch has two ways to say how float32 is multiplied: `set_float32_matmul_precision` and `allow_tf32`, and since 2.9 a
`fp32_precision` for every operation, which "none" lets inherit. Where somebody used the second, questions in terms of
the first raise. So both are kept as they are, set so that they agree, and put back. One thing cannot be: before anybody
sets it, the precision of convolutions is tf32 but follows `torch.backends.fp32_precision`; afterwards, as after torch's
own `cudnn.flags`, it is tf32 until somebody says otherwise of convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

# what torch.backends' attributes `fp32_precision` and `allow_tf32` call, without 1 us each on the way
C: Any = torch._C
ON_GPU = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
ON_CPU = (("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
PLACES = ON_GPU + ON_CPU  # who is inherited from comes first
Precision = Literal["float32", "float64", "tf32", "bf16"]


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Allow tf32 in products and convolutions on a GPU only if asked for; put the settings back after.

    cuDNN uses tf32 for float32 convolutions by default, which would cost three digits unasked. An autocast around the
    call, which would cost five or six, does not reach inside; one inside the network is part of the network.
    """
    fast = precision in {"tf32", "bf16"}
    values = ("tf32" if fast else "ieee",) * len(ON_GPU) + ("ieee",) * len(ON_CPU)
    before = _Settings.now()
    try:
        _Settings(values, "high" if fast else "highest", fast).put()
        with without_autocast():
            yield
    finally:
        before.put()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Full precision where an autocast is on; for functions that measure, which may be called in a training step."""
    with ExitStack() as off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        yield


def convolves_in_tf32() -> bool:
    """Does cuDNN use tf32 for float32 convolutions now?"""
    return bool(C._get_fp32_precision_getter("cuda", "conv") == "tf32")


def multiplies_in_tf32() -> bool:
    """Does cuBLAS use tf32 for float32 products now?"""
    return bool(C._get_fp32_precision_getter("cuda", "matmul") == "tf32")


@contextmanager
def without_cudnn() -> Iterator[None]:
    """torch's own kernels instead of cuDNN's for a moment; `cudnn.flags` would change the precision too."""
    before = C._get_cudnn_enabled()
    C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        C._set_cudnn_enabled(before)


@dataclass(frozen=True)
class _Settings:
    values: tuple[str, ...]  # of `PLACES`; "none" where they inherit
    matmul: str
    cudnn: bool

    @staticmethod
    def now() -> _Settings:
        """What is set; nothing is, afterwards: a place shows what it says itself when those above it say nothing."""
        shown, values = [C._get_fp32_precision_getter(*place) for place in PLACES], []
        for place, value in zip(PLACES, shown):
            own = C._get_fp32_precision_getter(*place)
            values.append(own if own == value else "none")
            C._set_fp32_precision_setter(*place, "none")
        matmul = torch.get_float32_matmul_precision()  # it only raises where the new way says tf32
        for operation in ("conv", "rnn"):
            C._set_fp32_precision_setter("cuda", operation, "tf32")
        try:
            allowed = bool(C._get_cudnn_allow_tf32())
        except RuntimeError:  # the old way says that it is not
            allowed = False
        return _Settings(tuple(values), matmul, allowed)

    def put(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        C._set_cudnn_allow_tf32(self.cudnn)
        for place, value in zip(PLACES, self.values):
            C._set_fp32_precision_setter(*place, value)
