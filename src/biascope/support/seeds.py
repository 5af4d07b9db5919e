"""Seeds by name: every random stream is derived from one number and says what it is for.

`derive(0, "init", 3)` never collides with `derive(0, "data", 3)`, does not depend on the order of calls, and is the
same on every machine, so a resumed job draws exactly what the uninterrupted one would have drawn.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *path: object) -> int:
    """A child seed in [0, 2^63) from a seed and the names of what it is for.

    Example:
        >>> derive(0, "init", 3) == derive(0, "init", 3), derive(0, "init", 3) == derive(0, "init", 4)
        (True, False)
    """
    text = "\x1f".join([str(int(seed)), *(str(part) for part in path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh `torch.Generator` seeded by `derive(seed, *path)`; the global random state is not touched.

    Example:
        >>> torch.randn(2, generator=generator(0, "noise")).shape
        torch.Size([2])
    """
    return torch.Generator(device=device).manual_seed(derive(seed, *path))


@contextmanager
def seeded(seed: int, *devices: torch.device | str | int) -> Iterator[None]:
    """Inside, torch's global generators (of the CPU, and of those devices that are CUDA) start from the seed.

    For what draws from them alone, such as dropout and initialisers; they are put back afterwards.
    """
    cuda = [device for device in devices if torch.device(device).type == "cuda"]
    with torch.random.fork_rng(cuda):
        # torch.manual_seed would also reseed every CUDA device, which fork_rng does not restore
        torch.default_generator.manual_seed(seed)
        for device in cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
