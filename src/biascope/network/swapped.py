"""Calling a module with other tensors in the place of its own.

`torch.func.functional_call` of a module that holds one submodule in several places leaves the other tensors in it (seen
in torch 2.11 to 2.13): it swaps that submodule's tensors once per name and swaps them back in the same order, so that
what was put in first comes back last. Here every place is swapped once.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Places = dict[str, tuple[str, ...]]
_PLACES: weakref.WeakKeyDictionary[nn.Module, Places | None] = weakref.WeakKeyDictionary()


def functional_call(
    module: nn.Module,
    tensors: Mapping[str, Tensor] | tuple[Mapping[str, Tensor], ...],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`torch.func.functional_call`, after which the module is as it was, also with a submodule in several places.

    Example:
        >>> block = nn.Linear(2, 2)
        >>> net = nn.Sequential(nn.Sequential(block), nn.Sequential(block))
        >>> wide = {name: p.double() for name, p in net.named_parameters()}
        >>> functional_call(net, wide, (torch.ones(1, 2).double(),)).dtype, block.weight.dtype
        (torch.float64, torch.float32)
    """
    places = _places(module)
    if places is None:
        return torch.func.functional_call(module, tensors, args, kwargs)  # type: ignore[arg-type]
    whole = tensors if isinstance(tensors, Mapping) else {name: t for part in tensors for name, t in part.items()}
    each = {place: t for name, t in whole.items() for place in places.get(name, (name,))}
    return torch.func.functional_call(module, each, args, kwargs, tie_weights=False)


def _places(module: nn.Module) -> Places | None:
    """For every name of a tensor the names that stand for the places where it is; None if no module is held twice."""
    if module not in _PLACES:
        _PLACES[module] = _find(module)
    return _PLACES[module]


def _find(module: nn.Module) -> Places | None:
    paths = list(module.named_modules(remove_duplicate=False))
    if len(paths) == len({id(part) for _, part in paths}):
        return None
    first: dict[tuple[int, str], str] = {}  # the name of a place: a module and the tensor's name in it
    tensors: dict[int, dict[str, None]] = {}  # the places of a tensor
    names: dict[str, int] = {}
    for path, part in paths:
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                name = f"{path}.{leaf}" if path else leaf
                place = first.setdefault((id(part), leaf), name)
                tensors.setdefault(id(tensor), {})[place] = None
                names[name] = id(tensor)
    return {name: tuple(tensors[tensor]) for name, tensor in names.items()}
