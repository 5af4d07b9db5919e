"""The network compiled by `torch.compile`, where so many will be run through it that this pays.

Most of a deep network's time on a GPU is reading and writing what lies between its convolutions; the compiler joins
normalisation, activation and concatenation into one pass. It takes up to a minute, so it is used only on CUDA and only
after, or for, that much work. What it made is compared with the plain network before it is trusted.

For training (outputs, and the way back) it takes up to two minutes and saves less: on an H200 a step of DenseNet-121
takes 8.8 instead of 13.4 ms, one of ResNet-18 2.0 instead of 2.4.
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import Precision, arithmetic
from biascope.network.derivatives import writes_into_inputs

Forward = Callable[[nn.Module, Tensor], Tensor]  # outputs of a module on a batch, to be differentiated

PAYS = 60.0  # seconds of work, done or to come, from which compiling is worth its time
TRAINING_PAYS = 300.0
LIMITS = {"float32": 1e-4, "tf32": 0.05, "fp16": 0.05, "bf16": 0.2}  # relative; a wrong kernel is wrong by far more
KINKS = 0.02  # relative; one ReLU that rounding turns on or off changes the gradient of a small network by 1e-3
BACKEND = "inductor"
OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"fallback_random": True}}  # a seed's dropout is as without compiling


@dataclass(frozen=True)
class Compiled:
    """A copy of the network whose parameters can be overwritten, and the compiled function that uses them."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]

    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers, to be written into."""
        return dict((*self.module.named_parameters(), *self.module.named_buffers()))


@dataclass
class _History:
    seconds: dict[bool, float] = field(default_factory=dict)  # of work so far; True: of training
    made: dict[tuple[object, ...], Compiled | None] = field(default_factory=dict)
    training: dict[tuple[object, ...], Forward | None] = field(default_factory=dict)


_HISTORIES: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


def worth_compiling(template: nn.Module, seconds: float, now: int, total: int, training: bool = False) -> bool:
    """Whether the work so far and the `total` networks to come, `seconds` each, pay for a compilation.

    `now` of them are run after this question, and counted as done when it is asked again. Training is counted apart.
    """
    history = _HISTORIES.setdefault(template, _History())
    so_far = history.seconds.get(training, 0.0)
    history.seconds[training] = so_far + seconds * now
    return so_far + seconds * total >= (TRAINING_PAYS if training else PAYS)


def compiled(networks: Networks, x: Tensor, precision: str, channels_last: bool) -> Compiled | None:
    """The template compiled for inputs like x [n, ...], or None where torch cannot, or not rightly (with a warning).

    Made once for an architecture, a shape and a precision. To be called in the mode it will be used in (arithmetic,
    no gradients).
    """
    history = _HISTORIES.setdefault(networks.template, _History())
    key = (networks.device, networks.dtype, tuple(x.shape), precision, channels_last)
    if key not in history.made:
        copied = writes_into_inputs(networks.template)  # then every call needs its own copies, which `call` makes
        history.made[key] = None if copied else _compile(networks, x, precision, channels_last)
    return history.made[key]


def _compile(networks: Networks, x: Tensor, precision: str, channels_last: bool) -> Compiled | None:
    module = networks.module(0).requires_grad_(False)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        call = torch.compile(module, dynamic=False, backend=BACKEND)
        got, expected = call(x), module(x)
        off = float((got.float() - expected.float()).norm() / expected.float().norm())
    except Exception as error:  # the compiler has as many errors as it has parts, and is never needed
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    else:
        if off <= LIMITS[precision]:
            return Compiled(module, call)
        reason = f"its outputs are {off:.2g} off in {precision}"
    _give_up(reason)
    return None


def compiled_training(networks: Networks, x: Tensor, precision: Precision, make: bool = True) -> Forward | None:
    """Outputs of any of the networks in training mode on batches like x [n, ...], or None (see `compiled`).

    Gradients by autograd of what it returns are compiled too. The module's own parameters are used and its buffers are
    changed in place, as by the plain call. `make=False` gives what was made for this shape before, or None.
    """
    history = _HISTORIES.setdefault(networks.template, _History())
    key = (networks.device, networks.dtype, tuple(x.shape), precision)
    if make and key not in history.training:
        history.training[key] = _compile_training(networks, x, precision)
    return history.training.get(key)


def _compile_training(networks: Networks, x: Tensor, precision: Precision) -> Forward | None:
    template = networks.module(0).train()

    def outputs(values: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(template, values, (x,))
        return found

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return made(dict((*module.named_parameters(), *module.named_buffers())), x)

    try:
        made = torch.compile(outputs, dynamic=False, backend=BACKEND, options=OPTIONS.get(BACKEND))
        exact = _trial(networks, nn.Module.__call__, x, "float32")
        plain, ours = (_trial(networks, call, x, precision) for call in (nn.Module.__call__, forward))
        with torch.compiler.set_stance("fail_on_recompile"):  # in a graph's capture it could not be compiled again
            _trial(networks, forward, x, precision, passes=2)
    except Exception as error:  # as above
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    else:
        off, least = _off(ours[0], plain[0]), _off(plain[1], exact[1])
        gradient = _off(ours[1], exact[1])
        # gradients of deep networks in 8 bits are far from those in 24, compiled or not: not farther is what counts
        if off <= LIMITS[precision] and gradient <= 1.5 * least + KINKS:
            return forward
        reason = f"in {precision} outputs are {off:.2g} and gradients {gradient:.2g} off, plain ones {least:.2g}"
    _give_up(reason)
    return None


def _trial(
    networks: Networks, call: Forward, x: Tensor, precision: Precision, passes: int = 1
) -> tuple[Tensor, Tensor]:
    """Outputs with buffers after passes in training mode, and the gradient of the outputs' squares, each [k]."""
    module = networks.module(0).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    params = [p for p in module.parameters() if p.requires_grad]
    with arithmetic(x.device, precision), torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        for _ in range(passes):
            out = call(module, x).float()
            found = torch.autograd.grad(out.square().mean(), params, allow_unused=True)
    kept = [value for value in (out.detach(), *module.buffers()) if value.is_floating_point()]
    return _flat(kept), _flat([gradient for gradient in found if gradient is not None])


def _flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.flatten().double() for value in values])


def _off(found: Tensor, expected: Tensor) -> float:
    """Relative distance; NaN where something is not finite, which no limit allows."""
    return float((found - expected).norm() / expected.norm())


def _give_up(reason: str) -> None:
    warnings.warn(f"torch.compile does not work here, going on without it ({reason})", stacklevel=4)
