"""Outputs and input gradients of many networks, by whichever way is measured to be fastest here.

Ways to run T networks ("engines"):
  loop    one network after another; on the CPU also in the channels-last layout
  vmap    a group of networks in one call (`torch.func.vmap` over the stacked parameters)
  graph   one network after another, replayed as a CUDA graph (no launch overhead), compiled by torch.compile when the
          work is long; CUDA only
Small networks on few inputs want vmap, large ones the loop; a pilot on a small part decides, once per architecture and
shape of input. Memory is kept under a budget by cutting networks and inputs into pieces.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from biascope.ensembles.compiled import compiled, worth_compiling
from biascope.ensembles.engines import (
    Plan,
    Replay,
    alike,
    as_vmap,
    call_rows,
    layout,
    run_all,
    run_group,
    takes_channels_last,
    try_input,
)
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import Precision, arithmetic
from biascope.ensembles.trust import can_be_cut, refuse_hidden_randomness, refuse_mixing
from biascope.network.door import refuse_batch_dependence, refuse_inference_mode
from biascope.support.arguments import check_tensor, shown
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import budget
from biascope.support.signatures import checked

Engine = Literal["auto", "loop", "vmap", "graph"]
LAUNCH_BOUND = 2e-3  # seconds for one network on all inputs, above which launches no longer matter on a GPU
SEARCH_PAYS = 30.0  # seconds of work from which cuDNN may time its algorithms
LARGEST_TRIAL = 64  # networks run together when engines are compared
Scalarise = Callable[[Tensor], Tensor]  # outputs [n, c] -> [n]


_PLANS: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()


@checked
def outputs(
    networks: Networks,
    x: Tensor,
    *,
    per_network: bool = False,
    engine: Engine = "auto",
    precision: Precision = "float32",
    max_memory: str | int | None = None,
    plan: Plan | None = None,
    total: int = 0,
) -> Tensor:
    """Outputs [T, n, c] of T networks in the template's mode (eval, as drawn), without gradients.

    Args:
        networks: stacked networks, see `Initialiser.draw`.
        x: inputs [n, ...] for all networks, or [T, n, ...] with `per_network`.
        per_network: whether each network has inputs of its own.
        engine: "auto" measures; "loop", "vmap" and "graph" force a way.
        precision: of the network's arithmetic on CUDA; the outputs come back in float32.
        max_memory: for example "4GB"; by default 60 % of what is free.
        plan: how to run them, as an earlier call found it; by default a trial decides.
        total: networks that are still to be run with these inputs, in this call and later ones, if more than T: a long
            job is compiled on CUDA.

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 2)).draw(seed=0, start=0, stop=4)
        >>> outputs(drawn, torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    if not per_network:
        return Evaluator(x, engine, precision, max_memory, plan)(networks, total)
    x = _inputs(networks, x, per_network)
    with torch.no_grad(), arithmetic(networks.device, precision):
        return run_all(networks, x, plan or choose_plan(networks, x, True, engine, max_memory), True)


class Evaluator:
    """The outputs of one group of networks after another on the same inputs [n, ...]; options as of `outputs`.

    What was captured for the first group serves all: with 10,000 networks in groups of 200, capturing a deep network
    for each group costs as much as running it.

    Example:
        >>> from biascope.ensembles import record
        >>> initialiser, evaluate = record(lambda: nn.Linear(3, 2)), Evaluator(torch.ones(5, 3))
        >>> [tuple(evaluate(initialiser.draw(0, start, start + 4)).shape) for start in (0, 4)]
        [(4, 5, 2), (4, 5, 2)]
    """

    @checked
    def __init__(
        self,
        x: Tensor,
        engine: Engine = "auto",
        precision: Precision = "float32",
        max_memory: str | int | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.x, self.engine, self.precision, self.max_memory, self.plan = x, engine, precision, max_memory, plan
        self.replay: Replay | None = None

    def __call__(self, networks: Networks, total: int = 0) -> Tensor:
        """Outputs [T, n, c]; `total` networks are still to come, these among them."""
        x, total = _inputs(networks, self.x, False), max(total, len(networks))
        with torch.no_grad(), arithmetic(networks.device, self.precision):
            plan = self.plan = self.plan or choose_plan(networks, x, False, self.engine, self.max_memory)
            if plan.engine != "graph":
                return run_all(networks, x, plan, False)
            long = worth_compiling(networks.template, plan.seconds, len(networks), total)
            if self.replay is None or not self.replay.serves(networks, plan, long):
                self.replay = None  # its memory first
                first = layout(x[: plan.inputs], plan.channels_last)
                made = compiled(networks, first, self.precision, plan.channels_last) if long else None
                self.replay = Replay(networks, x, plan, made, long, plan.seconds * total >= SEARCH_PAYS)
            return self.replay(networks)


@checked
def input_gradients(
    networks: Networks,
    x: Tensor,
    *,
    per_network: bool = False,
    scalarise: Scalarise | None = None,
    engine: Literal["auto", "loop", "vmap"] = "auto",
    max_memory: str | int | None = None,
) -> Tensor:
    """Gradients [T, n, ...] of a scalar of the output with respect to the input.

    The scalar is the only output, the difference of two logits (the same eigenvectors at initialisation, twice the
    second moment), or what `scalarise` makes of the outputs [n, c] -> [n].

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=4)
        >>> g = input_gradients(drawn, torch.ones(1, 3))
        >>> bool(torch.equal(g[:, 0], drawn.params["weight"][:, 0]))
        True
    """
    refuse_inference_mode()
    refuse_batch_dependence(networks.template)
    x = _inputs(networks, check_tensor(x, "x", floating=True).detach(), per_network)
    T, n = len(networks), (x.shape[1] if per_network else len(x))

    def scalar(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return scalar_of(call_rows(networks.template, values, inputs), scalarise).sum()

    def looped(group: Networks, inputs: Tensor) -> Tensor:
        found = []
        with torch.enable_grad(), _no_second_run(group.template):
            for i in range(len(group)):
                leaf = (inputs[i] if per_network else inputs).detach().requires_grad_(True)
                found.append(torch.autograd.grad(scalar(group.one(i), leaf), leaf)[0])
        return torch.stack(found)

    def mapped(group: Networks, inputs: Tensor) -> Tensor:
        values = {**group.params, **group.buffers}
        with as_vmap("differentiate", group.template):
            found: Tensor = vmap(grad(scalar, argnums=1), in_dims=(0, 0 if per_network else None))(values, inputs)
        return found

    per_input = 4 * activation_bytes(networks, x, per_network)
    refuse_mixing(networks, x[0] if per_network else x)
    room = budget(max_memory, networks.device)
    inputs = max(1, min(n, room // (2 * per_input)))
    group = max(1, min(T, 256, room // (2 * per_input * inputs)))
    if engine == "auto":
        key = ("grad", inputs, tuple(x.shape[1:]), per_network, networks.device)
        cache = _PLANS.setdefault(networks.template, {})
        if key not in cache:
            few = networks[: min(group, 16, T)]
            own = x[: len(few), :inputs] if per_network else x[:inputs]
            times = {"loop": _seconds(lambda: looped(few, own))}
            with suppress(RuntimeError, NotImplementedError):  # vmap does not know every operation; the loop does
                times["vmap"] = _seconds(lambda: mapped(few, own))
            cache[key] = Plan(min(times, key=lambda name: times[name]), inputs)
        engine = "vmap" if cache[key].engine == "vmap" else "loop"
    run = mapped if engine == "vmap" else looped
    rows = []
    with arithmetic(networks.device, "float32"):  # torch's own default is tf32 in convolutions
        for start in range(0, T, group):
            own = x[start : start + group] if per_network else x
            pieces = [
                run(networks[start : start + group], own[:, i : i + inputs] if per_network else own[i : i + inputs])
                for i in range(0, n, inputs)
            ]
            rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows)


@contextmanager
def _no_second_run(template: nn.Module) -> Iterator[None]:
    """Refuse what runs parts of a network again in the backward pass: by then its parameters are the template's."""
    words = (
        f"{type(template).__name__} runs parts of itself again in the backward pass (torch.utils.checkpoint?), when it "
        "no longer holds the parameters of one network: let it do that in train mode only (if self.training)"
    )
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(words):
            yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise UnsupportedError(words) from error


def scalar_of(out: Tensor, scalarise: Scalarise | None = None) -> Tensor:
    """The scalar [n] of outputs [n, c]: the one output, the difference of two logits, or what `scalarise` says."""
    if scalarise is None and out.shape[1] <= 2:
        return out[:, 0] if out.shape[1] == 1 else out[:, 1] - out[:, 0]
    if scalarise is None:
        fix = "scalarise=lambda out: out[:, 0] (--output 0 on the command line)"
        raise InputError(f"the network has {out.shape[1]} outputs; say which scalar is meant, e.g. {fix}")
    try:
        mixes, made = _mixes_examples(scalarise, out), scalarise(out)
    except (IndexError, TypeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise InputError(f"scalarise failed on outputs {list(out.shape)}, one row for each example ({why})") from error
    # a comparison has no derivative, whatever its differences are
    if not isinstance(made, Tensor) or made.shape != out.shape[:1] or not made.is_floating_point():
        kind = f" of {made.dtype}" if isinstance(made, Tensor) else ""
        raise InputError(f"scalarise gave {shown(made)}{kind} from {list(out.shape)}; it must give real numbers [n]")
    if mixes:
        fix = "take each row of [n, c] by itself, e.g. out.softmax(1)[:, 0] and not out.softmax(0)[:, 0]"
        raise InputError(f"scalarise gives an example another number when others are beside it: {fix}")
    return made


_APART: weakref.WeakValueDictionary[int, Scalarise] = weakref.WeakValueDictionary()  # seen not to mix, by id


def _mixes_examples(scalarise: Scalarise, out: Tensor) -> bool:
    """Whether the number of a row depends on the rows beside it, seen once on rows that are alike to none of `out`."""
    if _APART.get(id(scalarise)) is scalarise:
        return False
    with torch.no_grad():
        rows = torch.arange(3 * out.shape[1], device=out.device, dtype=out.dtype).sin().view(3, -1)
        whole, alone = scalarise(rows), scalarise(rows[:1])
    if not isinstance(whole, Tensor) or not isinstance(alone, Tensor) or whole.shape[:1] != (3,):
        return False  # refused as something else
    if not alike(alone, whole[:1]):
        return True
    with suppress(TypeError):  # what cannot be remembered is tried again
        _APART[id(scalarise)] = scalarise
    return False


def choose_plan(
    networks: Networks, x: Tensor, per_network: bool, engine: Engine = "auto", max_memory: str | int | None = None
) -> Plan:
    """Measure the engines on a small part of the work and choose; remembered per architecture and shape."""
    cuda = networks.device.type == "cuda"
    if engine == "graph" and (not cuda or per_network):
        raise UnsupportedError("engine='graph' needs a CUDA device and inputs shared by all networks")
    n = x.shape[1] if per_network else len(x)
    room = budget(max_memory, networks.device)
    crowd = min(len(networks), LARGEST_TRIAL).bit_length()  # what suits two networks need not suit thousands
    key = (engine, n, tuple(x.shape[1:]), per_network, networks.device, networks.dtype, crowd, max_memory)
    cache = _PLANS.setdefault(networks.template, {})
    if key not in cache:
        cache[key] = _measure(networks, x, per_network, engine, room, n)
    return cache[key]


def _measure(networks: Networks, x: Tensor, per_network: bool, engine: Engine, room: int, n: int) -> Plan:
    per_input = activation_bytes(networks, x, per_network)
    at_once = max(1, min(n, room // per_input))
    cuda = networks.device.type == "cuda"
    image = takes_channels_last(networks.template, x[0] if per_network else x, networks.one(0))
    sizes = {at_once} if cuda else {min(size, at_once) for size in (64, 256)}
    if n > min(sizes) and not can_be_cut(networks, x[0] if per_network else x):
        sizes = {n}  # what an input gives depends on the others, and must not on how they are cut
    plans = list[Plan]()
    if engine in ("auto", "graph") and cuda and not per_network:
        plans += [Plan("graph", at_once, 1, last) for last in {False, image}]
    if engine in ("auto", "loop") and not (engine == "auto" and cuda and not per_network):
        plans += [Plan("loop", size, 1, last) for size in sizes for last in {False, image}]
    if engine in ("auto", "vmap") and (len(networks) > 1 or engine == "vmap"):
        group = min(len(networks), max(1, room // (per_input * max(sizes))), LARGEST_TRIAL if cuda else 16)
        plans += [Plan("vmap", size, group) for size in {min(sizes), max(sizes)}]
    if len(plans) == 1:
        return plans[0]
    best, fastest = plans[0], float("inf")
    few = networks[: min(len(networks), 2)]
    for plan in plans:
        if plan.engine == "vmap" and cuda and fastest * n > LAUNCH_BOUND:
            continue  # a network that keeps the GPU busy by itself gains nothing from company, and the trial is long
        some = networks[: min(plan.networks, LARGEST_TRIAL if cuda else 4)] if plan.engine == "vmap" else few
        own = x[: len(some)] if per_network else x
        if plan.engine == "graph":
            replay = Replay(some, own, plan)
            seconds = _seconds(lambda: replay(some)) / (len(some) * n)  # noqa: B023
            del replay  # its memory, before the next one is made
        else:
            first = some if plan.engine == "vmap" else some[:1]
            mine = own[: len(first)] if per_network else own
            done = len(first) * min(plan.inputs, n)
            try:
                seconds = _seconds(lambda: run_group(first, mine, 0, plan, per_network)) / done  # noqa: B023
            except (RuntimeError, NotImplementedError):  # vmap does not know every operation; the others do
                if plan.engine != "vmap" or engine == "vmap":
                    raise
                continue
        if seconds < fastest:
            best, fastest = plan, seconds
    return replace(best, seconds=fastest * n)


def activation_bytes(networks: Networks, x: Tensor, per_network: bool = False) -> int:
    """Bytes that one input of one network needs on its way (three times the largest pair of layer outputs).

    The pass that is made for it also shows what no evaluation may be of, see `try_input`, `refuse_hidden_randomness`.
    """
    if not x.numel():
        raise InputError(f"x is empty: shape {list(x.shape)}")
    sizes: list[int] = [int(x[0, 0].numel() if per_network else x[0].numel()) * x.element_size()]

    def note(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            sizes.append(out.numel() * out.element_size())

    leaves = [m for m in networks.template.modules() if not list(m.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        try_input(networks, x[0] if per_network else x)
    finally:
        for hook in hooks:
            hook.remove()
    if networks.drawn_by is not None and not networks.template.training:
        refuse_hidden_randomness(networks.drawn_by, x[0] if per_network else x)
    first = sizes[: 1 + (len(sizes) - 1) // 2]  # `try_input` calls the network twice
    return 3 * sum(sorted(first)[-2:])


def _seconds(work: Callable[[], object]) -> float:
    """Best of two after a warm-up, waiting for the device."""
    best = float("inf")
    for attempt in range(3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = clock()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, clock() - begin) if attempt else best
    return best


def clock() -> float:
    """Seconds for comparing engines: with one thread and no GPU the process's own, which other jobs do not disturb."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


def _inputs(networks: Networks, x: Tensor, per_network: bool) -> Tensor:
    if per_network and len(x) != len(networks):
        raise InputError(f"x has shape {list(x.shape)} for {len(networks)} networks; per_network needs [T, n, ...]")
    return x.to(networks.device, networks.dtype if x.is_floating_point() else None)
