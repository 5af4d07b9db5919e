"""The planner: count FLOPs and bytes of the possible contractions of every block, choose, and fit the memory budget."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from biascope.network.layers.blocks import Anatomy, Block
from biascope.support.errors import InputError
from biascope.support.memory import readable
from biascope.support.tables import columns, grid

METHODS = ("gram", "contract")
Strategy = Literal["auto", "gram", "contract", "products"]
SMALL = 2**27  # bytes of kernel and factors below which free memory is not measured
MIRRORED = {"full": (2, 3, 0, 1), "trace": (1, 0), "diagonal": (0, 2, 1)}  # axes of a transposed kernel

# FLOP/s and byte/s of a product and of a pass over memory. Only ratios matter; orders of magnitude are enough.
SPEED = {"cpu": (6e10, 8e9), "cuda": (4e13, 3e12)}
TENSOR_CORES = {"tf32": 2e14, "bf16": 5e14}


@dataclass(frozen=True)
class BlockPlan:
    """How one block is contracted, what it costs, and what the other way would have cost."""

    block: Block
    method: str
    flops: float
    seconds: float
    factor_bytes: int  # per example
    why: str


@dataclass(frozen=True)
class Plan:
    """What was chosen per block and how the data is cut. `print(plan)` is a table."""

    outputs: str
    n1: int
    n2: int
    k: int
    symmetric: bool
    precision: str
    blocks: tuple[BlockPlan, ...]
    groups: tuple[tuple[int, ...], ...]  # blocks collected in the same pass over the data
    chunk: int  # examples per forward pass
    tile: int  # examples per tile (n1 if everything is done at once)
    workspace: int
    budget: int
    kernel_bytes: int
    strategy: str = "auto"
    batched: bool = False  # one vmapped backward pass for all outputs, if the memory allows

    @property
    def flops(self) -> float:
        """Estimated FLOPs of all contractions (forward and backward passes not counted)."""
        return sum(b.flops for b in self.blocks)

    @property
    def is_small(self) -> bool:
        """Is the budget so far above the need that another one would lead to the same plan?"""
        examples = self.n1 + (0 if self.symmetric else self.n2)
        need = self.kernel_bytes + examples * sum(b.factor_bytes for b in self.blocks)
        return need <= SMALL and self.budget >= 32 * SMALL and self.chunk == self.n1 == self.tile

    @property
    def passes(self) -> int:
        """Passes over the data: groups of layers times tiles."""
        tiles = -(-self.n1 // self.tile)
        return len(self.groups) * (tiles * (tiles + 1) // 2 if tiles > 1 else 1)

    def _repr_html_(self) -> str:
        """The table of `print(plan)`, for notebooks."""
        title = (
            f"{self.n1} x {self.n2} examples, {self.passes} pass(es), {readable(self.flops, 'FLOP')} of contractions"
        )
        rows = [(", ".join(b.block.names), b.method, readable(b.flops, "FLOP"), b.why) for b in self.blocks]
        return grid(title, ["parameters", "method", "FLOPs", "why"], rows)

    def __str__(self) -> str:
        other = "" if self.symmetric else f" x {self.n2}"
        lines = [
            f"kernel '{self.outputs}' of {self.n1}{other} examples, {self.k} outputs, {self.precision}: "
            f"{readable(self.kernel_bytes)} kernel, {readable(self.flops, 'FLOP')} of contractions",
            f"{self.passes} pass(es) over the data, {self.chunk} examples at a time, tiles of {self.tile}; "
            f"budget {readable(self.budget)}, workspace {readable(self.workspace)}",
        ]
        rows = [
            (
                b.block.names[0] + (" +bias" if len(b.block.names) == 2 else ""),
                b.block.reason,
                b.method,
                readable(b.flops, "FLOP"),
                b.why,
            )
            for b in self.blocks
        ]
        return "\n".join([*lines, columns(["parameters", "rule", "method", "FLOPs", "why"], rows)])


def region(mode: str, r: Any, c: Any) -> Any:
    """Rows r and columns c of a kernel's values, as an index of a tensor or an array."""
    return {"full": np.s_[:, r, :, c], "trace": np.s_[r, c], "diagonal": np.s_[:, r, c]}[mode]


