"""The tangent model as a real nn.Module, and the alpha-scaled (lazy) one.

`bs.linearize` is this room and the function in it: the module object can be called, so `bs.linearize(model)` works
whether or not the submodule was imported before, and `bs.linearize.posthoc` is found as well.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch import nn

from biascope.functional import ParamSelection
from biascope.linearize.anchored import Anchored, State
from biascope.linearize.perturbation import PerturbationResponse, perturbation_response, random_directions
from biascope.linearize.residual import linearized_prediction, taylor_residual
from biascope.linearize.scaled import Lazy, lazy, lazy_lr
from biascope.linearize.tangent import Linearized, linearize, posthoc

__all__ = [
    "Anchored",
    "Lazy",
    "Linearized",
    "PerturbationResponse",
    "lazy",
    "lazy_lr",
    "linearize",
    "linearized_prediction",
    "perturbation_response",
    "posthoc",
    "random_directions",
    "taylor_residual",
]


class _CallableRoom(ModuleType):
    def __call__(
        self,
        model: nn.Module,
        at: State | None = None,
        *,
        centred: bool = False,
        params: ParamSelection = None,
        engine: str = "vjp",
    ) -> Linearized:
        return linearize(model, at, centred=centred, params=params, engine=engine)

    __call__.__doc__ = (linearize.__doc__ or "").partition("    Example:")[0]


sys.modules[__name__].__class__ = _CallableRoom
