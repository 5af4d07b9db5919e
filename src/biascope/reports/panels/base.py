"""What a panel of the bias card gets (a `Subject`) and gives (a `Panel`)."""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from biascope.ensembles import Initialiser, record
from biascope.ensembles.redraw import redrawing
from biascope.reports.html import Html
from biascope.reports.panels import sources
from biascope.reports.panels.adapter import embedding, plain, shown_output
from biascope.reports.panels.budget import MINUTES, SHARES, Budget
from biascope.reports.panels.examples import Examples, load_examples
from biascope.reports.panels.fitness import check, comma, one_tensor
from biascope.reports.panels.fitting import Fit, fit_of
from biascope.reports.panels.loading import Weights, with_weights
from biascope.reports.panels.pace import Pace, in_words, measure
from biascope.support.arguments import device_of
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import free_memory
from biascope.support.seeds import derive, generator, seeded

T = TypeVar("T")
OWN_WEIGHTS = ", whose weights are the given ones"
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
    notes: tuple[str, ...] = ()  # what was done so that it fits, and what is left out
    words: int = 0  # tokens that a network of tokens knows
    single: bool = False  # one network that cannot be drawn again: `build` gives copies of it
    minutes: float = MINUTES  # that the whole card may take
    _shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def inputs(self, n: int) -> Tensor:
        """n real inputs [n, *input_shape], the same for every panel: of the data, or standard normal ones.

        For a network of tokens, the embeddings that network 0 gives to `examples`.
        """
        if self.words:
            table = embedding(self.network)
            assert table is not None
            with torch.no_grad():
                return table(self.examples(n)).clone()  # type: ignore[no-any-return]
        return self.examples(n)

    def examples(self, n: int) -> Tensor:
        """The n inputs as the network itself takes them: those above, or tokens [n, tokens]."""
        if self.data is not None:
            return self.data.x[:n].to(self.device)
        if self.words:
            rng = generator(self.seed, "card tokens")
            return torch.randint(self.words, (n, *self.input_shape[:-1]), generator=rng).to(self.device)
        rng = generator(self.seed, "card inputs")
        return torch.randn(n, *self.input_shape, generator=rng).to(self.device)

    @property
    def inputs_name(self) -> str:
        """What `inputs` are, in words."""
        own = "random token" if self.words else "Gaussian"
        return own if self.data is None else self.data.name.removeprefix("the data ")  # "60 given inputs"

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
            raise UnsupportedError(
                f"this panel draws many fresh networks, and {self.name} is one that cannot be drawn again: pass a "
                "function that builds a new one"
            )
        factory = self.factory
        return self.once("initialiser", lambda: record(factory))

    def seconds(self, title: str) -> float:
        """What the panel of this title may take of the card's time, which begins to run at the first call."""
        return self.once("budget", lambda: Budget.start(self.minutes, self.on_gpu)).of(title)

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

    def too_long(self, what: str, seconds: float, title: str) -> UnsupportedError:
        """That the least a panel can do does not fit, with what would help."""
        minutes = math.ceil(seconds / SHARES[title] / 60)
        place, gpu = ("this GPU", "") if self.on_gpu else ("this CPU", ", or a GPU (--device cuda)")
        return UnsupportedError(
            f"{what} would take about {in_words(seconds)} on {place}; give the card {in_words(60 * minutes)} "
            f"(--minutes {minutes}){gpu}"
        )


