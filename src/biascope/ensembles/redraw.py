"""One network as many: its initialisers are found and called again, where it was handed in ready made."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from biascope.support.errors import InputError

Factory = Callable[[], nn.Module]
ONE = (
    "Given as one network{}; initialisations are drawn {}. If yours initialises in another way, pass a function "
    "that builds a new one."
)
ALONE = "Given as one network, and no reset_parameters draws {} again: pass a function that builds a new network"
RESETS = ("reset_parameters", "_reset_parameters")  # as torch's layers call them


def from_transformers(net: object) -> bool:
    """Is this a model of the transformers library?"""
    return hasattr(net, "config") and hasattr(net, "main_input_name") and hasattr(type(net), "from_pretrained")


def drawn_again(net: nn.Module) -> Factory:
    """What `redrawing` finds, with a warning that says what it is; an error where there is nothing."""
    factory, how = redrawing(net)
    if factory is None:
        raise InputError(f"{type(net).__name__}: {how}")
    warnings.warn(f"{type(net).__name__}: {how}", stacklevel=6)
    return factory


def redrawing(net: nn.Module, kept: str = "") -> tuple[Factory | None, str]:
    """A function that builds networks like this one, freshly initialised, if there is one; and a sentence about it.

    A transformers model is built anew from its configuration. Elsewhere every layer's `reset_parameters` is called,
    then `_init_weights` or `init_weights` where the network has one. What its constructor did beside is not seen.

    Example:
        >>> factory, how = redrawing(nn.Linear(2, 2))
        >>> factory is not None, "reset_parameters" in how
        (True, True)
    """
    if from_transformers(net):
        kind: Any = type(net)
        return lambda: kind(copy.deepcopy(net.config)).float(), ONE.format(kept, "from its configuration")
    first, how = _drawn(net)
    left = [name for name, p in first.named_parameters() if p.numel() and bool(torch.isnan(p).any())]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        return None, ALONE.format(f"{', '.join(left[:3])}{more}")
    return lambda: _drawn(net)[0], ONE.format(kept, f"by {how}")


def _drawn(net: nn.Module) -> tuple[nn.Module, str]:
    """A copy in which all that is initialised is drawn again, NaN elsewhere; and who did it, in words."""
    made, how = copy.deepcopy(net), []
    with torch.no_grad():
        for p in made.parameters():
            if p.is_floating_point():
                p.fill_(torch.nan)
        for module in made.modules():
            for name in RESETS:
                if callable(reset := getattr(module, name, None)):
                    reset()
                    how = ["every layer's reset_parameters"]
                    break
        if callable(own := getattr(made, "_init_weights", None)):
            made.apply(own)
            how.append("its own _init_weights")
        elif callable(own := getattr(made, "init_weights", None)):
            own()
            how.append("its own init_weights")
    return made, " and ".join(how)
