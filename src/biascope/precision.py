"""Precision of the arithmetic inside a computation, and the error it makes, measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Allow tf32 in products and convolutions only if asked for; restore the settings after.

    cuDNN uses tf32 for float32 convolutions by default, which would cost three digits unasked.
    """
    fast = precision in {"tf32", "bf16"}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=torch.backends.cudnn.deterministic,
            allow_tf32=fast,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