def _cost(b: Block, method: str, outputs: str, n1: int, n2: int, k: int, half: float, item: int) -> tuple[float, float]:
    """(FLOPs, bytes moved) of one block."""
    pairs = half * n1 * n2
    n = n1 if half < 1 else n1 + n2
    rows2 = pairs * (k * k if outputs == "full" else k)
    if b.kind != "matrix":
        return 2 * rows2 * b.numel, item * (k * n * b.numel + 2 * rows2)
    s = b.matrix
    T, d_in, d_out = s.positions, s.d_in, s.d_out
    if method == "contract":
        form = 2.0 * k * n * T * b.numel
        moved = item * (3.0 * k * n * b.numel + 3.0 * n * s.groups * d_in * T + 2 * rows2)
        return form + 2 * rows2 * b.numel, moved
    if outputs != "full":
        return 2 * pairs * T * T * (d_in + k * d_out), item * pairs * T * T * 4.0
    if T == 1:
        return 2 * pairs * (d_in + k * k * d_out), item * pairs * k * k * 3.0
    flops = 2 * pairs * (T * T * (d_in + k * d_out) + k * k * T * d_out)
    return flops, item * pairs * (2.0 * T * T + 4.0 * T * k * d_out)


def _choose(
    b: Block, strategy: str, outputs: str, n1: int, n2: int, k: int, half: float, item: int, speed: tuple[float, float]
) -> BlockPlan:
    def seconds(cost: tuple[float, float]) -> float:
        return cost[0] / speed[0] + cost[1] / speed[1]

    factor = (b.input_numel + k * b.output_numel if b.kind == "matrix" else k * b.numel) * item
    if b.kind != "matrix":
        cost = _cost(b, "contract", outputs, n1, n2, k, half, item)
        return BlockPlan(b, "rows", cost[0], seconds(cost), factor, "gradients are formed at once")
    costs = {m: _cost(b, m, outputs, n1, n2, k, half, item) for m in METHODS}
    if b.matrix.groups > 1:
        best, why = "contract", "grouped convolution"
    elif strategy in METHODS:
        best, why = strategy, "asked for"
    else:
        best, other = sorted(METHODS, key=lambda m: seconds(costs[m]))
        if b.matrix.d_in > 4096 and "embedding" in b.reason:
            best, other = "gram", "contract"
        ratio = seconds(costs[other]) / max(seconds(costs[best]), 1e-30)
        why = f"{other} would cost {ratio:.1f}x (T={b.matrix.positions})"
    return BlockPlan(b, best, costs[best][0], seconds(costs[best]), factor, why)


def make_plan(
    found: Anatomy,
    outputs: str,
    n1: int,
    n2: int | None,
    k: int,
    strategy: str,
    precision: str,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
) -> Plan:
    """Choose a contraction per block and cut the work so that it fits the budget (in bytes, kernel included)."""
    symmetric = n2 is None
    m = n1 if n2 is None else n2
    item = dtype.itemsize
    store = 2 if precision == "bf16" else item
    speed = SPEED.get(device.type, SPEED["cpu"])
    if device.type == "cuda" and precision in TENSOR_CORES:
        speed = (TENSOR_CORES[precision], speed[1])
    half = 0.55 if symmetric else 1.0
    blocks = tuple(
        _choose(b, strategy, outputs, n1, m, k, half, store, speed) for b in map(found.narrowed, found.blocks)
    )
    kernel_bytes = n1 * m * {"full": k * k, "trace": 1, "diagonal": k}[outputs] * item
    room = int(0.85 * (budget - kernel_bytes))
    gradients = item * sum(b.output_numel for b in found.blocks)  # of one cotangent, per example
    batched = found.batched and room >= 4 * (found.activation_bytes + k * gradients)
    per_example = found.activation_bytes + (k if batched else 1) * gradients
    least = kernel_bytes + 4 * per_example + 2 * max(b.factor_bytes for b in blocks) * 2
    if room < 4 * per_example:
        raise InputError(
            f"max_memory is {readable(budget)}, but the kernel alone takes {readable(kernel_bytes)} and one example's "
            f"forward and backward pass {readable(per_example)}: give at least {readable(1.3 * least)}, or keep the "
            "kernel on disk with store=PATH"
        )
    workspace = min(room // 4, 2**28 if device.type == "cpu" else 2**35)
    chunk = max(1, min(n1, (room // 4) // per_example))
    space = room - workspace - chunk * per_example
    tile = n1
    biggest = max(b.factor_bytes for b in blocks)
    if n1 * biggest > space or (not symmetric and (n1 + m) * biggest > space):
        unit = kernel_bytes // (n1 * m)
        tile = max(1, min(n1, int(space // (2 * biggest + 1))))
        while tile > 1 and 2 * tile * biggest + tile * tile * unit > space:
            tile -= max(1, tile // 8)
    count = (n1 + (0 if symmetric else m)) if tile == n1 else 2 * tile
    groups: list[list[int]] = []
    used = 0
    for i in reversed(range(len(blocks))):  # the last layers first: their backward pass is the shortest
        need = count * blocks[i].factor_bytes
        if not groups or used + need > space:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += need
    return Plan(
        outputs, n1, m, k, symmetric, precision, blocks, tuple(map(tuple, groups)), min(chunk, max(tile, 1)), tile,
        workspace, budget, kernel_bytes, strategy, batched,
    )  # fmt: skip
