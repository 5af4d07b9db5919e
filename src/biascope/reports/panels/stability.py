"""Whether directions of the input are found again by other networks at other inputs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def found_again(sample: Tensor, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """How much of each leading direction one half of the gradients [T, D] shares with the other, and chance, [k].

    The halves are of other networks at other inputs. Direction i of one half is projected onto the first 2 i
    directions of the other, both ways: its length, 1 where it is found again, sqrt(2 i / D) by chance. Twice as many,
    because directions of nearly equal eigenvalues (shifted stripes) come in any order and mixture.

    Example:
        >>> rows = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) * torch.eye(3)[:1]
        >>> [float(v[0].round(2)) for v in found_again(rows + 1e-3 * torch.eye(3).repeat(22, 1)[:64], 1)]
        [1.0, 0.82]
    """
    one, two = (torch.linalg.svd(sample[i::2], full_matrices=False).Vh for i in (0, 1))
    dimension = sample.shape[1]
    count = min(count, len(one), len(two))
    shared = one[: 2 * count] @ two[: 2 * count].T
    length, chance = np.empty(count), np.empty(count)
    for i in range(count):
        there = float(shared[i, : 2 * i + 2].norm())
        back = float(shared[: 2 * i + 2, i].norm())
        length[i], chance[i] = min(1.0, (there + back) / 2), min(1.0, (2 * (i + 1) / dimension) ** 0.5)
    return length, chance