@dataclass(frozen=True)
class Panel:
    """One panel: how to read it, what the numbers mean here, and its blocks of markup.

    `headline` is its finding in one plain sentence that stands without the panel, "" where there is none; `picture`
    what the first screen may show beside it.
    """

    title: str
    read: str
    meaning: str
    blocks: Sequence[Html] = field(default=(), repr=False)
    skipped: bool = False
    headline: str = ""
    picture: Html = field(default=Html(""), repr=False)

    @property
    def anchor(self) -> str:
        """The id of its section on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


PanelFunction = Callable[[Subject], Panel]
_PANELS: dict[PanelFunction, int] = {}
_APPLIES: dict[PanelFunction, Callable[[Subject], bool]] = {}


def card_panel(
    order: int, applies: Callable[[Subject], bool] | None = None
) -> Callable[[PanelFunction], PanelFunction]:
    """Put a function on the card; panels appear in ascending order, of the networks to which they apply."""

    def register(function: PanelFunction) -> PanelFunction:
        _PANELS[function] = order
        if applies is not None:
            _APPLIES[function] = applies
        return function

    return register


def is_shown(panel: PanelFunction, subject: Subject) -> bool:
    """Does a panel apply to this kind of network?"""
    applies = _APPLIES.get(panel)
    return applies is None or applies(subject)


def registered() -> list[PanelFunction]:
    """All panels, in the order they appear."""
    return sorted(_PANELS, key=_PANELS.__getitem__)


def make_subject(
    spec: sources.Spec,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    networks: int | None = None,
    weights: Weights | None = None,
    data: Any = None,
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
        if "outputs" not in options and examples.classes and sources.takes(spec, "outputs"):
            options["outputs"] = examples.classes
    resolved, shape = sources.resolve(spec, input_shape, **options)
    weights = sources.weights_of(spec, weights)

    def drawn(factory: sources.Factory, child: int, what: str = "card init") -> nn.Module:
        with seeded(derive(seed, what, child)):
            return factory().eval()

    tokens = examples is not None and examples.tokens
    fit = fit_of(name, drawn(resolved, 0), shape, tokens)
    examples = _fitting(examples, fit, shape)

    def factory() -> nn.Module:
        return fit.wrap(resolved())

    one, notes = drawn(factory, 0), fit.notes
    draws: sources.Factory | None = factory
    if same(one, drawn(factory, 1)):
        weights, (again, how) = one if weights is None else weights, redrawing(plain(one), OWN_WEIGHTS)
        notes = (*notes, how if again else f"{how} to see the panels that average over initialisations.")
        draws = None if again is None else lambda: fit.wrap(again())

    def build(child: int) -> nn.Module:
        if draws is None:
            return copy.deepcopy(one).to(device)
        return drawn(draws, child, "card init" if draws is factory else "card redraw").to(device)

    subject = Subject(
        name, build, fit.shape, seed, device, networks, draws, None, examples, notes, fit.words, draws is None
    )
    check(name, subject.network, subject.inputs(2))
    if weights is not None and draws is not None:
        subject = replace(subject, trained=fit.wrap(with_weights(plain(build(0)), weights)).eval())
    return replace(subject, data=_for_outputs(subject))


def same(first: nn.Module, second: nn.Module) -> bool:
    """Do two calls of a factory give the same network?"""
    pairs = list(zip(first.parameters(), second.parameters()))
    return bool(pairs) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _fitting(examples: Examples | None, fit: Fit, shape: tuple[int, ...]) -> Examples | None:
    """The examples as the network takes them; refused where their shape is another."""
    if examples is None:
        return None
    if examples.tokens and not fit.words:  # whole numbers as features
        examples = replace(examples, x=examples.x.float())
    wanted = fit.shape[:-1] if examples.tokens else shape
    if tuple(examples.x.shape[1:]) != wanted:
        raise InputError(
            f"{examples.name} has inputs of shape {comma(examples.x.shape[1:])}, the network takes {comma(wanted)}; "
            "leave --input out to use the shape of the data"
        )
    return examples


def _for_outputs(subject: Subject) -> Examples | None:
    """Labels that fit the outputs: whole numbers are targets, not classes, for a network with one output."""
    examples = subject.data
    if examples is None or examples.classes <= 2:
        return examples
    with torch.no_grad():
        out = subject.network(subject.examples(2))
    return examples.as_numbers() if out[0].numel() == 1 else examples


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
    return all_outputs(subject, network, x)[:, shown_output(network)]


def all_outputs(subject: Subject, network: nn.Module, x: Tensor) -> Tensor:
    """The outputs of the network at x, [n, c]; anything but a tensor with the batch first is refused in words."""
    return one_tensor(subject.name, network(x), x)


def output_count(subject: Subject) -> int:
    """How many outputs the network has."""
    with torch.no_grad():
        return subject.once("outputs", lambda: all_outputs(subject, subject.network, subject.inputs(1)).shape[1])
