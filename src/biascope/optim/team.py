"""Optimisers on several processes (DDP, FSDP2): who they are, and gradients that are spread over them.

Every rank sees its own examples. What the factors are means of is added up over the ranks at every update, so that all
have the same running averages and any of them can save the state; eigenvectors come from the rank they are dealt to.
"""

from typing import Any

from torch import Tensor, nn

from biascope.network.shards import Cut, dtensor, is_sharded, local
from biascope.support.processes import ALONE, Processes, processes


def network_of(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel and torch.compile."""
    for wrapper in ("module" if isinstance(model, nn.parallel.DistributedDataParallel) else "", "_orig_mod"):
        model = getattr(model, wrapper, model)
    return model


def team_of(model: nn.Module, group: Any) -> Processes:
    """The processes that train a model: those of `group`, else of the wrapper that says so itself."""
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    sharded: Any = next((p for p in model.parameters() if is_sharded(p)), None)
    if group is None and sharded is not None:
        group = sharded.device_mesh
    return ALONE if group is None else processes(group)


def whole(t: Tensor, team: Processes) -> Tensor:
    """A gradient, put together where it is spread out."""
    return Cut(team, tuple(t.shape)).gather(local(t)) if is_sharded(t) else t


def like(t: Tensor, p: Tensor, team: Processes) -> Tensor:
    """A whole tensor, spread out as p is."""
    if not is_sharded(p) or is_sharded(t) or t.shape != p.shape:
        return t
    return dtensor(Cut(team, tuple(p.shape)).own(t).to(p.device), p)
