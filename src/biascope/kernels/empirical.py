"""The empirical neural tangent kernel J J^T: plan, collect, contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.kernels.contract import Scratch, add_block, add_rows, mirror, small_rows
from biascope.kernels.kernel import Kernel
from biascope.kernels.plan import MIRRORED, Plan, Strategy, make_plan, region
from biascope.kernels.products import by_products
from biascope.network.functional import Functional, ParamSelection, functional
from biascope.network.layers.blocks import Anatomy, Block, Factor, MatrixFactor, RowsFactor, WiderError
from biascope.network.stream import Forward, Names, anatomy
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import Inputs, batch_size, gather, take, tensors_of
from biascope.support.memory import budget as memory_budget
from biascope.support.precision import Precision, arithmetic
from biascope.support.processes import processes
from biascope.support.signatures import checked

Outputs = Literal["full", "trace", "diagonal", "sum"] | int
LOSSY = ("tf32", "bf16")  # precisions whose error is measured by default
SAMPLED = 6  # examples of the block whose error is measured
PLANS = 64  # kept per anatomy


@checked
def ntk(
    model: nn.Module,
    x: Any,
    x2: Any = None,
    outputs: Outputs = "full",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
    max_memory: str | int | None = None,
    params: ParamSelection = None,
    *,
    output: Callable[[Any], Tensor] | None = None,
    by_layer: bool = False,
    store: str | Path | None = None,
    check: bool | None = None,
    group: Any = None,
) -> Kernel:
    """Empirical neural tangent kernel K[i, a, j, b] = <df_a(x_i)/dtheta, df_b(x_j)/dtheta>.

    Args:
        model: any nn.Module, in eval mode where it has BatchNorm or dropout.
        x: n1 examples: a tensor [n1, ...], a dict of keyword tensors, or an iterable of batches x or (x, y).
        x2: other examples for the cross kernel K(x, x2); None for the symmetric kernel K(x, x).
        outputs: "full" [n1, c, n2, c]; "trace" [n1, n2], summed over outputs; "diagonal" [c, n1, n2]; "sum" [n1, n2],
            the kernel of sum_c f_c; an int i, [n1, n2], the kernel of f_i.
        strategy: "auto" (the planner chooses per layer), "gram", "contract", or "products" (kernel-vector products).
        precision: "float32", "float64", "tf32" or "bf16"; for the last two the error is measured on sampled examples
            against float64 and stands in `K.error`.
        max_memory: budget for kernel, factors and workspace, such as "4GB"; if None, 60 % of the free memory, and a GPU
            keeps up to 1/32 of its own between calls, which are replayed (`biascope.kernels.replay`).
        params: which parameters to differentiate (see `bs.functional.functional`).
        output: how to get a tensor from what the model returns.
        by_layer: also keep the kernel of every layer, for `K.by_layer()`.
        store: a folder for tiles on disk, when the kernel does not fit in memory; an interrupted run resumes there if
            parameters, buffers, data, selection, the module's code and `output` are the same. Any number of processes
            on machines that see the folder share the tiles. Not with `by_layer`.
        check: measure the error against float64 on sampled examples (default: for tf32 and bf16).
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call with the same network
            and the same x and x2; each computes a part of the kernel, and all get the whole.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> K = ntk(net, torch.randn(5, 3))
        >>> K.tensor.shape, ntk(net, torch.randn(5, 3), outputs="trace").tensor.shape
        (torch.Size([5, 2, 5, 2]), torch.Size([5, 5]))
    """
    if group is not None:
        from biascope.kernels.shared import shared_ntk

        if store is not None:
            raise UnsupportedError(
                "store= and group= do not go together: without group, processes that name one folder share its tiles"
            )
        rest = params, output, by_layer, check
        return shared_ntk(processes(group), model, x, x2, outputs, strategy, precision, max_memory, *rest)
    f = functional(model, params, output, precision)
    one, two = gather_both(f, x, x2)
    if store is not None:
        from biascope.kernels.tiles import stored_ntk

        if by_layer:
            raise UnsupportedError(
                "store= keeps the whole kernel only: leave by_layer out, or store the kernel of each layer in a folder "
                "of its own with params="
            )
        K = stored_ntk(f, one, two, outputs, strategy, precision, max_memory, Path(store), check)
        assert K is not None  # it waits for the others
        return K
    with arithmetic(precision):
        found = anatomy(f, one)
        job = Job.make(f, found, one, two, outputs, strategy, precision, max_memory)
        values, layers = job.run(by_layer)
        wanted = precision in LOSSY if check is None else check
        error = measure_error(f, job.found, one, two, outputs, job.mode, values) if wanted else None
    return Kernel(values, outputs, job.mode, two is None, job.plan, error, layers, model_outputs=found.outputs)


def gather_both(f: Functional, x: Any, x2: Any) -> tuple[Inputs, Inputs | None]:
    """The examples of x and of x2; inputs of different kinds or shapes have no cross kernel."""
    one = gather(x, "x", f.certificate.arguments)
    if x2 is None:
        return one, None
    two = gather(x2, "x2", f.certificate.arguments)
    a = [tuple(t.shape[1:]) for t in tensors_of(one)]
    b = [tuple(t.shape[1:]) for t in tensors_of(two)]
    if isinstance(one, dict) != isinstance(two, dict) or (isinstance(one, dict) and set(one) != set(two)):
        raise InputError("x and x2 must be of the same kind: both tensors, or dicts with the same keywords")
    for t, u in zip(tensors_of(one), tensors_of(two)):
        if t.is_floating_point() != u.is_floating_point():
            raise InputError(f"x is {t.dtype} and x2 is {u.dtype}: inputs of one kind are needed, e.g. x2.to(x.dtype)")
    if a != b and not isinstance(one, dict):
        raise InputError(f"x2 has examples of shape {b[0]}, x of shape {a[0]}; they must agree")
    return one, two


def cotangents(outputs: Outputs, c: int) -> tuple[str, Tensor]:
    """How to sum (full | trace | diagonal) and the cotangents [k, c] for a choice of outputs."""
    if isinstance(outputs, int):
        if not -c <= outputs < c:
            raise InputError(f"outputs={outputs}: the model has {c} outputs, indices 0 to {c - 1}")
        return "trace", torch.eye(c, device="cpu")[outputs % c][None]
    if outputs == "sum":
        return "trace", torch.ones(1, c, device="cpu")
    return outputs, torch.eye(c, device="cpu")


@dataclass
class Job:
    """Everything needed to compute a kernel (or a tile of one)."""

    f: Functional
    found: Anatomy
    one: Inputs
    two: Inputs | None
    outputs: Outputs
    mode: str
    cot: Tensor
    plan: Plan
    wider: Callable[[], Job]  # the same, if gradients arrive at positions that were left out
    free: bool = False  # may memory be held between calls?
    later: Later | None = None  # where to put what is to be looked at afterwards

    @staticmethod
    def make(
        f: Functional,
        found: Anatomy,
        one: Inputs,
        two: Inputs | None,
        outputs: Outputs,
        strategy: Strategy,
        precision: Precision,
        max_memory: str | int | None,
    ) -> Job:
        """Plan the computation, or take the plan of the last one like it."""
        n1, n2 = batch_size(one), None if two is None else batch_size(two)
        key = ("kernel", outputs, n1, n2, strategy, precision, max_memory)
        mode, cot, plan = found.plans.get(key, (None, None, None))
        if plan is None:
            mode, cot = cotangents(outputs, found.outputs)
            limit = memory_budget(max_memory, f.device)
            whole = found.batching() if len(cot) > 1 else found
            plan = make_plan(whole, mode, n1, n2, len(cot), strategy, precision, f.dtype, f.device, limit)
            if max_memory is not None or plan.is_small:  # else it depends on what is free now
                if len(found.plans) > PLANS:
                    found.plans.clear()
                found.plans[key] = (mode, cot, plan)
        way = found.batching() if plan.batched else found if not found.batched else replace(found, batched=False)
        again = (outputs, strategy, precision, max_memory)
        wider = lambda: Job.make(f, found.widened(), one, two, *again)  # noqa: E731
        way = way.pruned()
        return Job(f, way, one, two, outputs, mode, cot, plan, wider, max_memory is None)

    def shape(self, n1: int, n2: int) -> tuple[int, ...]:
        """Shape of a kernel while it is summed."""
        k = len(self.cot)
        return {"full": (k, n1, k, n2), "trace": (n1, n2), "diagonal": (k, n1, n2)}[self.mode]

    def run(self, by_layer: bool = False) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Compute the kernel; also one per layer if asked."""
        try:
            if self.free and not by_layer and self.f.device.type == "cuda":
                from biascope.kernels.replay import replayed

                K = replayed(self)
                if K is not None:
                    return K, None
            return self.run_once(by_layer)
        except WiderError:
            other = self.wider()
            known = self.f.certificate.anatomies
            known |= {key: found.widened() for key, found in known.items()}
            self.found, self.plan = other.found, other.plan
            return self.run_once(by_layer)

    def run_once(self, by_layer: bool = False) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The same, launch by launch."""
        p = self.plan
        if p.strategy == "products":
            return by_products(self.f, self.one, self.two, self.cot, self.mode, p), None
        K = torch.zeros(self.shape(p.n1, p.n2), dtype=self.f.dtype, device=self.f.device)
        layers = {b.block.layer: torch.zeros_like(K) for b in p.blocks} if by_layer else None
        if p.tile >= p.n1:
            self.add(K, layers, self.one, self.two)
            if p.symmetric:
                for kernel in (K, *(layers or {}).values()):
                    mirror(kernel, self.mode)
        else:
            self._run_tiles(K, layers)
        if layers is not None:
            K = torch.stack(list(layers.values())).sum(0) if len(layers) > 1 else next(iter(layers.values())).clone()
        return K, layers

    def add(self, K: Tensor, layers: dict[str, Tensor] | None, one: Inputs, two: Inputs | None) -> None:
        """Add all blocks for a pair of sets of examples into K (or into the layers' kernels)."""
        p = self.plan
        scratch = Scratch()
        for group in p.groups:
            factors = self.collect(group, one)
            others = None if two is None else self.collect(group, two)
            small: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
            for i in group:
                b = p.blocks[i]
                name = "" if layers is None else b.block.layer
                one_factor, two_factor = factors.pop(0), others.pop(0) if others else None  # freed when done
                rows = small_rows(one_factor, b.method)
                if rows is not None:
                    other_rows = None if two_factor is None else small_rows(two_factor, b.method)
                    small.setdefault(name, []).append((rows, other_rows))
                if isinstance(one_factor, MatrixFactor):
                    assert two_factor is None or isinstance(two_factor, MatrixFactor)
                    target = K if layers is None else layers[name]
                    add_block(target, one_factor, two_factor, self.mode, b.method, p.workspace, scratch)
            for name, pieces in small.items():  # many small parameters, one product
                target = K if layers is None else layers[name]
                left = torch.cat([r for r, _ in pieces], -1).transpose(0, 1)
                right = None if two is None else torch.cat([r for _, r in pieces if r is not None], -1).transpose(0, 1)
                add_rows(target, left, right, self.mode, p.workspace)

    def collect(self, group: tuple[int, ...], inputs: Inputs) -> list[Factor]:
        """One pass over some examples for a group of blocks."""
        store = torch.bfloat16 if self.plan.precision == "bf16" else None
        blocks = [self.plan.blocks[i].block for i in group]
        return collect(self.f, self.found, blocks, inputs, self.cot, self.plan.chunk, store, self.later)

    def _run_tiles(self, K: Tensor, layers: dict[str, Tensor] | None) -> None:
        """Too large for one go: pairs of tiles of examples, each computed whole."""
        p = self.plan
        two = self.one if self.two is None else self.two
        for i in range(0, p.n1, p.tile):
            r = slice(i, min(i + p.tile, p.n1))
            for j in range(i if p.symmetric else 0, p.n2, p.tile):
                c = slice(j, min(j + p.tile, p.n2))
                same = p.symmetric and i == j
                shape = self.shape(r.stop - r.start, c.stop - c.start)
                tile = torch.zeros(shape, dtype=K.dtype, device=K.device)
                parts = None if layers is None else {name: torch.zeros_like(tile) for name in layers}
                self.add(tile, parts, take(self.one, r), None if same else take(two, c))
                for name, part in [("", tile)] if parts is None else parts.items():
                    if same:
                        mirror(part, self.mode)
                    target = K if layers is None else layers[name]
                    place(target, part, r, c, self.mode, both=p.symmetric and not same)


def measure_error(
    f: Functional,
    found: Anatomy,
    one: Inputs,
    two: Inputs | None,
    outputs: Outputs,
    mode: str,
    values: Tensor,
) -> float:
    """Relative Frobenius error of a sampled block of a kernel (in the layout it is summed in) against float64."""
    n1, n2 = batch_size(one), batch_size(one if two is None else two)
    gen = torch.Generator().manual_seed(0)
    i = torch.randperm(n1, generator=gen, device="cpu")[:SAMPLED].sort().values
    j = i if two is None else torch.randperm(n2, generator=gen, device="cpu")[:SAMPLED].sort().values
    with arithmetic("float64"):
        other = None if two is None else take(two, j)
        job = Job.make(f.to(torch.float64), found, take(one, i), other, outputs, "auto", "float64", None)
        exact, _ = job.run()
    i, j = i.to(values.device), j.to(values.device)
    block = {
        "full": lambda: values[:, i][:, :, :, j],
        "trace": lambda: values[i][:, j],
        "diagonal": lambda: values[:, i][:, :, j],
    }[mode]()
    return float((block.to(exact) - exact).norm() / exact.norm())


@dataclass
class Later:
    """Outputs [n, c], and flags that are to be False: results are good only then."""

    rows: list[Tensor] = field(default_factory=list)
    flags: list[Tensor] = field(default_factory=list)


def collect(
    f: Functional,
    found: Anatomy,
    blocks: Sequence[Block],
    inputs: Inputs,
    cotangents: Tensor,
    chunk: int | None = None,
    store: torch.dtype | None = None,
    later: Later | None = None,
) -> list[Factor]:
    """The factors of all examples, one per block: forward passes over `chunk` examples each, kept in one place.

    Args:
        f: the network.
        found: its anatomy.
        blocks: the blocks to collect; backward stops at the earliest of their layers.
        inputs: n examples.
        cotangents: [k, c], the same for every example.
        chunk: examples per forward pass (all at once if None).
        store: precision in which factors are kept (that of f if None).
        later: for what is otherwise looked at, and refused, at once.
    """
    n, k = batch_size(inputs), len(cotangents)
    chunk = n if chunk is None else max(1, min(chunk, n))
    cot = cotangents.to(f.device, f.dtype)[:, None]
    kept: dict[Names, Factor] = {}
    wider: list[Tensor] = []
    for start in range(0, n, chunk):
        at = slice(start, min(start + chunk, n))
        part = f.prepare(inputs if chunk == n else take(inputs, at))
        forward = Forward(f, found, blocks, part, start)
        if later is not None:
            later.rows.append(forward.rows)
            later.flags.append(~torch.isfinite(forward.rows).all())
        elif not bool(torch.isfinite(forward.rows).all()):
            bad = start + int((~torch.isfinite(forward.rows).all(1)).nonzero()[0])
            raise UnsupportedError(f"{type(f.module).__name__} returned NaN or infinity for example {bad}")
        size = at.stop - at.start
        # without a vmapped backward pass, one cotangent at a time, so that not all are held twice
        steps = [slice(0, k)] if found.batched or size == n else [slice(j, j + 1) for j in range(k)]
        for ks in steps:
            new = forward.factors(cot[ks].expand(-1, size, -1), last=ks.stop == k)
            for names, factor in new.items():
                if isinstance(factor, MatrixFactor) and factor.block.live is not None:
                    factor, outside = factor.narrowed()
                    wider.append(outside)
                kept[names] = _keep(kept.get(names), factor, ks, at, (k, n), store or f.dtype)
        del forward
    if later is not None:
        later.flags += wider
    elif wider and bool(torch.stack(wider).any()):
        raise WiderError
    return [kept[b.names] for b in blocks]


def _keep(
    whole: Factor | None, part: Factor, ks: slice, at: slice, size: tuple[int, int], dtype: torch.dtype
) -> Factor:
    """A part written into its place in the whole, which is the part itself where there is no other."""
    k, n = size
    everything = ks.stop - ks.start == k and at.stop - at.start == n
    if isinstance(part, RowsFactor):
        if everything:
            return RowsFactor(part.block, part.rows.to(dtype))
        p = part.rows.shape[2]
        rows = whole.rows if isinstance(whole, RowsFactor) else part.rows.new_empty(k, n, p, dtype=dtype)
        rows[ks, at] = part.rows
        return RowsFactor(part.block, rows)
    if everything:
        inputs = [a.to(dtype) if a.is_floating_point() else a for a in part.inputs]
        return MatrixFactor(part.block, part.rules, inputs, [g.to(dtype) for g in part.grads])
    if isinstance(whole, MatrixFactor):
        inputs, grads = whole.inputs, whole.grads
    else:
        kinds = [dtype if a.is_floating_point() else a.dtype for a in part.inputs]
        inputs = [a.new_empty(n, *a.shape[1:], dtype=kind) for a, kind in zip(part.inputs, kinds)]
        grads = [g.new_empty(k, n, *g.shape[2:], dtype=dtype) for g in part.grads]
    for mine, its in zip(inputs, part.inputs):
        if ks.start == 0:
            mine[at] = its
    for mine, its in zip(grads, part.grads):
        mine[ks, at] = its
    return MatrixFactor(part.block, part.rules, inputs, grads)


def place(K: Tensor, tile: Tensor, r: slice, c: slice | Tensor, mode: str, both: bool) -> None:
    """Write a tile at rows r and columns c, and its mirror image if `both`."""
    K[region(mode, r, c)] = tile
    if both:
        K[region(mode, c, r)] = tile.permute(MIRRORED[mode])
