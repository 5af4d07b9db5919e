"""What a panel of the bias card gets (a `Subject`) and gives (a `Panel`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from biascope.ensembles import Initialiser, record
from biascope.reports.html import Html
from biascope.reports.panels import sources
from biascope.reports.panels.fitness import Logits, comma, one_tensor, try_out
from biascope.reports.panels.loading import Examples, load_examples, load_state, put_weights
from biascope.reports.panels.pace import Pace, measure
from biascope.support.arguments import device_of
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import free_memory
from biascope.support.seeds import derive, generator, seeded

T = TypeVar("T")
RULE_BYTES = 60  # per parameter while the layer rules are checked: 58 measured on 20 million parameters in one layer


@dataclass(frozen=True)
class Subject:
    """The network a card is about: how to build it anew, and what goes in."""

    name: str
    build: Callable[[int], nn.Module]  # seed -> freshly initialised network in eval mode, on the device
    input_shape: tuple[int, ...]
    seed: int = 0
    device: str = "cpu"
    networks: int | None = None  # how many initialisations; None: what the time allows
    factory: sources.Factory | None = None  # builds one network from the global random state, for ensembles
    trained: nn.Module | None = None  # with the weights that were given
    data: Examples | None = None
    _shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def inputs(self, n: int) -> Tensor:
        """n inputs [n, *input_shape], the same for every panel: of the data, or standard normal ones."""
        if self.data is not None:
            return self.data.x[:n].to(self.device)
        rng = generator(self.seed, "card inputs")
        return torch.randn(n, *self.input_shape, generator=rng).to(self.device)

    @property
    def inputs_name(self) -> str:
        """What `inputs` are, in words."""
        return "Gaussian" if self.data is None else self.data.name

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What several panels need is made by the first one that asks."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]  # type: ignore[no-any-return]

    @property
    def network(self) -> nn.Module:
        """Network 0, built once and shared: copy it before you change it."""
        return self.once("network", lambda: self.build(0))

    def initialiser(self) -> Initialiser:
        """How the factory draws its networks, so that many are drawn at once and on the device."""
        if self.factory is None:
            raise UnsupportedError("this panel needs a factory that can be called again")
        factory = self.factory
        return self.once("initialiser", lambda: record(factory))

    def pace(self) -> Pace:
        """How fast the network is on this device, by a pilot of about a second."""
        return self.once("pace", lambda: measure(self.network, self.inputs(64)))

    def check_memory(self) -> None:
        """Refuse what needs the layer rules where there is no room to check them against autograd in float64."""
        parameters = sum(p.numel() for p in self.network.parameters())
        need, free = RULE_BYTES * parameters, free_memory(torch.device(self.device))
        if need > 0.8 * free:
            raise UnsupportedError(
                f"the tangent features of {parameters:,} parameters need about {need / 2**30:.2g} GiB of memory, and "
                f"{free / 2**30:.2g} GiB are free"
            )

    def forward_cost(self) -> int:
        """Floating-point operations of one forward pass of one example."""

        def count() -> int:
            counter = FlopCounterMode(display=False)
            with counter, torch.no_grad():
                first_output(self, self.network, self.inputs(1))
            return max(int(counter.get_total_flops()), 1)

        return self.once("forward cost", count)

    @property
    def on_gpu(self) -> bool:
        """Whether the card is made on a CUDA device."""
        return torch.device(self.device).type == "cuda"

    @property
    def place(self) -> str:
        """Where something takes too long, and what would help."""
        smaller = ", or try a smaller --input" if self.data is None else ""
        return "on this GPU" if self.on_gpu else f"on this CPU; add --device cuda{smaller}"


@dataclass(frozen=True)
class Panel:
    """One panel: how to read it, what the numbers mean here, and its blocks of markup."""

    title: str
    read: str
    meaning: str
    blocks: Sequence[Html] = field(default=(), repr=False)
    skipped: bool = False


PanelFunction = Callable[[Subject], Panel]
_PANELS: dict[PanelFunction, int] = {}


def card_panel(order: int) -> Callable[[PanelFunction], PanelFunction]:
    """Put a function on the card; panels appear in ascending order."""

    def register(function: PanelFunction) -> PanelFunction:
        _PANELS[function] = order
        return function

    return register


def registered() -> list[PanelFunction]:
    """All panels, in the order they appear."""
    return sorted(_PANELS, key=_PANELS.__getitem__)


def make_subject(
    spec: sources.Spec,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    networks: int | None = None,
    weights: str | Path | None = None,
    data: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Subject:
    """Resolve a network's name and try one forward pass, with the weights and data that were given.

    Without an `outputs` option, a registry network gets one output per class of the data.
    """
    options, name = {str(key): value for key, value in (options or {}).items()}, sources.name_of(spec)
    device_of(device)
    examples = load_examples(data, seed) if data is not None else None
    if examples is not None:
        input_shape = input_shape or tuple(examples.x.shape[1:])
        if "outputs" not in options and sources.takes(spec, "outputs"):
            options["outputs"] = examples.classes
    resolved, shape = sources.resolve(spec, input_shape, **options)
    if examples is not None and tuple(examples.x.shape[1:]) != shape:
        raise InputError(
            f"--data {data} has inputs of shape {comma(examples.x.shape[1:])}, the network takes {comma(shape)}; "
            "leave --input out to use the shape of the data"
        )

    def factory() -> nn.Module:
        made = resolved()
        return getattr(made, "_orig_mod", made)  # torch.compile hides the original one here

    def build(child: int) -> nn.Module:
        with seeded(derive(seed, "card init", child)):
            return factory().eval().to(device)

    subject = Subject(name, build, shape, seed, device, networks, factory, None, examples)
    logits = isinstance(try_out(name, subject.network, subject.inputs(2)), Logits)
    refuse_same(name, subject.network, build(1))
    trained = None if weights is None else put_weights(build(0), load_state(weights), weights)
    if not logits:
        return replace(subject, trained=trained)
    return replace(
        subject,
        build=lambda child: Logits(build(child)).eval(),
        factory=lambda: Logits(factory()),
        trained=None if trained is None else Logits(trained).eval(),
        _shared={},
    )


def refuse_same(name: str, first: nn.Module, second: nn.Module) -> None:
    """Refuse a function that does not initialise: of one network there is no average, and every error would be zero."""
    if first is second:
        raise InputError(f"{name} returned the same network twice; it must build a new one on every call")
    pairs = list(zip(first.parameters(), second.parameters()))
    if pairs and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
        raise InputError(
            f"{name} builds the same weights at every call, and a page is about freshly initialised networks: leave "
            "out what loads or fixes them (weights of your own go into a file: --weights trained.pt)"
        )


def refuse_dense(subject: Subject) -> None:
    """Refuse outputs that have a number for every place, such as the pixels of a U-Net, where a panel needs classes."""
    with torch.no_grad():
        shape = tuple(subject.once("output shape", lambda: subject.network(subject.inputs(1)).shape))[1:]
    if math.prod(shape[1:]) > 1:
        mean, places = (".flatten(2).mean(2)", "pixels") if len(shape) > 2 else (".mean(1)", "tokens")
        raise UnsupportedError(
            f"{subject.name} returns {' × '.join(map(str, shape))} numbers for one input, and this panel is about "
            f"classes: wrap it so that it returns one row per input, e.g. self.net(x){mean}, the mean over {places}"
        )


def first_output(subject: Subject, network: nn.Module, x: Tensor) -> Tensor:
    """The first output of the network at x, [n]: the scalar function whose bias the card shows."""
    return all_outputs(subject, network, x)[:, 0]


def all_outputs(subject: Subject, network: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the network at x, [n, c]; anything but a tensor with the batch first is refused in words."""
    return one_tensor(subject.name, network(x), x)
