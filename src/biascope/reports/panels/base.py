"""What a panel of the bias card gets (a `Subject`) and gives (a `Panel`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope import nets
from biascope.errors import BiascopeError, InputError
from biascope.reports.html import Html
from biascope.seeds import derive, generator


@dataclass(frozen=True)
class Subject:
    """The network a card is about: how to build it anew, and what goes in."""

    name: str
    build: Callable[[int], nn.Module]  # seed -> freshly initialised network in eval mode, on the device
    input_shape: tuple[int, ...]
    seed: int = 0
    device: str = "cpu"
    networks: int | None = None  # how many initialisations; None: as many as fit into about half a minute

    def inputs(self, n: int) -> Tensor:
        """n standard normal inputs [n, *input_shape], the same for every panel."""
        rng = generator(self.seed, "card inputs")
        return torch.randn(n, *self.input_shape, generator=rng).to(self.device)


@dataclass(frozen=True)
class Panel:
    """One panel: how to read it, what the numbers mean here, and its blocks of markup."""

    title: str
    read: str
    meaning: str
    blocks: Sequence[Html] = ()
    skipped: bool = False


PanelFunction = Callable[[Subject], Panel]


def make_subject(
    spec: str,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    networks: int | None = None,
) -> Subject:
    """Resolve a registry name, `package.module:factory` or `script.py:factory` and try one forward pass.

    Example:
        >>> make_subject("lenet").input_shape
        (1, 32, 32)
    """
    factory = nets.resolve(spec)
    options: dict[str, Any] = {}
    if ":" in spec:
        if input_shape is None:
            raise InputError(f"{spec}: say what one input looks like, for example --input 3,32,32")
        shape = tuple(input_shape)
    else:
        info = nets.info(spec)
        shape = tuple(input_shape or info.input_shape)
        if shape != info.input_shape:
            options = info.options_for(shape)

    def build(child: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(seed, "card init", child))
            return factory(**options).eval().to(device)

    subject = Subject(spec, build, shape, seed, device, networks)
    _try(subject)
    return subject


def first_output(subject: Subject, network: nn.Module, x: Tensor) -> Tensor:
    """The first output of the network at x, [n]: the scalar function whose bias the card shows."""
    y = network(x)
    if not isinstance(y, Tensor):
        raise InputError(
            f"{subject.name} returns a {type(y).__name__}, not a tensor: "
            "wrap it so that it returns the tensor you want to look at"
        )
    if y.ndim == 0 or y.shape[0] != len(x):
        raise InputError(f"{subject.name} maps a batch {tuple(x.shape)} to {tuple(y.shape)}; the first axis must stay")
    return y.reshape(len(x), -1)[:, 0]


def _try(subject: Subject) -> None:
    x = subject.inputs(2)
    try:
        with torch.no_grad():
            first_output(subject, subject.build(0), x)
    except BiascopeError:
        raise
    except Exception as error:
        shape = ",".join(str(size) for size in subject.input_shape)
        raise InputError(
            f"{subject.name} does not take inputs of shape {shape} ({type(error).__name__}: {error}); "
            "give the shape of one input with --input, for example --input 3,32,32"
        ) from error
