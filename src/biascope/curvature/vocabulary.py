"""Scores of a softmax over a large vocabulary, some rows at a time.

Logits [n, T, V] of a language model are the largest tensor there is. Probabilities and their sums, in float64, exist
for a few rows of them only; what is returned is the one tensor of that size that is needed, the scores.
"""

import torch
from torch import Tensor

ENTRIES = {"cpu": 2**18, "cuda": 2**24}  # probabilities at a time: a processor's cache holds so many


def scores(z: Tensor, labels: Tensor | None, uniform: Tensor | None, counted: Tensor | None) -> Tensor:
    """Gradients [k, m, c] of log softmax(z)[label] at logits z [m, c]: one-hot labels less the probabilities.

    Args:
        z: [m, c].
        labels: [1, m] or None, to draw them from the model by
        uniform: numbers [k, m] in [0, 1), in float64.
        counted: [m], False where a row has no label: its scores are zero.
    """
    m, c = z.shape
    given = labels if uniform is None else uniform
    assert given is not None
    out = z.new_empty(len(given), m, c)
    weight = z.new_ones(m) if counted is None else counted.to(z)
    step = max(1, ENTRIES.get(z.device.type, 2**18) // c)
    for at in range(0, m, step):
        some = slice(at, min(at + step, m))
        p = torch.softmax(z[some], -1)
        if uniform is None:
            index = given[:, some]
        else:
            cdf = p.cumsum(-1, dtype=torch.float64)
            u = uniform[:, some] * cdf[:, -1]
            index = torch.searchsorted(cdf, u.T.contiguous()).T.clamp_(max=c - 1)  # beyond only where p is NaN
        own, w = out[:, some], weight[None, some, None]
        torch.mul(p[None], -w.expand(len(own), -1, 1), out=own)
        own.scatter_add_(-1, index[..., None], w.expand(*index.shape, 1))
    return out
