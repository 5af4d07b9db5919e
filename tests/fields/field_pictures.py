"""Pictures that the tests of this room share."""

import torch
from torch import Tensor

from biascope.fields import coordinates


def blobs(n: int, seed: int, side: int = 16) -> Tensor:
    """Bright ellipses on grey, in [0, 1]: [n, side, side]."""
    gen = torch.Generator().manual_seed(seed)
    x, y = coordinates((side, side)).unbind(-1)
    u = torch.rand(n, 3, 1, 1, generator=gen)
    distance = (x - u[:, 0] + 0.5) ** 2 + 1.5 * (y - u[:, 1] + 0.5) ** 2
    return 0.2 + 0.6 * torch.exp(-distance / (0.2 + 0.3 * u[:, 2]) ** 2)
