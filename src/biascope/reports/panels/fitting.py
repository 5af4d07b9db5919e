"""How a network is made to fit a card, found by a trial: precision, lazy layers, tokens, what it returns."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from biascope.ensembles.redraw import from_transformers
from biascope.network.outputs import main_tensor
from biascope.reports.panels.adapter import (
    Adapted,
    Still,
    Way,
    argument_of,
    embedding,
    first_table,
    meant,
    one_row,
    plain,
)
from biascope.reports.panels.fitness import comma, needed
from biascope.support.errors import InputError

TRIALS = 200  # of shapes for the inputs beside the first


@dataclass(frozen=True)
class Fit:
    """What is done to every network of a card, the shape of one input then, and what the page says about it.

    `words` is the number of tokens a network of tokens knows: inputs are then their embeddings.
    """

    wrap: Callable[[nn.Module], nn.Module]
    shape: tuple[int, ...]
    notes: tuple[str, ...] = ()
    words: int = 0


def fit_of(name: str, network: nn.Module, shape: tuple[int, ...], tokens: bool = False) -> Fit:
    """The fit of a network in eval mode to inputs of a shape; `tokens`: the data are whole numbers of this shape.

    What no panel could show is refused with what to do instead.
    """
    network, notes = plain(network), []
    if kind := _other_precision(network):
        notes.append(f"Its weights are {kind}; they are computed in float32.")
    lazy = any(is_lazy(p) for p in network.parameters())
    argument, text = argument_of(network), False
    table: Any
    if argument == "inputs_embeds":
        table = network.get_input_embeddings()  # type: ignore[operator]
        width = int(table.embedding_dim)
        text, shape = True, shape if len(shape) > 1 and not tokens else (*shape, width)
    elif not argument:
        first = first_table(network)
        if first and (tokens or _only_takes_tokens(network, shape)):
            table = network.get_submodule(first)
            width = int(table.embedding_dim)
            taken = tokens or _runs(network, torch.zeros(2, *shape, dtype=torch.long))
            text, shape = True, (*shape, width) if taken else shape  # TOKENS, or TOKENS,WIDTH
            argument = f"table:{first}"
    if tokens and not text:
        tokens = False  # whole numbers as features
    trial = torch.zeros(2, *shape)

    def ready(net: nn.Module) -> nn.Module:
        net = plain(net)
        if kind:
            net = copy.deepcopy(net).float()
        if any(is_lazy(p) for p in net.parameters()):
            _initialise(name, net, trial)
        return net

    network = ready(network)
    take = one_row if from_transformers(network) else meant
    still = {} if argument else _standing_still(network, shape)
    table = argument.removeprefix("table:") if argument.startswith("table:") else ""
    way = Way(take, "" if table else argument, table, still)

    def adapted(net: nn.Module) -> nn.Module:
        return Adapted(ready(net), way)

    if still:
        names = ", ".join(f"{other} = zeros [n{''.join(f', {s}' for s in size)}]" for other, (size, _) in still.items())
        notes.append(f"It takes {1 + len(still)} inputs: the card is about the first one, with {names}.")
    whole = argument != "" or from_transformers(network) or bool(still)
    if not whole:  # does it return one tensor?
        out = _output(network, trial)
        where = main_tensor(out)[1]
        if where:
            notes.append(f"Of what it returns, a {type(out).__name__}, the card shows {where}.")
            whole = True
    if lazy:
        notes.append("Its lazy layers got their sizes from a trial with one input.")
    wrap = adapted if whole else ready
    fitted = wrap(network)
    words = 0
    if text and (held := embedding(fitted)) is not None:
        words = held.num_embeddings
        notes.append(
            "Its inputs are tokens: derivatives by the input are taken by the embedded tokens "
            f"{' × '.join(map(str, shape))}, kernels at the tokens themselves."
        )
    if from_transformers(network):
        notes.append("Its output is one row per example: the logits (of the last token), or else the pooled output.")
    return Fit(wrap, shape, tuple(notes), words)


def _standing_still(network: nn.Module, shape: tuple[int, ...]) -> Still:
    """Shapes and kinds of the inputs beside the first, found by trial; none where it needs no others, or none will do.

    Numbers, and vectors as wide as some linear layer takes; inputs like the first one; real or whole.
    """
    others = needed(network)[1:]
    if not 1 <= len(others) <= 2:
        return {}
    widths = dict.fromkeys(m.in_features for m in network.modules() if isinstance(m, nn.Linear))
    shapes = dict.fromkeys([shape, (), (1,), *((width,) for width in widths)])
    for guess in islice(product(product(shapes, (torch.float32, torch.long)), repeat=len(others)), TRIALS):
        still = dict(zip(others, guess))
        tried = Adapted(network, Way(meant, still=still))
        if all(_keeps_batch(tried, torch.zeros(n, *shape)) for n in (3, 5)):  # of one size it may be an accident
            return still
    return {}


def _keeps_batch(network: nn.Module, x: Tensor) -> bool:
    with torch.no_grad(), suppress(Exception):
        out = network(x)
        return isinstance(out, Tensor) and out.shape[:1] == x.shape[:1]
    return False


def _other_precision(network: nn.Module) -> str:
    kinds = {p.dtype for p in network.parameters() if p.is_floating_point() and not is_lazy(p)} - {torch.float32}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _initialise(name: str, network: nn.Module, trial: Tensor) -> None:
    """Run a lazy network once."""
    was = network.training
    try:
        with torch.no_grad():
            network.eval()(trial)
    except Exception as error:
        raise InputError(
            f"{name} has lazy layers, and a trial with inputs of shape {comma(trial.shape[1:])} to give them their "
            f"sizes failed ({type(error).__name__}: {error})"
        ) from error
    network.train(was)


def _runs(network: nn.Module, x: Tensor) -> bool:
    with torch.no_grad(), suppress(Exception):
        network(x.to(next(network.parameters()).device))
        return True
    return False


def _output(network: nn.Module, x: Tensor) -> Any:
    with torch.no_grad(), suppress(Exception):
        return network(x)
    return None  # `check` says what is wrong


def _only_takes_tokens(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Does it refuse real inputs and take whole numbers, of this shape or without its last axis?"""
    kinds = {p.dtype for p in network.parameters() if p.is_floating_point() and not is_lazy(p)}
    real = torch.zeros(2, *shape, dtype=next(iter(kinds), torch.float32))
    if _runs(network, real):
        return False
    whole = torch.zeros(2, *shape, dtype=torch.long)
    return _runs(network, whole) or (len(shape) > 1 and _runs(network, whole[..., 0]))
