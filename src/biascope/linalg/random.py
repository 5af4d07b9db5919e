"""Seeded probe vectors: the same seed gives the same numbers on every device and in every dtype."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator
from biascope.linalg.spread import own
from biascope.support.arguments import as_whole

Probes = Literal["rademacher", "gaussian"]


def generator_from(seed: int) -> torch.Generator:
    """A CPU generator; the global state is never touched."""
    return torch.Generator().manual_seed(as_whole(seed, "seed"))


def draw(n: int, k: int, like: LinearOperator, generator: torch.Generator, kind: Probes = "gaussian") -> Tensor:
    """A block [n, k] of probes of mean 0 and variance 1, in the dtype and on the device of an operator.

    Drawn on the CPU in float32 and then converted, so that dtype and device do not change the numbers.
    """
    if kind == "rademacher":
        block = torch.randint(0, 2, (k, n), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
    else:
        block = torch.randn(k, n, generator=generator, dtype=torch.float32, device="cpu")
    return own(like, block.T).to(like.device, like.dtype).contiguous()


def blocks_of_probes(A: LinearOperator, samples: int, seed: int, kind: Probes, block: int) -> Iterator[Tensor]:
    """`samples` probes [n, <= block] at a time; the numbers do not depend on `block`."""
    generator = generator_from(seed)
    for start in range(0, samples, block):
        width = min(block, samples - start)
        yield torch.cat([draw(A.shape[1], 1, A, generator, kind) for _ in range(width)], dim=1)
