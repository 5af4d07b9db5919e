"""Watch a network being built, and write down the program that fills its tensors.

Under `Recorder` every tensor operation passes by. The ones that draw random numbers (`uniform_`, `normal_`, `randn`,
...) and everything computed from them are kept as steps; the rest is constant. `replay` runs the same steps for T
networks at once, on tensors with one more leading dimension.

A tensor is known by where it lies in its storage (size, stride, offset), so views need no care of their own:
`weight[0].fill_(0)` is a step on a part of the weight's storage.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

# random operations that make a new tensor -> the in-place operation that fills one in the same way
_CREATORS: dict[str, Callable[[tuple[Any, ...]], tuple[str, tuple[Any, ...]]]] = {
    "randn": lambda args: ("normal_", ()),
    "randn_like": lambda args: ("normal_", ()),
    "rand": lambda args: ("uniform_", ()),
    "rand_like": lambda args: ("uniform_", ()),
    "normal.float_float": lambda args: ("normal_", args[:2]),
    "randint": lambda args: ("random_", (0, args[0])),
    "randint.low": lambda args: ("random_", args[:2]),
}
_FILLS = {"uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_.float"}
_FILLS |= {"random_", "random_.to", "random_.from"}
TRUNCATED = "trunc_normal_"
_EXITS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # what is done with the numbers may depend on them


@dataclass(frozen=True)
class View:
    """Where a tensor lies: storage number, size, stride, offset (in elements)."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, stack: Tensor) -> Tensor:
        """The same view [T, *size] of a stack [T, elements of the storage]."""
        return stack.as_strided((len(stack), *self.size), (stack.stride(0), *self.stride), self.offset)


@dataclass(frozen=True)
class Step:
    """One operation. `leaves` are its flattened arguments; a `View` among them stands for that tensor."""

    op: str | Callable[..., Any]  # the name of a random fill, or what is to be called
    leaves: tuple[Any, ...]
    structure: Any
    writes: tuple[View, ...]
    made: tuple[View, ...] = ()  # fresh tensors, in the order they are returned
    reads: frozenset[int] = frozenset()  # storages

    @property
    def random(self) -> bool:
        """Whether it fills a tensor with random numbers."""
        return isinstance(self.op, str)


@dataclass
class Storage:
    """What is known of a storage that random numbers have reached."""

    elements: int
    dtype: torch.dtype
    before: Tensor | None  # its content [elements] before, where the first step does not overwrite all of it


@dataclass
class Program:
    """Everything recorded while one network was built."""

    steps: list[Step] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # address of a storage -> its number
    alive: list[Any] = field(default_factory=list)  # keeps addresses from being used twice

    def view(self, tensor: Tensor) -> View:
        """Where a tensor lies."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.numbers)
            self.alive.append(storage)
        number = self.numbers[storage._cdata]
        return View(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def is_random(self, tensor: Tensor) -> bool:
        """Whether random numbers have reached the tensor's storage."""
        return self.numbers.get(tensor.untyped_storage()._cdata) in self.storages

    def touch(self, tensor: Tensor, overwritten: bool = True) -> None:
        """Note, before it is written, that random numbers are about to reach a tensor; are its old ones then gone?"""
        where = self.view(tensor)
        if where.storage in self.storages:
            return
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        before = None
        if tensor.numel() != elements or not overwritten:
            before = tensor.detach().as_strided((elements,), (1,), 0).clone()
        self.storages[where.storage] = Storage(elements, tensor.dtype, before)

    def live(self, wanted: set[int]) -> list[Step]:
        """The steps that the storages `wanted` depend on: what is overwritten later need not be drawn."""
        needed, kept = set(wanted), []
        for step in reversed(self.steps):
            targets = {where.storage for where in (*step.writes, *step.made)}
            if not targets & needed:
                continue
            kept.append(step)
            if step.random and all(covers(where, self.storages[where.storage]) for where in step.writes):
                needed -= targets
            needed |= step.reads
        return kept[::-1]


