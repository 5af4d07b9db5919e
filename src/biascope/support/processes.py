"""Several processes that make the same call: their sums, who owns what, and errors that end all of them.

`processes(group)` is asked once, by a function that has a `group` argument. One process alone is a group of one, whose
sums are its own, so that the code behind is the same for both. What a function does with a group stands in `with`:

    team = processes(group)
    with team:
        total = part of the sum(team.share(n))
        team.sum(total)

An error on one rank inside `with` is raised on all of them: before every collective, and at the end, the ranks ask each
other whether one has failed. `team.check()`, in a long loop without collectives, asks in between.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from biascope.support.errors import InputError

T = TypeVar("T")
PAUSE = 0.5  # seconds between two questions of `check`


class Processes:
    """One process alone. Rank, size, and collectives that have nothing to do."""

    rank = 0
    size = 1

    def __enter__(self) -> None:
        """From here on an error on one rank is an error on all."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """All ranks have come this far, or all raise."""

    def check(self) -> None:
        """Raise if another rank has failed; costs nothing most of the time."""

    def sum(self, *tensors: Tensor) -> Tensor:
        """Add up over the ranks, in place and on all of them; gives the first."""
        return tensors[0]

    def reduce(self, tensor: Tensor, owner: int) -> None:
        """Add up over the ranks, in place on the owner; on the others the tensor is scratch afterwards."""

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Overwrite the tensor by the owner's."""

    def concatenate(self, part: Tensor) -> Tensor:
        """The parts of all ranks, of one shape, one after the other along the first dimension."""
        return part

    def sum_part(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over the ranks, of as many equal parts as there are ranks."""
        return whole

    def gather(self, value: T) -> list[T]:
        """The (picklable, small) values of all ranks, on all of them."""
        return [value]

    def agree(self, value: object, message: str) -> None:
        """Refuse if a value that must be the same everywhere is not."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise InputError(f"{message}: rank 0 has {values[0]}, rank {rank} has {other}")

    def share(self, n: int) -> slice:
        """This rank's part of n items: neighbours, and as many as the others have, up to one."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def deal(self, costs: Sequence[float], load: list[float] | None = None) -> list[int]:
        """An owner for each piece of work: the largest first, to the rank that has least so far.

        `load` is what the ranks have from before; it is brought up to date.
        """
        owners, load = [0] * len(costs), [0.0] * self.size if load is None else load
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = load.index(min(load))
            load[owners[i]] += costs[i]
        return owners


ALONE = Processes()


class Elsewhere(Exception):
    """Another rank has failed; what with, it says when all meet."""


class Group(Processes):
    """The ranks of a `torch.distributed` process group.

    Attributes:
        handle: the process group.
        bytes: payload of the collectives of this rank so far, by their names.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        kinds = {device.type for device in handle._device_types}
        self.kinds = kinds or {"cpu"}
        where = "cpu" if "cpu" in self.kinds else next(iter(self.kinds))
        self.device = torch.device(where) if where == "cpu" else torch.device(where, torch.cuda.current_device())
        self.bytes: Counter[str] = Counter()
        self.broken = False  # a collective failed: a rank is gone, there is nobody to talk to
        self.meetings = 0  # as many on every rank
        self.asked = 0.0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._meet(None)
        elif isinstance(error, Exception) and not self.broken and not hasattr(error, "rank"):
            self._meet(error)

    def check(self) -> None:  # noqa: D102
        if self.size > 1 and monotonic() - self.asked > PAUSE:
            self.asked = monotonic()
            if self.handle.get_group_store().check([self._alarm]):
                raise Elsewhere

    @property
    def _alarm(self) -> str:
        return f"biascope/failed/{self.meetings}"

    def _meet(self, error: Exception | None) -> None:
        """Wait for all ranks; if one has failed, its error is raised on all."""
        if self.size == 1:
            return
        failed = error is not None
        if failed and not isinstance(error, Elsewhere):
            with suppress(Exception):  # a store in a file, on a disk that is full: the others hear of it below
                self.handle.get_group_store().set(self._alarm, "1")
        flag = torch.tensor(int(failed), dtype=torch.int32, device=self.device)
        self._talk(dist.all_reduce, flag, op=dist.ReduceOp.MAX, group=self.handle)
        self.meetings += 1
        if not int(flag):
            return
        told: list[Any] = [None] * self.size
        mine = None if error is None or isinstance(error, Elsewhere) else _packed(error)
        self._talk(dist.all_gather_object, told, mine, group=self.handle)
        if mine is not None:
            assert error is not None
            error.rank = self.rank  # type: ignore[attr-defined]
            return  # it is on its way
        rank = next(rank for rank, message in enumerate(told) if message is not None)
        other = _unpacked(told[rank])
        other.rank = rank  # type: ignore[attr-defined]
        other.add_note(f"(raised on rank {rank} of {self.size})")
        raise other from None

    def _talk(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, **kwargs)
        except Exception:
            self.broken = True
            raise

    def _do(self, name: str, tensor: Tensor, **kwargs: Any) -> None:
        """One collective on a tensor wherever it lies and however its entries are ordered."""
        held = tensor if tensor.device.type in self.kinds else tensor.to(self.device)
        held = held.contiguous()
        self._talk(getattr(dist, name), held, group=self.handle, **kwargs)
        if held.data_ptr() != tensor.data_ptr():
            tensor.copy_(held)
        self.bytes[name] += tensor.numel() * tensor.element_size()

    def sum(self, *tensors: Tensor) -> Tensor:  # noqa: D102
        self._meet(None)
        for tensor in tensors:
            self._do("all_reduce", tensor)
        return tensors[0]

    def reduce(self, tensor: Tensor, owner: int) -> None:  # noqa: D102
        self._meet(None)
        self._do("reduce", tensor, group_dst=owner)

    def broadcast(self, tensor: Tensor, owner: int) -> None:  # noqa: D102
        self._meet(None)
        self._do("broadcast", tensor, group_src=owner)

    def concatenate(self, part: Tensor) -> Tensor:  # noqa: D102
        self._meet(None)
        held = part.to(self.device if part.device.type not in self.kinds else part.device).contiguous()
        out = held.new_empty(self.size * len(held), *held.shape[1:])
        self._talk(_first(dist, "all_gather_single", "all_gather_into_tensor"), out, held, group=self.handle)
        self.bytes["all_gather"] += out.numel() * out.element_size()
        return out.to(part.device)

    def sum_part(self, whole: Tensor) -> Tensor:  # noqa: D102
        self._meet(None)
        held = whole.to(self.device if whole.device.type not in self.kinds else whole.device).contiguous()
        out = held.new_empty(len(held) // self.size, *held.shape[1:])
        self._talk(_first(dist, "reduce_scatter_single", "reduce_scatter_tensor"), out, held, group=self.handle)
        self.bytes["reduce_scatter"] += held.numel() * held.element_size()
        return out.to(whole.device)

    def gather(self, value: T) -> list[T]:  # noqa: D102
        if self.size == 1:
            return [value]
        self._meet(None)
        found: list[Any] = [None] * self.size
        self._talk(dist.all_gather_object, found, value, group=self.handle)
        return found


def _first(module: Any, *names: str) -> Any:
    """The function by its newest name that this version of torch knows."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


_GROUPS: dict[str, Group] = {}  # by name, which torch gives to one group at a time


def processes(group: Any) -> Processes:
    """What stands behind a `group` argument: a process group, a device mesh, or None for this process alone."""
    if group is None:
        return ALONE
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        group = group.get_group() if group.ndim == 1 else group._flatten().get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this process is not in the group: make the call on the group's ranks only")
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is a {type(group).__name__}: a torch.distributed process group or device mesh is needed, e.g. "
            "torch.distributed.group.WORLD after init_process_group"
        )
    known = _GROUPS.get(group.group_name)
    if known is None or known.handle is not group:
        known = _GROUPS[group.group_name] = Group(group)
    return known


def _packed(error: Exception) -> tuple[bytes, str]:
    """An error to be sent: itself where it can be pickled, and its text."""
    text = f"{type(error).__name__}: {error}"
    try:
        return pickle.dumps(error), text
    except Exception:
        return b"", text


def _unpacked(message: tuple[bytes, str]) -> Exception:
    data, text = message
    try:
        error = pickle.loads(data)
    except Exception:
        error = None
    return error if isinstance(error, Exception) else RuntimeError(text)
