"""Two checkpoints read side by side: what is a weight, what a statistic, what is tied, and what does not fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from biascope.network.door import uninitialised
from biascope.network.functional import ParamSelection, select_params
from biascope.support.errors import InputError

State = nn.Module | Mapping[str, Tensor]  # a module, its state_dict, or {name: tensor}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's, known by name in a state dict


@dataclass(frozen=True)
class Checkpoint:
    """What a module or a state dict holds.

    tensors: {name: tensor}, every name of a tied tensor; not copied. buffers: the names that are not weights.
    """

    tensors: dict[str, Tensor]
    buffers: frozenset[str]


def read(source: State, what: str) -> Checkpoint:
    """Weights and persistent buffers of a module, or the tensors of a state dict."""
    if isinstance(source, nn.Module):
        module: nn.Module = getattr(source, "_orig_mod", source)  # a compiled module hides the original one here
        tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        buffers = {
            f"{path}.{key}" if path else key: b
            for path, m in module.named_modules(remove_duplicate=False)
            for key, b in m._buffers.items()
            if b is not None and key not in m._non_persistent_buffers_set
        }
        tensors, known = {**tensors, **buffers}, frozenset(buffers)
        if any(map(is_lazy, tensors.values())):
            raise uninitialised(tensors)
    else:
        odd = next((f"{k!r} is a {type(t).__name__}" for k, t in source.items() if not isinstance(t, Tensor)), None)
        if odd is not None:
            raise InputError(f"{what}: {odd}, not a tensor; pass the state dict itself, e.g. checkpoint['state_dict']")
        tensors = dict(source)
        known = frozenset(k for k in tensors if k.rpartition(".")[2] in STATISTICS)
    return Checkpoint({k: t.detach() for k, t in tensors.items()}, known)


def place(t: Tensor) -> tuple[object, ...]:
    """Where a tensor lives in memory: equal for tied tensors."""
    return (t.device, t.data_ptr(), tuple(t.shape), t.stride()) if t.numel() else (id(t),)


def tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of one and the same tensor, in groups; every name is in one group."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, t in tensors.items():
        groups.setdefault(place(t), []).append(name)
    return list(groups.values())


def joined(first: Iterable[list[str]], second: Iterable[list[str]]) -> list[list[str]]:
    """Groups in which two names are together if they are in either of the two."""
    of: dict[str, list[str]] = {}
    for group in [*first, *second]:
        merged = list(dict.fromkeys(name for g in group for name in of.get(g, [g])))
        of |= dict.fromkeys(merged, merged)
    unique = {id(group): group for group in of.values()}
    return list(unique.values())


def agree(a: Tensor, b: Tensor, name: str, whose: tuple[str, str]) -> None:
    """Raise unless shape, precision and device of a tensor are the same on both sides."""
    for kind, left, right, fix in (
        ("shape", list(a.shape), list(b.shape), "these are not two states of one network"),
        ("dtype", a.dtype, b.dtype, "convert one of them with .to(dtype)"),
        ("device", a.device, b.device, "move one of them with .to(device)"),
    ):
        if left != right:
            raise InputError(f"'{name}' has {kind} {left} in {whose[0]} and {right} in {whose[1]}: {fix}")


def listed(names: Iterable[str], most: int = 3) -> str:
    """A few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def chosen(side: Checkpoint, statistics: frozenset[str], params: ParamSelection) -> Checkpoint:
    """The selected parameters, and the buffers of the selected part where a selection is by name."""
    if params == "all":
        return side
    names = set(select_params(side.tensors, params))
    return Checkpoint({k: t for k, t in side.tensors.items() if k in names}, statistics & names)


def one(tensors: Mapping[str, Tensor], names: Sequence[str], who: str) -> Tensor:
    """The tensor behind tied names, of which a side may lack some but not all, and may not have different ones."""
    have = [name for name in names if name in tensors]
    if not have:
        raise InputError(f"'{names[0]}' is not in {who}: name the parameters that both have with params=...")
    first = tensors[have[0]]
    for name in have[1:]:
        t = tensors[name]
        if place(t) != place(first) and not (t.shape == first.shape and torch.equal(t, first)):
            raise InputError(f"'{have[0]}' and '{name}' are tied on the other side, but differ in {who}")
    return first


def belongs(name: str, a: Tensor, b: Tensor, statistic: bool, buffers: str) -> bool:
    """Whether a tensor is part of the vector; raises where leaving it out would change what the model computes."""
    if a.is_floating_point() and not statistic:
        return True
    if name.rpartition(".")[2] == "num_batches_tracked" or buffers == "keep" or torch.equal(a, b):
        return a.is_floating_point() and buffers == "move"
    if not a.is_floating_point() or buffers == "refuse":
        raise InputError(f"the buffer '{name}' ({a.dtype}) differs: use buffers='keep', or 'move' if it is no integer")
    return True