class Readers(TorchFunctionMode):
    """Notes when numbers of a random tensor leave torch by a way that is no operation, so that no recorder sees it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXITS and self.program.is_random(args[0]):
            self.program.problems.append(f"it reads numbers out of a random tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write down what happens to tensors while the mode is on; see `recording`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own_generator = any(isinstance(leaf, torch.Generator) for leaf in leaves)
        if torch.Tag.nondeterministic_seeded in func.tags and not own_generator:
            return self._random(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags or not any(self.program.is_random(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs, leaves, structure)

    def _random(self, func: Any, args: Any, kwargs: Any) -> Any:
        program, name = self.program, func.name().removeprefix("aten::")
        if name in _FILLS:
            program.touch(args[0])
            out = func(*args, **kwargs)
            self.fill(name.partition(".")[0], args[0], *args[1:], **kwargs)
            return out
        out = func(*args, **kwargs)
        for tensor in (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)):
            program.touch(tensor)
            if name in _CREATORS:
                fill, numbers = _CREATORS[name](args)
                self.fill(fill, tensor, *numbers)
            else:
                program.problems.append(f"it draws with {name}")
        return out

    def fill(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add a step that fills a tensor with random numbers."""
        leaves, structure = tree_flatten((args, kwargs))
        self.program.steps.append(Step(name, tuple(leaves), structure, (self.program.view(tensor),)))

    def _compute(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], structure: Any) -> Any:
        program = self.program
        written = [
            args[i]
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info and a.alias_info.is_write and i < len(args)
        ]
        written = [tensor for tensor in written if isinstance(tensor, Tensor)]
        for tensor in written:
            program.touch(tensor, overwritten=func is torch.ops.aten.copy_.default)
        noted = tuple(self._note(leaf) for leaf in leaves)
        reads = frozenset(leaf.storage for leaf in noted if isinstance(leaf, View))
        known = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        out = func(*args, **kwargs)
        returned = tree_flatten(out)[0]
        if not all(isinstance(leaf, Tensor) for leaf in returned):
            program.problems.append(f"it reads a number out of a random tensor ({func.name().removeprefix('aten::')})")
            return out
        fresh = [tensor for tensor in returned if tensor.untyped_storage()._cdata not in known]
        if not written and not fresh:  # only another view of the same storage
            return out
        for tensor in fresh:
            program.touch(tensor)
        writes, made = tuple(map(program.view, written)), tuple(map(program.view, fresh))
        program.steps.append(Step(func, noted, structure, writes, made, reads))
        return out

    def _note(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.program.view(leaf) if self.program.is_random(leaf) else leaf.detach().clone()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what is built inside the block.

    `nn.init.trunc_normal_` draws again what fell outside, so how many numbers it needs depends on the numbers; it is
    therefore kept as one step.
    """
    recorder = Recorder()
    original: Any = init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
        if generator is not None:
            original(tensor, *args, generator=generator)
            return tensor
        recorder.program.touch(tensor)
        recorder.quiet = True
        try:
            original(tensor, *args)
        finally:
            recorder.quiet = False
        recorder.fill(TRUNCATED, tensor, *args)
        return tensor

    init._no_grad_trunc_normal_ = truncated  # type: ignore[assignment]
    try:
        with recorder, Readers(recorder.program):
            yield recorder
    finally:
        init._no_grad_trunc_normal_ = original


def replay(
    program: Program, steps: list[Step], n_networks: int, generator: torch.Generator, device: torch.device
) -> dict[int, Tensor]:
    """Run the steps for n networks: {storage: [n, elements]}."""
    stacks: dict[int, Tensor] = {}

    def stack(number: int) -> Tensor:
        if number not in stacks:
            known = program.storages[number]
            made = torch.empty(n_networks, known.elements, dtype=known.dtype, device=device)
            if known.before is not None:
                made.copy_(known.before)
            stacks[number] = made
        return stacks[number]

    with torch.no_grad():
        for step in steps:
            if isinstance(step.op, str):
                args, kwargs = tree_unflatten(list(step.leaves), step.structure)
                target = step.writes[0].of(stack(step.writes[0].storage))
                if step.op == TRUNCATED:
                    truncated_normal: Any = init._no_grad_trunc_normal_
                    truncated_normal(target, *args, generator=generator)
                else:
                    getattr(target, step.op)(*args, **kwargs, generator=generator)
            else:
                _run(step, stack, device)
    return stacks


def _run(step: Step, stack: Callable[[int], Tensor], device: torch.device) -> None:
    """One step that is not random, mapped over the networks."""
    places = [i for i, leaf in enumerate(step.leaves) if isinstance(leaf, View)]
    fixed = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in step.leaves]
    fixed = [device if isinstance(leaf, torch.device) else leaf for leaf in fixed]
    op = step.op
    assert callable(op)

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(fixed)
        for place, tensor in zip(places, tensors):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, step.structure)
        out = tree_flatten(op(*args, **kwargs))[0]
        return tuple(out) if step.made else ()

    inputs = [step.leaves[place].of(stack(step.leaves[place].storage)) for place in places]
    results = torch.vmap(one)(*inputs)
    for where, value in zip(step.made, results):
        where.of(stack(where.storage)).copy_(value)


def covers(where: View, storage: Storage) -> bool:
    """Whether a view has as many entries as the storage it lies in."""
    return math.prod(where.size) == storage.elements
