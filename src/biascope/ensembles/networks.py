"""Many networks of one architecture: their parameters stacked, the architecture once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from biascope.support.errors import InputError
from biascope.support.signatures import checked

if TYPE_CHECKING:
    from biascope.ensembles.initialisers import Initialiser


@dataclass(frozen=True)
class Networks:
    """T networks: `params` and `buffers` are {name: [T, *shape]}; `template` is the module they are put into.

    `params` are what is trained and differentiated; parameters that the factory has frozen (`requires_grad` False) are
    among the `buffers`. Of networks as they were drawn, `drawn_by` says how: whether the template stands for all of
    them is checked with it before they are run.

    Example:
        >>> stacked = Networks(nn.Linear(2, 1, bias=False), {"weight": torch.ones(3, 1, 2)}, {})
        >>> len(stacked), stacked.module(0)(torch.ones(1, 2)).item()
        (3, 2.0)
    """

    template: nn.Module = field(repr=False)
    params: Mapping[str, Tensor] = field(repr=False)
    buffers: Mapping[str, Tensor] = field(repr=False)
    drawn_by: Initialiser | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        sizes = {**_lengths(self.params, "params"), **_lengths(self.buffers, "buffers")}
        if len(set(sizes.values())) > 1:
            raise InputError(f"stacks of different lengths: {sizes}")

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the factory, which is often a lambda."""
        return {**vars(self), "drawn_by": None}

    def __len__(self) -> int:
        return len(next(iter((*self.params.values(), *self.buffers.values()))))

    def __getitem__(self, index: slice) -> Networks:
        """Some of the networks, without a copy."""
        return self._each(lambda value: value[index])

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """`params`, of which there must be some."""
        if not self.params:
            raise InputError(f"all parameters of {type(self.template).__name__} are frozen: nothing is trained")
        return self.params

    @checked
    def to(self, device: torch.device | str) -> Networks:
        """The same networks on another device, detached."""
        return self._each(lambda value: value.detach().to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Networks:
        params, buffers = ({n: change(value) for n, value in part.items()} for part in (self.params, self.buffers))
        return Networks(self.template, params, buffers, drawn_by=self.drawn_by)

    @property
    def device(self) -> torch.device:
        """Where the stacks are."""
        return next(iter((*self.params.values(), *self.buffers.values()))).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters; where all are complex, that of their parts."""
        kinds = [value.dtype for value in (*self.params.values(), *self.buffers.values())]
        parts = [kind.to_real() for kind in kinds if kind.is_complex]
        return next((kind for kind in kinds if kind.is_floating_point), next(iter(parts), torch.get_default_dtype()))

    @checked
    def one(self, i: int) -> dict[str, Tensor]:
        """Parameters and buffers of network i, as views of the stacks."""
        return {name: value[i] for name, value in (*self.params.items(), *self.buffers.items())}

    @checked
    def module(self, i: int) -> nn.Module:
        """Network i as a module of its own, in eval mode, in the stacks' precision and place."""
        made = copy.deepcopy(self.template).to(self.device)
        own = dict((*made.named_parameters(), *made.named_buffers()))
        for name, value in self.one(i).items():
            own[name].data = value.detach().clone()
        for name in self.params:
            own[name].requires_grad_(True)
        return made


def stack_of(module: nn.Module) -> Networks:
    """One module as a stack of one network, in its own mode and without a copy."""
    trained = {name: p.detach()[None] for name, p in module.named_parameters() if p.requires_grad}
    others = (*module.named_parameters(), *module.named_buffers())
    return Networks(module, trained, {name: value.detach()[None] for name, value in others if name not in trained})


def _lengths(stacks: Any, what: str) -> dict[str, int]:
    if not isinstance(stacks, Mapping) or not all(isinstance(t, Tensor) and t.dim() for t in stacks.values()):
        raise InputError(f"{what} must be a dict of tensors [T, ...], one stack for each name of the template")
    return {name: len(stack) for name, stack in stacks.items()}
