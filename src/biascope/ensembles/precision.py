"""Precision of the arithmetic of networks that are run by the thousand on a GPU, for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from biascope.support.errors import UnsupportedError
from biascope.support.precision import arithmetic as full_or_tf32
from biascope.support.signatures import checked

Precision = Literal["float32", "tf32", "fp16", "bf16"]
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@checked
@contextmanager
def arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """Full float32, tf32, fp16 or bf16 arithmetic on CUDA for a moment; the user's settings are put back after.

    tf32 and fp16 round to 11 bits, bf16 to 8; fp16 is as fast as bf16 but overflows above 65,504 (to infinity, which
    callers see). On the CPU there is float32 alone.

    Example:
        >>> with arithmetic(torch.device("cpu"), "float32"):
        ...     (torch.ones(1, 2) @ torch.ones(2, 1)).item()
        2.0
    """
    if device.type != "cuda" and precision != "float32":
        raise UnsupportedError(f"precision={precision!r} is for CUDA devices; on {device.type} use 'float32'")
    if device.type != "cuda":
        with full_or_tf32("float32"):
            yield
        return
    half = torch.autocast("cuda", HALF.get(precision), enabled=precision in HALF, cache_enabled=False)
    with full_or_tf32("float32" if precision == "float32" else "tf32"), half:
        yield
