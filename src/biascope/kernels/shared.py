"""A kernel by several processes: each computes some rectangles of it, and the rectangles are put together.

What a rank collects again (the factors of examples that others collect too) costs less than sending it would: the
factors of an example are as large as its activations, and contracting them takes longer than a forward pass. Of a
symmetric kernel, a rank takes the square on the diagonal that belongs to its examples, and those to the right of it, as
far as half way around the circle of ranks: every pair of examples once, and as many for every rank. Then each rank
sends what it has computed, and nothing else travels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from biascope.kernels.empirical import LOSSY, Job, Outputs, gather_both, measure_error, place
from biascope.kernels.kernel import Kernel
from biascope.kernels.plan import Strategy, region
from biascope.network.functional import ParamSelection, functional
from biascope.network.stream import anatomy
from biascope.support.inputs import batch_size, mark, refuse_samplers, take
from biascope.support.memory import parse_bytes
from biascope.support.precision import Precision, arithmetic
from biascope.support.processes import Processes

Rectangle = tuple[slice, Tensor | None]  # rows, and columns; None for a square on the diagonal


def shared_ntk(
    team: Processes,
    model: nn.Module,
    x: Any,
    x2: Any,
    outputs: Outputs,
    strategy: Strategy,
    precision: Precision,
    max_memory: str | int | None,
    params: ParamSelection,
    output: Callable[[Any], Tensor] | None,
    by_layer: bool,
    check: bool | None,
) -> Kernel:
    """`bs.ntk` on all ranks of a team."""
    with team, arithmetic(precision):
        f = functional(model, params, output, precision)
        for data, what in ((x, "x"), (x2, "x2")):
            refuse_samplers(data, what)
        one, two = gather_both(f, x, x2)
        data = [mark(some) if some is not None else None for some in (one, two)]
        team.agree(f.mark(), "the ranks have different networks (checksums of the parameters)")
        team.agree(data, "every rank must be given the same x and x2, all of it (checksums)")
        found = anatomy(f, one)
        whole = Job.make(f, found, one, two, outputs, strategy, precision, max_memory)
        n1, n2 = batch_size(one), batch_size(one if two is None else two)
        by_layer = by_layer and whole.plan.strategy != "products"  # which has no layers
        room = None if max_memory is None else parse_bytes(max_memory) - whole.plan.kernel_bytes
        K = torch.empty(whole.shape(n1, n2), dtype=f.dtype, device=f.device)
        layers = {b.block.layer: torch.empty_like(K) for b in whole.plan.blocks} if by_layer else None
        for rows, columns in rectangles(team.rank, team.size, n1, None if two is None else n2):
            team.check()
            other = None if columns is None else take(one if two is None else two, columns)
            job = Job.make(f, found, take(one, rows), other, outputs, strategy, precision, room)
            tile, parts = job.run(by_layer)
            for name, part in [("", tile)] if layers is None else (parts or {}).items():
                target = K if layers is None else layers[name]
                beside = slice(rows.start, rows.stop) if columns is None else columns
                place(target, part, rows, beside, whole.mode, both=two is None and columns is not None)
        for target in [K] if layers is None else layers.values():
            exchange(team, target, n1, None if two is None else n2, whole.mode)
        if layers is not None:
            K = torch.stack(list(layers.values())).sum(0)
        wanted = precision in LOSSY if check is None else check
        error = measure_error(f, found, one, two, outputs, whole.mode, K) if wanted else None
    return Kernel(K, outputs, whole.mode, two is None, whole.plan, error, layers, model_outputs=found.outputs)


def exchange(team: Processes, K: Tensor, n1: int, n2: int | None, mode: str) -> None:
    """The parts of K that the ranks have computed, to all of them: `exchanged` numbers of [n1, n2], not all of it."""
    for owner in range(team.size):
        for rows, columns in rectangles(owner, team.size, n1, n2):
            beside = slice(rows.start, rows.stop) if columns is None else columns
            tile = K[region(mode, rows, beside)].contiguous()
            team.broadcast(tile, owner)
            if owner != team.rank:
                place(K, tile, rows, beside, mode, both=n2 is None and columns is not None)


def exchanged(n: int, size: int) -> int:
    """Pairs of n examples in the parts of all ranks: squares on the diagonal, and half of what is beside them."""
    squares = sum(((r + 1) * n // size - r * n // size) ** 2 for r in range(size))
    return squares + (n * n - squares) // 2


def rectangles(rank: int, size: int, n1: int, n2: int | None) -> list[Rectangle]:
    """What a rank computes of a kernel [n1, n2], of a symmetric one if n2 is None; none of it is empty."""
    long = n1 if n2 is None else max(n1, n2)
    cuts = [slice(r * long // size, (r + 1) * long // size) for r in range(size)]
    if n2 is not None:  # the longer side is cut
        rows, columns = (cuts[rank], slice(0, n2)) if n1 >= n2 else (slice(0, n1), cuts[rank])
        return _filled([(rows, _numbers(columns))])
    mine = cuts[rank]
    beside = [_numbers(cuts[(rank + d) % size]) for d in range(1, (size + 1) // 2)]
    found: list[Rectangle] = [(mine, None)]
    if size % 2 == 0 and size > 1:  # the square half way around belongs to two ranks, one half of it to each
        other = cuts[(rank + size // 2) % size]
        if rank < size // 2:
            found.append((slice(mine.start, (mine.start + mine.stop) // 2), _numbers(other)))
        else:
            beside.append(_numbers(slice((other.start + other.stop) // 2, other.stop)))
    if beside:
        found.append((mine, torch.cat(beside)))
    return _filled(found)


def _numbers(s: slice) -> Tensor:
    return torch.arange(s.start, s.stop, device="cpu")


def _filled(found: list[Rectangle]) -> list[Rectangle]:
    return [(r, c) for r, c in found if r.stop > r.start and (c is None or len(c))]
