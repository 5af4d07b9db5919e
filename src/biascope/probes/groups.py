"""Groups of examples that are followed by themselves: easy and hard, clean and noisy, majority and minority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from biascope.arguments import tensor_fix
from biascope.errors import InputError
from biascope.inputs import Inputs, batch_size, check_inputs, map_inputs

Group = Tensor | tuple[Inputs, Tensor]  # indices into the probe batch, or a batch (x, y) of its own


def as_groups(groups: Mapping[str, Any] | None, n: int) -> dict[str, Group]:
    """Groups as indices or batches, checked; one group "all" if none are given.

    Example:
        >>> as_groups({"hard": torch.tensor([False, True])}, 2)
        {'hard': tensor([1])}
    """
    if groups is None:
        return {"all": torch.arange(n, device="cpu")}
    if not isinstance(groups, Mapping):
        raise InputError(f"groups: expected {{name: indices}}, got {type(groups).__name__}")
    checked: dict[str, Group] = {}
    for name, group in groups.items():
        if isinstance(group, tuple):
            if len(group) != 2:
                raise InputError(f"groups[{name!r}]: a group of its own is (x, y), got {len(group)} things")
            inputs = check_inputs(group[0], f"groups[{name!r}]")
            check_labels(group[1], batch_size(inputs), f"groups[{name!r}]")
            checked[name] = (inputs, group[1])
            continue
        index = _indices(name, group, n)
        if index.dtype == torch.bool:
            if index.shape != (n,):
                raise InputError(f"groups[{name!r}]: a mask must be [{n}], got {list(index.shape)}")
            index = index.nonzero()[:, 0]
        if index.dim() != 1 or index.is_floating_point() or not len(index):
            raise InputError(f"groups[{name!r}]: expected indices of examples, a mask [{n}] or (x, y); got {group!r}")
        if int(index.min()) < 0 or int(index.max()) >= n:
            wrong = int(index.max()) if int(index.max()) >= n else int(index.min())
            raise InputError(f"groups[{name!r}] has index {wrong}, but the probe batch has {n} examples")
        checked[name] = index.long()
    if not checked:
        raise InputError("groups is empty: give {name: indices}")
    return checked


def _indices(name: str, group: Any, n: int) -> Tensor:
    try:
        return torch.as_tensor(group)
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(group).__name__
        raise InputError(
            f"groups[{name!r}]: expected indices of examples, a mask [{n}] or (x, y); got {got}"
        ) from error


def check_labels(y: Any, n: int, what: str) -> None:
    """Refuse what is no tensor of one label per example.

    Example:
        >>> check_labels([0, 1], 2, "y_probe")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: y_probe: expected a tensor of 2 labels, got list; pass torch.tensor(y_probe)
    """
    if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != n:
        got = f"{list(y.shape)}" if isinstance(y, Tensor) else f"{type(y).__name__}{tensor_fix(y, what)}"
        raise InputError(f"{what}: expected a tensor of {n} labels, got {got}")


def moved_groups(groups: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any] | None:
    """Groups with their own batches moved to a device.

    Example:
        >>> moved_groups({"test": (torch.eye(2), torch.arange(2))}, torch.device("cpu"))["test"][1]
        tensor([0, 1])
    """
    if groups is None:
        return None
    return {
        name: (map_inputs(g[0], lambda t: t.to(device)), g[1].to(device)) if isinstance(g, tuple) else g
        for name, g in groups.items()
    }
