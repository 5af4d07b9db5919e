"""What a card needs of a network; each refusal says what to do instead."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from biascope.support.errors import BiascopeError, InputError
from biascope.support.hints import arguments_of


def check(name: str, network: nn.Module, x: Tensor) -> None:
    """Run the network once on x [n, ...] and refuse what no panel could show."""
    if isinstance(network, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is TorchScript ({type(network).__name__}), whose parameters torch cannot swap: let the factory "
            "return the module it was made from, before torch.jit.script or torch.jit.trace"
        )
    try:
        y = network(x.clone().requires_grad_())
    except BiascopeError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and len(inputs := needed(network)) > 1:
            raise InputError(_for_one_input(name, inputs)) from error
        raise InputError(
            f"{name} does not take inputs of shape {comma(x.shape[1:])} ({type(error).__name__}: {error}); "
            f"{_remedy(network, x.shape[1:])}"
        ) from error
    y = one_tensor(name, y, x)
    if y.is_complex():
        raise InputError(f"{name} returns complex numbers: return their .real, .imag or .abs() instead")
    if not y.is_floating_point():
        raise InputError(
            f"{name} returns {y.dtype}, which has no derivative: return what it is computed from (the logits, before "
            "argmax or rounding)"
        )
    if not torch.isfinite(y).all():
        raise InputError(
            f"{name} gives nan or infinity at the inputs of the card: give inputs it is made for with --data FILE "
            "(x and y), or look for a logarithm, a root or a division in its forward"
        )
    parameters = list(network.parameters())
    if not parameters:
        raise InputError(f"{name} has no parameters, so there is nothing it could learn: add a layer that has weights")
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            f"every parameter of {name} is frozen (requires_grad=False), so there is nothing it could learn: let the "
            "factory return it before freezing"
        )
    if not y.requires_grad:
        raise InputError(
            f"the output of {name} has no derivative: take torch.no_grad(), .detach() or .data out of its forward"
        )


def one_tensor(name: str, y: Any, x: Tensor) -> Tensor:
    """y as [n, c]; anything but a tensor with the batch of x first is refused in words."""
    if not isinstance(y, Tensor):
        raise InputError(
            f"{name} returns a {type(y).__name__}, not a tensor: wrap it so that it returns the tensor you want to "
            f"look at, e.g. in {_wrapper(name, f'self.net(x){_entry(y)}')}"
        )
    if y.ndim == 0 or y.shape[0] != len(x):
        raise InputError(f"{name} maps a batch {tuple(x.shape)} to {tuple(y.shape)}; the first axis must stay")
    return y.reshape(len(x), -1)


def comma(shape: Any) -> str:
    """A shape as it is typed.

    Example:
        >>> comma((3, 32, 32))
        '3,32,32'
    """
    return ",".join(str(size) for size in shape)


def _wrapper(name: str, call: str) -> str:
    """What to write into which script, and what to type then."""
    script, colon, factory = name.rpartition(":")
    script, factory = (script, factory) if colon and script.endswith(".py") else ("script.py", "build")
    return (
        f"{script}\n"
        "    class Wrapped(nn.Module):\n"
        f"        def __init__(self): super().__init__(); self.net = {factory}()\n"
        f"        def forward(self, x): return {call}\n"
        f"and type {script}:Wrapped"
    )


def needed(network: nn.Module) -> list[str]:
    """Names of the inputs that a network cannot be called without."""
    return [name for name, needs in arguments_of(network).items() if needs]


def _for_one_input(name: str, inputs: Sequence[str]) -> str:
    first, *others = inputs
    still = ", ".join(f"{other}=x.new_zeros(len(x), {other.upper()}_SHAPE)" for other in others)
    shapes = " and ".join(f"{other.upper()}_SHAPE" for other in others)
    return (
        f"{name} takes {len(inputs)} inputs ({', '.join(inputs)}) and a card is about one: wrap it so that it cuts x "
        f"into them, or so that the others stand still (for {shapes} put the sizes of one such input, e.g. 3), in "
        f"{_wrapper(name, f'self.net({first}=x, {still})')}"
    )


def _entry(y: Any) -> str:
    """How to get at the first tensor of what a network returned."""
    if isinstance(y, Mapping):
        return f"[{next((key for key, value in y.items() if isinstance(value, Tensor)), 'logits')!r}]"
    return "[0]" if isinstance(y, list | tuple) else ".logits"


def _remedy(network: nn.Module, shape: Sequence[int]) -> str:
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return (
                f"its layer {name} looks up tokens by number, which has no derivative: wrap the network so that it "
                f"takes embedded tokens, and type --input TOKENS,{module.embedding_dim}"
            )
    for module in network.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            channels, axes = module.in_channels, len(module.kernel_size)
            if len(shape) == axes + 1 and shape[0] == channels:
                break
            pixels = shape[:-1] if len(shape) == axes + 1 and shape[-1] == channels else shape[1:]  # channels last
            needed = comma((channels, *[*pixels, *[32] * axes][:axes]))
            return (
                f"its first convolution takes {channels} channels: type --input {needed} (or give data of such a shape)"
            )
    first = next((m for m in network.modules() if isinstance(m, nn.Linear)), None)
    if first is not None and len(shape) == 1 != shape[0] != first.in_features:
        return f"its first linear layer takes {first.in_features} numbers: type --input {first.in_features}"
    return "give the shape of one input with --input, for example --input 3,32,32"
