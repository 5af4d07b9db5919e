"""What happens inside a network on a batch: signs at its activations, and its last hidden representation.

Seen by watching torch functions, so `nn.ReLU`, `F.relu` and `torch.relu` are the same thing and nothing is hooked on
the module.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from biascope.support.errors import InputError
from biascope.support.precision import arithmetic

# functions of one pre-activation; a unit is active where the pre-activation is positive
ACTIVATIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardtanh),
        *(F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu, F.rrelu, F.threshold),
        *(F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus, F.hardswish),
        *(torch.tanh, Tensor.tanh, F.tanh, torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.logsigmoid),
        *(torch.tanh_, Tensor.tanh_, torch.sigmoid_, Tensor.sigmoid_, F.hardtanh_, torch.threshold),
        *(F.elu_, F.selu_, F.celu_, F.rrelu_, torch.selu, torch.selu_, torch.celu, torch.celu_),
        *(torch.rrelu, torch.rrelu_, F.hardsigmoid, F.softsign),
    }
)


class Watch(TorchFunctionMode):
    """While it is on, keeps the signs of all pre-activations and the input of the last linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.signs: list[Tensor] = []
        self.hidden: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ACTIVATIONS:
            given = args[0] if args else kwargs["input"]
            self.signs.append(given.detach() > 0)  # before the call: it may work in place
        elif func is F.linear:
            self.hidden = (args[0] if args else kwargs["input"]).detach()
        return func(*args, **(kwargs or {}))


def activation_signs(call: Callable[[], Any], n: int) -> list[Tensor]:
    """Activation pattern of n examples: one boolean tensor [n, units] per activation, in the order of the calls.

    Units are also those of an example's rows [n rows, ...] (tokens in one long batch) and of its entries along the
    second dimension [rows, n, ...] (a transformer without batch_first); what has none of these shapes is no activation
    of examples and is left out.
    """
    with arithmetic("float32"), torch.no_grad(), Watch() as seen:  # tf32 would turn signs near 0
        call()
    signs = [rows.reshape(n, -1) for s in seen.signs if (rows := _by_example(s, n)) is not None]
    if not signs:
        raise InputError("the network has no activation (ReLU, GELU, tanh, ...) that could be watched: no signs")
    return signs


def _by_example(s: Tensor, n: int) -> Tensor | None:
    """With the examples (or several rows for each) along the first dimension; None where there is no such thing."""
    if s.dim() and s.shape[0] == n:
        return s
    if s.dim() > 2 and s.shape[1] == n:
        return s.transpose(0, 1)
    return s if s.dim() > 1 and s.numel() and s.shape[0] % n == 0 else None


def last_hidden(call: Callable[[], Any], n: int, module: nn.Module | None = None) -> Tensor:
    """Representation [n, d] that enters the last linear layer, or `module` (a layer of the network), if given."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())) if module else None
    try:
        with arithmetic("float32"), torch.no_grad(), Watch() as watch:
            call()
    finally:
        if hook is not None:
            hook.remove()
    hidden = (seen[-1] if seen else None) if module is not None else watch.hidden
    if hidden is None or hidden.shape[0] != n:
        got = "was called" if hidden is None else f"has {n} rows, but {list(hidden.shape)}"
        raise InputError(f"no linear layer {got}: name the layer whose input is the representation with layer='...'")
    return hidden.reshape(n, -1)
