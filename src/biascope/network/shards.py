"""Networks whose parameters are spread over processes (FSDP2's `fully_shard`): whole where a layer needs them.

The network is run without FSDP's own hooks, which allow one backward pass per forward pass and no second derivatives.
Instead a mode of torch functions sees every use of a sharded parameter: all ranks put it together, the operation runs,
and it is dropped; where autograd keeps it for the way back, its place is kept instead and it is put together again. The
derivative of putting together is adding up over the ranks and cutting, and the other way round, as often as one likes.

All ranks must go through the same layers in the same order, also those whose share of the data is empty: these run an
example and leave it out of their sums (`stream.Part.idle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import free_memory
from biascope.support.processes import Processes

KEPT = 0.2  # of the free memory, that whole parameters may fill: then they are not put together again
ANSWERS = ("shape", "ndim", "mT", "T", "H", "data", "real")  # attributes that depend on the whole


@dataclass(frozen=True)
class Cut:
    """How a parameter of this shape is cut along its first dimension: `rows` for every rank, the last ones fewer."""

    team: Processes = field(repr=False)
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of a rank, but for the last ones."""
        return -(-self.shape[0] // self.team.size)

    @property
    def count(self) -> int:
        """Rows of this rank."""
        start = min(self.team.rank * self.rows, self.shape[0])
        return min(self.rows, self.shape[0] - start)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        start = min(self.team.rank * self.rows, self.shape[0])
        return whole[start : start + self.rows]

    def gather(self, part: Tensor) -> Tensor:
        """The whole of all ranks' parts."""
        padded = part.new_zeros(self.rows, *self.shape[1:])
        padded[: len(part)] = part
        return self.team.concatenate(padded)[: self.shape[0]]

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks."""
        padded = whole.new_zeros(self.rows * self.team.size, *self.shape[1:])
        padded[: len(whole)] = whole
        own = self.own(whole)
        return self.team.sum_part(padded)[: len(own)]


class Gather(torch.autograd.Function):
    """A whole parameter, whose gradient is the sum over the ranks, of which each keeps its part; or this adjoint."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cut: Cut, adjoint: bool = False) -> Tensor:  # noqa: D102
        ctx.cut, ctx.adjoint = cut, adjoint
        return cut.scatter(t) if adjoint else cut.gather(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        return Gather.apply(g, ctx.cut, not ctx.adjoint), None, None  # type: ignore[no-untyped-call]


def is_sharded(t: Tensor) -> bool:
    """Is this a DTensor? By name: torch.distributed is not there in every build."""
    return type(t).__name__ == "DTensor" or (type(t) is not Tensor and hasattr(t, "device_mesh"))


def local(t: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return t._local_tensor if is_sharded(t) else t  # type: ignore[attr-defined]


def dtensor(part: Tensor, like: Tensor) -> Tensor:
    """The DTensor of this part, spread out as another of the same shape."""
    from torch.distributed.tensor import DTensor

    how = cast(Any, like)
    own = part.view(local(like).shape)
    made = DTensor.from_local(
        own, how.device_mesh, how.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return cast(Tensor, made)


@dataclass(frozen=True)
class Shards:
    """What is known of a sharded network: who takes part, and whether whole parameters may stay."""

    team: Processes
    module: nn.Module
    keep: bool
    active: list[bool] = field(default_factory=list)

    @staticmethod
    def of(module: nn.Module, tensors: Mapping[str, Tensor], team: Processes) -> Shards | None:
        """None for a network that is whole; an error for one that is cut in another way than FSDP2 does."""
        sharded = {name: t for name, t in tensors.items() if is_sharded(t)}
        if not sharded:
            return None
        ranks = _refuse_other_cuts(sharded, team)
        need = sum(prod(t.shape) * t.element_size() for t in sharded.values())
        first = next(iter(sharded.values()))
        room = min(team.gather(free_memory(first.device))) if ranks else 0
        return Shards(team, module, need <= KEPT * room)

    def cut(self, t: Tensor) -> Cut:
        """How a parameter is cut."""
        return Cut(self.team, tuple(t.shape))

    def part(self, t: Tensor) -> Tensor:
        """What this rank holds of a parameter, as a leaf that knows the whole."""
        local: Tensor = t._local_tensor.detach()  # type: ignore[attr-defined]
        local = local.view(local.shape)  # a tensor of its own
        local._cut = self.cut(t)  # type: ignore[attr-defined]
        return local

    def whole(self, p: Tensor, g: Tensor) -> Tensor:
        """A gradient that all ranks have computed of the same examples, of which each has its part of the sum."""
        return self.cut(p).gather(g) / self.team.size

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """In here the module can be called with parts of its parameters."""
        if self.active:
            yield
            return
        mode = Gathering(self)
        self.active.append(True)
        try:
            with ExitStack() as stack:
                stack.enter_context(_without_fsdp(self.module))
                if not self.keep:
                    stack.enter_context(saved_tensors_hooks(mode.pack, mode.unpack))
                stack.enter_context(mode)
                yield
        finally:
            self.active.pop()


def _refuse_other_cuts(sharded: Mapping[str, Tensor], team: Processes) -> tuple[int, ...]:
    import torch.distributed as dist

    name, t = next(iter(sharded.items()))
    mesh: Any = t.device_mesh  # type: ignore[attr-defined]
    ranks = tuple(mesh.mesh.flatten().tolist())
    if team.size == 1 and mesh.size() > 1:
        raise InputError(
            f"parameter {name!r} is spread over {mesh.size()} processes: make the call on all of them, with group= the "
            "mesh or process group of fully_shard"
        )
    for name, t in sharded.items():
        placements = t.placements  # type: ignore[attr-defined]
        if len(placements) != 1 or not placements[0].is_shard(0):
            raise UnsupportedError(
                f"parameter {name!r} is placed as {placements}: networks cut along the first dimension of their "
                "parameters by one group are supported (fully_shard over a mesh of one dimension)"
            )
        if tuple(t.device_mesh.mesh.flatten().tolist()) != ranks:  # type: ignore[attr-defined]
            raise UnsupportedError(f"parameter {name!r} is on another mesh than the first one")
    handle = getattr(team, "handle", None)
    if handle is not None and tuple(dist.get_process_group_ranks(handle)) != ranks:
        raise InputError(
            f"group has the ranks {dist.get_process_group_ranks(handle)}, the parameters are spread over {list(ranks)}"
        )
    return ranks


class Gathering(TorchFunctionMode):
    """Sees every use of a sharded parameter."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.shards = shards
        self.places: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # whole parameters that are alive, by their memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _any_part([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute not in ANSWERS:
                return func(*args, **kwargs)
            if attribute in {"shape", "ndim"}:
                return func(*(self._shape(t) for t in args))
        elif name in {"size", "dim", "numel", "__len__", "nelement", "ndimension"}:
            return func(*(self._shape(t) for t in args), **kwargs)
        elif name in {"is_floating_point", "is_complex", "__set__", "requires_grad_", "__hash__", "register_hook"}:
            return func(*args, **kwargs)
        return func(*self._whole(args), **{k: self._whole(v) for k, v in kwargs.items()})

    def _shape(self, t: Any) -> Any:
        cut = _cut(t)
        return torch.empty(cut.shape, dtype=t.dtype, device="meta") if cut is not None else t

    def _whole(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_sharded(value):
                value = self.shards.part(value)
            cut = _cut(value)
            if cut is None:
                return value
            whole: Tensor = Gather.apply(value, cut)  # type: ignore[no-untyped-call]
            if not self.shards.keep:
                alive = StorageWeakRef(whole.untyped_storage())  # type: ignore[no-untyped-call]
                self.places[whole.untyped_storage().data_ptr()] = alive, value
            return whole
        if isinstance(value, list | tuple):
            return type(value)(self._whole(v) for v in value)
        return value

    def pack(self, t: Tensor) -> Any:
        """What autograd keeps of a tensor: of a whole parameter, how to get it again."""
        if t.layout != torch.strided or is_sharded(t):
            return t
        found = self.places.get(t.untyped_storage().data_ptr())
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            return t
        return found[1], t.shape, t.stride(), t.storage_offset()

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        """What `pack` kept."""
        if isinstance(kept, Tensor):
            return kept
        part, shape, stride, offset = kept
        whole: Tensor = part._cut.gather(part.detach())
        return whole.as_strided(shape, stride, offset)


def _cut(t: Any) -> Cut | None:
    return getattr(t, "_cut", None)


def _any_part(values: Any) -> bool:
    return any(
        (
            _any_part(v)
            if isinstance(v, list | tuple)
            else isinstance(v, Tensor) and (is_sharded(v) or _cut(v) is not None)
        )
        for v in values
    )


@contextmanager
def _without_fsdp(module: nn.Module) -> Iterator[None]:
    """FSDP's hooks taken off the modules, and put back."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    before: list[tuple[nn.Module, str, Any]] = []
    for m in module.modules():
        for kind in kinds:
            hooks = m.__dict__[kind]
            mine = {key: hook for key, hook in hooks.items() if not _is_fsdp(hook)}
            if len(mine) < len(hooks):
                before.append((m, kind, hooks))
                m.__dict__[kind] = type(hooks)(mine)
    try:
        yield
    finally:
        for m, kind, hooks in before:
            m.__dict__[kind] = hooks


def _is_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    where = str(getattr(hook, "__module__", "") if owner is None else type(owner).__module__)
    return where.startswith(("torch.distributed.fsdp", "torch.distributed._composable"))


def reshard(module: nn.Module) -> bool:
    """Drop whole parameters that FSDP2 has kept since the last forward pass; was there any of its modules?"""
    mine = [m for m in module.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]
    for m in mine:
        m.reshard()  # type: ignore[operator]
    return bool(mine)
