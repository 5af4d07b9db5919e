"""J^T u for many u at once: one forward pass per part of the data, one backward pass per u.

What alignments, sketches of norms and rotations need of the kernel without forming it: u^T K w = <J^T u, J^T w>.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from biascope.network.functional import Functional
from biascope.network.layers.blocks import leaves
from biascope.network.stream import Part
from biascope.support.errors import InputError

HELD = 1 << 30  # bytes of pulled-back vectors held at a time


def add_pulled(total: Tensor, f: Functional, part: Part, cotangents: Iterable[Tensor]) -> None:
    """total [k, p] += J^T u_j of a part of the data, for its cotangents u_j [b, c], j = 1..k.

    Where the parameters are spread over processes, it is the sum over their parts of the data, and every process has
    the entries of its own parameters.
    """
    params = leaves(f)
    with torch.enable_grad():
        rows = f(params, part.inputs)
    if not bool(torch.isfinite(rows).all()):
        bad = part.at.start + int((~torch.isfinite(rows).all(1)).nonzero()[0])
        raise InputError(f"{type(f.module).__name__} returned NaN or infinity for example {bad}")
    for j, u in enumerate(cotangents):
        keep = j < len(total) - 1
        grads = torch.autograd.grad(
            rows,
            list(params.values()),
            u.to(rows) * (not part.idle),
            retain_graph=keep,
            allow_unused=True,
            materialize_grads=True,
        )
        total[j] += torch.cat([g.reshape(-1) for g in grads])


def no_vectors(f: Functional, k: int) -> Tensor:
    """Zeros [k, p] in float64, to which `add_pulled` adds."""
    return torch.zeros(k, f.own_params, dtype=torch.float64, device=f.device)


def group_size(f: Functional, k: int) -> int:
    """How many pulled-back vectors fit in the memory set aside for them, at least 2."""
    return max(2, min(k, HELD // (8 * f.num_params)))


def layer_columns(f: Functional, layer_of: dict[str, str]) -> dict[str, Tensor]:
    """For every layer, the positions of its parameters in a flat vector [p]."""
    found: dict[str, list[Tensor]] = {}
    start = 0
    for name, q in leaves(f).items():
        found.setdefault(layer_of[name], []).append(torch.arange(start, start + q.numel(), device=f.device))
        start += q.numel()
    return {layer: torch.cat(parts) for layer, parts in found.items()}
