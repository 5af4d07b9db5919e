"""The network compiled by `torch.compile`, where so many will be run through it that this pays.

Most of a deep network's time on a GPU is reading and writing what lies between its convolutions; the compiler joins
normalisation, activation and concatenation into one pass. It takes up to a minute, so it is used only on CUDA and only
after, or for, that much work. What it made is compared with the plain network before it is trusted.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from biascope.ensembles.networks import Networks

PAYS = 60.0  # seconds of work, done or to come, from which compiling is worth its time
LIMITS = {"float32": 1e-4, "tf32": 0.05, "fp16": 0.05, "bf16": 0.2}  # relative; a wrong kernel is wrong by far more
BACKEND = "inductor"


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
    seconds: float = 0.0
    made: dict[tuple[object, ...], Compiled | None] = field(default_factory=dict)


_HISTORIES: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


def worth_compiling(template: nn.Module, seconds: float, now: int, total: int) -> bool:
    """Whether the work so far and the `total` networks to come, `seconds` each, pay for a compilation.

    `now` of them are run after this question, and counted as done when it is asked again.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> worth_compiling(net, 1.0, 40, 40), worth_compiling(net, 1.0, 40, 40)
        (False, True)
    """
    history = _HISTORIES.setdefault(template, _History())
    pays = history.seconds + seconds * total >= PAYS
    history.seconds += seconds * now
    return pays


def compiled(networks: Networks, x: Tensor, precision: str, channels_last: bool) -> Compiled | None:
    """The template compiled for inputs like x [n, ...], or None where torch cannot, or not rightly (with a warning).

    Made once for an architecture, a shape and a precision. To be called in the mode it will be used in (arithmetic,
    no gradients).
    """
    history = _HISTORIES.setdefault(networks.template, _History())
    key = (networks.device, networks.dtype, tuple(x.shape), precision, channels_last)
    if key not in history.made:
        history.made[key] = _compile(networks, x, precision, channels_last)
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
    warnings.warn(f"torch.compile does not work here, going on without it ({reason})", stacklevel=3)
    return None
