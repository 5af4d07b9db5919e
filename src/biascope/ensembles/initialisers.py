"""T networks from one construction: how a factory initialises its parameters is recorded, then drawn as stacks.

Ten thousand ResNets need not be built ten thousand times: `record(factory)` builds the network once under a recorder
and replays what it saw for T networks at once, on the device. It trusts nothing: the factory is built a second time
with another seed and the replay must give the same numbers, bit for bit. What does not (orthogonal matrices are fine;
NumPy, reading values back, storage tricks are not) makes the whole network fall back to calling the factory, and the
result says which parameter is to blame.

Which numbers network i gets: networks are drawn in blocks of `block` (a power of two that depends on the size of the
network alone), block b from `generator(seed, "networks", b)`. So network i depends on (seed, i) and on the kind of
device, never on how many networks are asked for at a time. In the fallback it is the factory called under
`derive(seed, "networks", i)`.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from biascope.ensembles.networks import Networks
from biascope.ensembles.recorder import TRUNCATED, Program, Step, View, covers, recording, replay
from biascope.ensembles.redraw import drawn_again
from biascope.support.arguments import device_of
from biascope.support.errors import InputError, no_network
from biascope.support.seeds import derive, generator
from biascope.support.signatures import checked

Factory = Callable[[], nn.Module]
BLOCK_ELEMENTS = 2**24
LARGEST_BLOCK = 256
GLOBAL_STATE = "let it draw from torch's global random state, and not from a generator or counter of its own"


@dataclass(frozen=True)
class Initialiser:
    """How a factory draws its networks.

    Attributes:
        template: one network, in eval mode, on the CPU; the function that all networks share.
        recorded: True when networks are drawn as stacks, False when the factory is called for each.
        reasons: {name: why} of the parameters and buffers that forced the factory to be called; empty when recorded.
        block: networks per random stream (see the module's docstring).

    Example:
        >>> recorded = record(lambda: nn.Linear(3, 1))
        >>> recorded.draw(seed=0, start=0, stop=5).params["weight"].shape
        torch.Size([5, 1, 3])
    """

    template: nn.Module = field(repr=False)
    factory: Factory = field(repr=False)
    recorded: bool
    reasons: Mapping[str, str]
    block: int
    _views: Mapping[str, View] = field(repr=False)
    _constants: Mapping[str, Tensor] = field(repr=False)
    _program: Program = field(repr=False)
    _steps: tuple[Step, ...] = field(repr=False)

    @property
    def draws(self) -> bool:
        """Whether any parameter or buffer is random: if not, all networks are the same."""
        return bool(self._views) or not self.recorded

    @checked
    def draw(
        self,
        seed: int,
        start: int,
        stop: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Networks:
        """Networks start, ..., stop - 1 of the ensemble with this seed, stacked: {name: [stop - start, *shape]}.

        Parameters that the factory freezes are drawn too, and come among the buffers.

        `dtype` casts floating-point tensors after they were drawn in the factory's own precision.
        """
        if not 0 <= start < stop:
            raise InputError(f"networks start={start} to stop={stop}: need 0 <= start < stop")
        where = device_of(device)
        if self.recorded:
            parts = []
            for b in range(start // self.block, (stop - 1) // self.block + 1):
                low, high = max(start - b * self.block, 0), min(stop - b * self.block, self.block)
                values = self._draw_block(seed, b, where)
                parts.append({name: value[low:high] for name, value in values.items()})
            values = parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
        else:
            built = [tensors_of(build(self.factory, derive(seed, "networks", i))) for i in range(start, stop)]
            values = {name: torch.stack([each[name] for each in built]).to(where) for name in built[0]}
        if dtype is not None:
            values = {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
        trained = [name for name, parameter in self.template.named_parameters() if parameter.requires_grad]
        params = {name: values.pop(name) for name in trained}
        return Networks(self.template, params, values, drawn_by=self)

    def _draw_block(self, seed: int, b: int, device: torch.device) -> dict[str, Tensor]:
        rng = generator(seed, "networks", b, device=device)
        stacks = replay(self._program, list(self._steps), self.block, rng, device)
        values = {name: view.of(stacks[view.storage]) for name, view in self._views.items()}
        for name, constant in self._constants.items():
            values[name] = constant.to(device).expand(self.block, *constant.shape)
        return values

    @checked
    def distribution(self, name: str) -> str:
        """In words, how a parameter or buffer is drawn.

        Example:
            >>> record(lambda: nn.Linear(4, 1)).distribution("weight")
            'uniform_(-0.5, 0.5)'
        """
        if name in self.reasons or not self.recorded:
            return f"by calling the factory: {self.reasons.get(name, 'other parameters need it')}"
        if name in self._constants:
            return "constant"
        return ", then ".join(_words(step) for step in self._steps_of(name))

    @checked
    def variance_of(self, name: str) -> float | None:
        """Variance of an entry if all entries are independent, alike and of mean zero; None if that is not known.

        Example:
            >>> round(record(lambda: nn.Linear(4, 1)).variance_of("weight"), 6)
            0.083333
        """
        steps = self._steps_of(name) if self.recorded and name in self._views else []
        if len(steps) != 1 or steps[0].op not in ("uniform_", "normal_", TRUNCATED):
            return None
        own, storage = self._views[name], self._program.storages[self._views[name].storage]
        repeated = any(extent > 1 and stride == 0 for extent, stride in zip(own.size, own.stride))
        if repeated or not covers(steps[0].writes[0], storage):  # one number in many places, or constants beside
            return None
        args = [float(value) for value in steps[0].leaves]
        if steps[0].op == TRUNCATED:
            mean, std, low, high = (*args, *(0.0, 1.0, -2.0, 2.0)[len(args) :])
            a = high / std  # standard deviations to where it is cut
            cut = 2 * a * math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi) / math.erf(a / math.sqrt(2))
            return std**2 * (1 - cut) if mean == 0 and low == -high else None
        if steps[0].op == "normal_":
            mean, std = (*args, *(0.0, 1.0)[len(args) :])
            return std**2 if mean == 0 else None
        low, high = (*args, *(0.0, 1.0)[len(args) :])
        return (high - low) ** 2 / 12 if low == -high else None

    @checked
    def drawn_apart(self, name: str) -> bool:
        """Is a parameter independent of all other parameters and buffers, as far as is known?

        Example:
            >>> record(lambda: nn.Linear(4, 1)).drawn_apart("weight")
            True
        """
        if not self.recorded or name not in self._views:
            return False
        own = {id(step) for step in self._steps_of(name)}
        return not any(own & {id(step) for step in self._steps_of(other)} for other in self._views if other != name)

    def _steps_of(self, name: str) -> list[Step]:
        return self._program.live({self._views[name].storage})


def with_something_to_train(factory: Factory | Initialiser) -> Initialiser:
    """The factory recorded; refused when every parameter is frozen, for what trains or differentiates them."""
    initialiser = record(factory)
    template = initialiser.template
    if not any(parameter.requires_grad for parameter in template.parameters()):
        raise InputError(f"{type(template).__name__} has no parameter with requires_grad: there is nothing to train")
    if pair := _in_shared_memory(template):
        raise InputError(f"{' and '.join(pair)} share memory without being one parameter: tie them, or clone one")
    return initialiser


def _in_shared_memory(module: nn.Module) -> list[str]:
    """A parameter that lies in the memory of another one or of a buffer, and that one: a step of torch would move both.

    One parameter under two names is fine.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, value in tensors_of(module).items():
        by_storage.setdefault(value.untyped_storage()._cdata, []).append((name, value))
    for together in by_storage.values():
        sizes = {value.element_size() for _, value in together}
        if len(together) == 1 or len(sizes) > 1:
            continue
        owner = torch.full((together[0][1].untyped_storage().nbytes() // sizes.pop(),), -1, device="cpu")
        for i, (name, value) in enumerate(together):
            held = owner.as_strided(value.shape, value.stride(), value.storage_offset())
            for other in {together[j][0] for j in set(held.flatten().tolist()) - {-1}}:
                if {name, other} & trained:
                    return [f"'{other}'", f"'{name}'"]
            held.copy_(torch.full_like(held, i))
    return []


@checked
def record(factory: Factory | Initialiser) -> Initialiser:
    """Find out how a factory initialises its network, and check the finding.

    Args:
        factory: takes nothing, returns a new `nn.Module` each time, drawn from torch's global random state (which is
            left as it was). A network is drawn again by its own initialisers, with a warning that says by which. What
            was recorded before is given back.

    Example:
        >>> record(lambda: nn.Linear(2, 2)).recorded
        True
    """
    if isinstance(factory, Initialiser):
        return factory
    if isinstance(factory, nn.Module):
        factory = drawn_again(factory)
    seed = derive(0, "record")
    with _seeded(seed), recording() as recorder:
        before = _states_elsewhere()
        first = _built(factory)
        elsewhere = _states_elsewhere() != before
    program = recorder.program
    second = build(factory, derive(0, "verify"))
    if second is first:
        raise InputError("the factory returned the same module twice; it must build a new one on every call")
    values, again = tensors_of(first), tensors_of(second)
    if {n: v.shape for n, v in values.items()} != {n: v.shape for n, v in again.items()}:
        raise InputError(
            "the factory built two networks with different parameters; every call must build the same kind"
        )

    views = {name: program.view(value) for name, value in values.items() if program.is_random(value)}
    constants = {name: value.clone() for name, value in values.items() if name not in views}
    reasons = {
        name: "it differs between two builds, though no random operation of torch fills it"
        for name, value in constants.items()
        if not _same(value, again[name])
    }
    reasons |= _verify(program, views, again)
    # without a reason it is no seed: every draw was overwritten (zeros_ after nn.Linear), or may come to nothing
    if reasons and views and all(_same(values[name], again[name]) for name in views):
        raise InputError(f"the factory gave the same network twice: does it set a seed? {GLOBAL_STATE}")
    if not reasons:  # two builds agree, but a random decision can come out otherwise in a third
        unseen = ["the factory draws from Python's or NumPy's random numbers"] if elsewhere else program.problems
        reasons = dict.fromkeys(values, unseen[0]) if unseen else {}
    if reasons:  # the factory is called for each network: under one seed it must build what it has built under it
        once_more = tensors_of(build(factory, derive(0, "verify")))
        if changed := [name for name, value in again.items() if not _same(value, once_more[name])]:
            raise InputError(f"the factory gave '{changed[0]}' other numbers with the same seed: {GLOBAL_STATE}")
    steps = program.live({view.storage for view in views.values()})
    elements = max(1, sum(value.numel() for value in values.values()))
    block = 1
    while block * 2 <= LARGEST_BLOCK and block * 2 * elements <= BLOCK_ELEMENTS:
        block *= 2
    # a weight that a layer computes (nn.utils.weight_norm) has a graph, which no copy takes
    for part in first.modules():
        held = vars(part)
        held |= {key: value.detach() for key, value in held.items() if isinstance(value, Tensor) and not value.is_leaf}
    return Initialiser(first.eval(), factory, not reasons, reasons, block, views, constants, program, tuple(steps))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, detached; tied ones once."""
    named = {name: p.detach() for name, p in module.named_parameters()}
    return named | {name: b.detach() for name, b in module.named_buffers()}


def _verify(program: Program, views: Mapping[str, View], built: Mapping[str, Tensor]) -> dict[str, str]:
    """Replay every step from the state in which `built` was made: names that do not come out bit for bit."""
    if not views:
        return {}
    if program.problems:
        return dict.fromkeys(views, program.problems[0])
    rng = torch.Generator().manual_seed(derive(0, "verify"))
    try:
        stacks = replay(program, program.steps, 1, rng, torch.device("cpu"))
    except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
        return dict.fromkeys(views, f"a step cannot be run for many networks ({str(error).splitlines()[0]})")
    wrong = [name for name, view in views.items() if not _same(view.of(stacks[view.storage])[0], built[name])]
    return dict.fromkeys(wrong, "replaying what was recorded gives other numbers")


def _states_elsewhere() -> tuple[object, ...]:
    """Python's and NumPy's global random states."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def build(factory: Factory, seed: int) -> nn.Module:
    """One network of the factory under a seed; random states are as before."""
    with _seeded(seed):
        return _built(factory)


def _built(factory: Factory) -> nn.Module:
    try:
        module = factory()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # from inside the factory
            raise
        raise InputError(f"the factory must be callable without arguments, e.g. lambda: MLP(10) ({error})") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"the factory returned {no_network(module)}")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError("the factory builds TorchScript, whose parameters torch cannot swap: return its nn.Module")
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise InputError(
            f"'{lazy[0]}' has no shape yet (a lazy layer): let the factory call it once, "
            "net(torch.zeros(1, ...)), before it returns it"
        )
    if not any(True for _ in (*module.parameters(), *module.buffers())):
        raise InputError(f"{type(module).__name__} has no parameters: all networks of the factory would be the same")
    if devices := {p.device.type for p in module.parameters()} - {"cpu"}:
        raise InputError(f"the factory builds on {sorted(devices)}; build on the CPU and pass device= instead")
    return module


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's, NumPy's and Python's global random states set for a moment, then put back; the CPU as default device."""
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    numpy_state, python_state, state = np.random.get_state(), random.getstate(), torch.get_rng_state()  # noqa: NPY002
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        with device:
            yield
    finally:
        torch.set_rng_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _words(step: Step) -> str:
    numbers = ", ".join(f"{value:.6g}" for value in step.leaves if isinstance(value, int | float))
    name = step.op if isinstance(step.op, str) else str(getattr(step.op, "_opname", step.op))
    if name == TRUNCATED:
        name = "trunc_normal_"
    return f"{name}({numbers})"
