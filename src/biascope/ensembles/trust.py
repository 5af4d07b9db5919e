"""What is assumed of networks before many of them are run as one module with other tensors in it, checked once.

A stack of networks is one template and their parameters and buffers. So all that differs between two networks of a
factory must be among these; and where the gradient of one example is meant, examples must not look at each other.
"""

import weakref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from biascope.ensembles.engines import alike, call_rows, try_input
from biascope.ensembles.initialisers import Initialiser, build, tensors_of
from biascope.ensembles.networks import Networks
from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import explained
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.seeds import derive

SEVERAL = 8  # builds that do not all come out alike by chance
_WHOLE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SEPARATE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_networks(initialiser: Initialiser, networks: Networks, x: Tensor) -> None:
    """All that is asked of networks drawn by `initialiser` where gradients of single examples x [n, ...] are meant."""
    refuse_batch_dependence(initialiser.template)
    try_input(networks, x)
    refuse_hidden_randomness(initialiser, x)
    refuse_mixing(networks, x)


def refuse_hidden_randomness(initialiser: Initialiser, x: Tensor) -> None:
    """Raise if a network built anew is not the template with its tensors, seen on the first of x [n, ...].

    Then something that is drawn is neither a parameter nor a buffer, and all networks of a stack would share it.
    """
    template = initialiser.template
    if template in _WHOLE:
        return
    # where the factory is called for each network, what it builds may be random too
    for attempt in range(1 if initialiser.recorded else SEVERAL):
        _refuse_other_than(template, build(initialiser.factory, derive(0, "trust", attempt)).eval(), x)
    _WHOLE.add(template)


def _refuse_other_than(template: nn.Module, fresh: nn.Module, x: Tensor) -> None:
    """Raise if the template with the tensors of a network is not that network, seen on the first of x [n, ...]."""
    one = x[:1].detach().cpu()
    like = next((t for t in tensors_of(fresh).values() if t.is_floating_point()), one)
    one = one.to(like.dtype) if one.is_floating_point() else one
    with torch.no_grad(), explained(fresh, one):
        own, filled = (call_rows(module, tensors_of(fresh), one) for module in (fresh, template))
    if not alike(own, filled):
        kind, names = type(template).__name__, _differing(template, fresh)
        what = f"'{names[0]}' of {kind}, which is" if names else f"something in {kind} that is"
        fix = "all networks would share one draw of it; use register_buffer or nn.Parameter"
        raise InputError(f"the factory draws {what} neither a parameter nor a buffer: {fix}")


def refuse_mixing(networks: Networks, x: Tensor) -> None:
    """Raise if what a network gives for the first of x [n, ...], or beside it, depends on the rest of the batch."""
    template = networks.template
    refuse_batch_dependence(template)
    if template in _SEPARATE or not (x.is_floating_point() or len(x) > 1):
        return
    one = x[:1].detach()
    if _mixes(networks, one, 2 * one + 1 if one.is_floating_point() else x[1:2]):
        what = "gives an example another output when others are beside it in the batch"
        raise UnsupportedError(f"{type(template).__name__} {what}: its examples mix")
    _SEPARATE.add(template)


def can_be_cut(networks: Networks, x: Tensor) -> bool:
    """Whether outputs on inputs x [n, ...] are the same when they are run in pieces, seen on two that differ."""
    if networks.template in _SEPARATE:
        return True
    others = (x != x[:1]).reshape(len(x), -1).any(1).nonzero()[:1, 0]
    return not len(others) or not _mixes(networks, x[:1].detach(), x[others].detach())


def _mixes(networks: Networks, one: Tensor, other: Tensor) -> bool:
    """Whether the first network gives one of two examples [1, ...] another output when the other is beside it."""
    parts = (one, other, torch.cat([one, other]))
    try:  # in float64, where one example and two differ by no rounding that could be taken for mixing
        first, second, both = (_outputs(networks, part.cpu(), torch.float64) for part in parts)
    except (RuntimeError, TypeError):  # constants of another precision or place
        first, second, both = (_outputs(networks, part, networks.dtype) for part in parts)
    return not (alike(first, both[:1]) and alike(second, both[1:]))


@torch.no_grad()
def _outputs(networks: Networks, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Outputs [n, c] of the first network on x, where x is, in another precision."""
    values = {
        name: value.to(x.device, dtype if value.is_floating_point() else None)
        for name, value in networks.one(0).items()
    }
    return call_rows(networks.template, values, x.to(dtype) if x.is_floating_point() else x)


def _differing(template: nn.Module, fresh: nn.Module) -> list[str]:
    """Attributes of the modules, beside their tensors, whose numbers are not the same in both."""
    usual, found, others = vars(nn.Module()).keys(), list[str](), dict(fresh.named_modules())
    for name, part in template.named_modules():
        for key, value in vars(part).items():
            mine, its = (
                [torch.as_tensor(leaf) for leaf in tree_leaves(held) if isinstance(leaf, Tensor | int | float)]
                for held in (value, vars(others[name]).get(key))
            )
            same = len(mine) == len(its) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(mine, its))
            if key not in usual and not same:
                found.append(f"{name}.{key}" if name else key)
    return found
