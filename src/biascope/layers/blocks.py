"""The anatomy of a model: which rule handles which parameter (`biascope.layers.pilot` finds out).

A *block* is the unit that kernels and metrics are assembled from:

- a **matrix** block: a weight (and, where it sees the same positions, its bias) whose uses all share one matrix rule;
  several uses (a reused module, a tied weight) are joined along the positions;
- a **rows** block: a small parameter, or one with uses of different kinds, whose per-example gradients are added up;
- a **fallback** block: a parameter used by something without a rule; its rows come from autograd, example by example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from biascope.errors import UnsupportedError
from biascope.functional import Functional
from biascope.layers.record import Tape
from biascope.layers.rules import Sizes


@dataclass(frozen=True)
class Layout:
    """The examples lie along `dim`, which has n * m entries, example-major."""

    dim: int
    m: int

    def example_major(self, t: Tensor, n: int) -> Tensor:
        """[n, m, ...rest], a view where possible."""
        if self.dim:
            t = t.movedim(self.dim, 0)
        return t.unsqueeze(1) if self.m == 1 and t.shape[0] == n else t.reshape(n, self.m, *t.shape[1:])

    def example_major_each(self, t: Tensor, n: int) -> Tensor:
        """[k, n, m, ...rest] of k stacked tensors."""
        if self.dim:
            t = t.movedim(self.dim + 1, 1)
        return t.unsqueeze(2) if self.m == 1 and t.shape[1] == n else t.reshape(t.shape[0], n, self.m, *t.shape[2:])


@dataclass(frozen=True)
class Slot:
    """What the pilot learnt about one use: where the batch lies in its input and output."""

    rule: str
    roles: tuple[tuple[str, str], ...]
    input: Layout | None
    output: Layout


@dataclass(frozen=True)
class Block:
    """Parameters assembled together, and the uses (indices into the tape) that make their gradient."""

    kind: str  # "matrix" | "rows" | "fallback"
    names: tuple[str, ...]  # matrix: (weight,) or (weight, bias)
    uses: tuple[int, ...]
    reason: str
    sizes: Sizes | None = None  # matrix: positions summed over the uses
    numel: int = 0
    input_numel: int = 0  # matrix: numbers kept per example, inputs and (for one cotangent) output gradients
    output_numel: int = 0

    @property
    def layer(self) -> str:
        """The module the first parameter belongs to."""
        return self.names[0].rpartition(".")[0] or self.names[0]


@dataclass(frozen=True)
class Watch:
    """Reads a model's output as `Functional` does, and refuses another shape than the pilot saw."""

    output: Callable[[Any], Tensor] | None
    shape: tuple[int, ...]  # of one example's output, before it is flattened

    def __call__(self, out: Any) -> Any:
        """The tensor; what is none is refused by the caller, with advice."""
        t = out_tensor(out, self.output)
        if isinstance(t, Tensor) and tuple(t.shape[1:]) != self.shape:
            raise StaleError(
                f"the model gives {list(t.shape[1:])} per example here, and gave {list(self.shape)} on the first ones"
            )
        return t


class StaleError(UnsupportedError):
    """The model is not what its anatomy says: changed since, or on another path with these examples."""


def out_tensor(out: Any, output: Callable[[Any], Tensor] | None) -> Any:
    """What is differentiated of a model's output, in its own shape."""
    if output is not None:
        return output(out)
    return out if isinstance(out, Tensor) else getattr(out, "logits", out)


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a model, the layout of every recorded use, and the number of outputs."""

    blocks: tuple[Block, ...]
    slots: tuple[Slot | None, ...]
    outputs: int
    activation_bytes: int  # saved for backward, per example
    batched: bool = False  # one vmapped backward pass for all cotangents works (fewer, larger operations)
    reasons: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of one example's output, before it is flattened
    unreached: frozenset[int] = frozenset()  # uses that the outputs do not depend on
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what users made of it

    def watched(self, f: Functional) -> Functional:
        """The same function, which raises `StaleError` when an output has another shape than the pilot's."""
        return Functional(f.module, f.params, f.frozen, Watch(f.output, self.shape), f.dtype, f.device)

    def matches(self, tape: Tape) -> bool:
        """Does a new forward pass use the parameters in the same order as the pilot did?"""
        return len(tape.uses) == len(self.slots) and all(
            slot is None or (slot.rule, slot.roles) == (type(use.rule).__name__, tuple(use.roles.items()))
            for slot, use in zip(self.slots, tape.uses)
        )


def leaves(f: Functional) -> dict[str, Tensor]:
    """Fresh leaf tensors that require grad and share memory with the parameters.

    Example:
        >>> from torch import nn
        >>> from biascope.functional import functional
        >>> f = functional(nn.Linear(3, 2))
        >>> w = leaves(f)["weight"]
        >>> w.requires_grad, w.data_ptr() == f.params["weight"].data_ptr()
        (True, True)
    """
    return {k: p.detach().requires_grad_() for k, p in f.params.items()}
