"""Seeded probe vectors: the same seed gives the same numbers on every device and in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from biascope.arguments import as_whole, check_count
from biascope.errors import InputError
from biascope.linalg.operator import LinearOperator, need_operator

Probes = Literal["rademacher", "gaussian"]


def generator_from(seed: int) -> torch.Generator:
    """A CPU generator; the global state is never touched.

    Example:
        >>> generator_from(3).initial_seed()
        3
    """
    return torch.Generator().manual_seed(as_whole(seed, "seed"))


def draw(n: int, k: int, like: LinearOperator, generator: torch.Generator, kind: str = "gaussian") -> Tensor:
    """A block [n, k] of probes of mean 0 and variance 1, in the dtype and on the device of an operator.

    Drawn on the CPU in float32 and then converted, so that dtype and device do not change the numbers.

    Example:
        >>> from biascope.linalg import Identity
        >>> draw(4, 2, Identity(4), generator_from(0), "rademacher").abs().sum().item()
        8.0
    """
    n, k = check_count(n, "n", least=0), check_count(k, "k", least=0)
    need_operator(like)
    if kind == "rademacher":
        block = torch.randint(0, 2, (k, n), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
    elif kind == "gaussian":
        block = torch.randn(k, n, generator=generator, dtype=torch.float32, device="cpu")
    else:
        raise InputError(f"probes must be 'rademacher' or 'gaussian', not {kind!r}")
    return block.T.to(like.device, like.dtype).contiguous()


def check_probes(samples: int, seed: int, kind: str, block: int = 1) -> tuple[int, int]:
    """The numbers of probes in all and at a time; refused before any product, also where none is drawn in the end.

    Example:
        >>> check_probes(8, 0, "gauss")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: probes must be 'rademacher' or 'gaussian', not 'gauss'
    """
    if as_whole(samples, "samples") < 1:
        raise InputError(f"at least one sample is needed, not {samples}")
    as_whole(seed, "seed")
    if kind not in ("rademacher", "gaussian"):
        raise InputError(f"probes must be 'rademacher' or 'gaussian', not {kind!r}")
    return as_whole(samples, "samples"), check_count(block, "block")


def blocks_of_probes(A: LinearOperator, samples: int, seed: int, kind: str, block: int) -> Iterator[Tensor]:
    """`samples` probes [n, <= block] at a time; the numbers do not depend on `block`."""
    samples, block = check_probes(samples, seed, kind, block)
    generator = generator_from(seed)
    for start in range(0, samples, block):
        width = min(block, samples - start)
        columns = [draw(A.shape[1], 1, A, generator, kind) for _ in range(width)]
        yield torch.cat(columns, dim=1)
