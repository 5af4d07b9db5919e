"""Watch a model's layers while the user trains it: inputs and output gradients, per step, through removable hooks.

A call of a covered module is noted when its output's gradient arrives, and counts once the gradient has been added to
the weight's `.grad` (a gradient asked for with `torch.autograd.grad` does not). Calls that one `backward()` brought are
uses by the same examples (a reused module, Siamese branches); several `backward()` calls are more examples
(gradient accumulation).
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from biascope.network.layers.blocks import Layout
from biascope.network.shards import is_sharded
from biascope.support.errors import InputError
from biascope.support.inputs import nested_tensors


@dataclass
class Call:
    """One call of a module: its input and its output's gradient (None where only the count is wanted).

    `layout` says where the examples lie in both. `order` counts the calls of all modules, `turn` those of the whole
    model.
    """

    examples: int
    input: Tensor | None
    grad: Tensor | None = None
    layout: Layout = Layout(0, 1)  # noqa: RUF009  # frozen
    order: int = 0
    turn: int = 0


@dataclass
class Record:
    """What one module did since the last step: finished groups of calls, one group per `backward()`."""

    groups: list[list[Call]] = field(default_factory=list)
    pending: list[tuple[int, Call, Tensor | None]] = field(default_factory=list)  # with the backward pass they are from
    mark: tuple[int, int] | None = None  # which gradient, in which state, the groups left behind
    late: bool = False  # hooks on the weight are not called (FSDP2): what is pending at the step counts

    @property
    def calls(self) -> list[Call]:
        """Every finished call."""
        return [call for group in self.groups for call in group]

    def batches(self) -> list[list[Call]]:
        """Finished calls, those of the same examples together."""
        out = []
        for group in self.groups:
            sizes = dict.fromkeys(call.examples for call in group)
            out += [[call for call in group if call.examples == size] for size in sizes]
        return out

    def commit(self) -> None:
        """The weight's gradient was accumulated: what is pending counts."""
        known = {id(call) for call in self.calls} if self.groups else ()
        fresh = []
        this = torch._C._current_graph_task_id()
        for task, call, grad in self.pending:
            if task != this:
                continue  # left by a torch.autograd.grad that accumulated nothing
            grad = None if grad is None else grad.detach()
            if id(call) in known:  # a second backward through the same graph adds to its gradient
                call.grad = grad if call.grad is None or grad is None else call.grad + grad
            else:
                call.grad = grad
                fresh.append(call)
        if fresh:
            self.groups.append(fresh)
        self.pending.clear()

    def settle(self) -> None:
        """Everything that is pending counts, those of one backward pass together."""
        tasks: dict[int, list[Call]] = {}
        for task, call, grad in self.pending:
            known = any(call is other for calls in tasks.values() for other in calls)
            call.grad = grad if not known or grad is None or call.grad is None else call.grad + grad
            if not known:
                tasks.setdefault(task, []).append(call)
        self.groups += tasks.values()
        self.pending.clear()

    def forget_dropped(self, grad: Tensor | None) -> None:
        """Where the weight's gradient was dropped or zeroed without a step, so are the groups that it was made of."""
        if self.groups and not self.late and (grad is None or (mark_of(grad) != self.mark and not bool(grad.any()))):
            self.groups.clear()


class Hook:
    """A hook that knows its watcher weakly; copies and pickles of the model carry it as a hook that does nothing."""

    def __init__(self, watcher: Watcher | None, method: str) -> None:
        self.watcher = None if watcher is None else weakref.ref(watcher)
        self.method = method

    def __call__(self, *args: Any) -> None:
        """Tell the watcher, if it still lives."""
        watcher = None if self.watcher is None else self.watcher()
        if watcher is not None:
            getattr(watcher, self.method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (None, self.method)


class Watcher:
    """Hooks on the covered modules of a model; `records` maps a module to what it did since `clear()`."""

    def __init__(self, model: nn.Module, modules: dict[nn.Module, tuple[str, Tensor]]) -> None:
        self.modules = modules  # module -> its name, the parameter whose gradient marks the end of its backward
        self.records = {module: Record(late=is_sharded(p)) for module, (_, p) in modules.items()}
        self.capture = True  # keep tensors, or only count examples
        self.idle = False  # not even that
        self.examples: int | None = None
        self.count = 0
        self.turn = 0
        self.warned: set[str] = set()
        self.me = weakref.ref(self)
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self, "model_called"), with_kwargs=True)
        ]
        for module, (_, parameter) in modules.items():
            self.handles.append(module.register_forward_hook(Hook(self, "layer_called")))
            if not is_sharded(parameter):
                accumulated = Hook(self, "accumulated")
                self.handles.append(parameter.register_post_accumulate_grad_hook(accumulated))  # type: ignore[no-untyped-call]
        self.by_parameter = {id(p): module for module, (_, p) in modules.items()}
        weakref.finalize(self, _remove, self.handles)

    def settle(self) -> None:
        """A step begins: calls whose end no hook has reported are counted."""
        for record in self.records.values():
            if record.late:
                record.settle()

    def close(self) -> None:
        """Take every hook off the model."""
        _remove(self.handles)
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        for record in self.records.values():
            record.groups.clear()
            record.pending.clear()

    def model_called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the number of examples: the first dimension of the first tensor."""
        if self.idle:
            return
        self.turn += 1
        first = next(nested_tensors((args, kwargs)), None)
        self.examples = first.shape[0] if first is not None and first.dim() > 0 else None

    def layer_called(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note a call with gradients, in train or in eval mode, once its output's gradient is known."""
        record = self.records.get(module)
        if self.idle or record is None or not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return
        if not output.requires_grad or not args:
            return
        name, parameter = self.modules[module]
        record.forget_dropped(parameter.grad)
        if record.late and parameter.grad is None:
            record.pending.clear()
        x: Tensor = args[0]
        examples, layout = examples_of(x, self.examples)
        if layout.dim == 0 and x.dim() > 2 and x.shape[1] == examples < x.shape[0] and name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"the input {list(x.shape)} of {name} has {examples} examples along its second dimension, or "
                f"{x.shape[0] // examples} rows for each along its first; the latter is assumed. If the former holds, "
                "use batch_first=True or another batch size",
                stacklevel=2,
            )
        self.count += 1
        kept_input = x.detach() if self.capture else None
        call, version = Call(examples, kept_input, layout=layout, order=self.count, turn=self.turn), x._version
        me = self.me  # the watcher is not kept alive by the graph; the record is small

        def arrived(grad: Tensor) -> None:
            watcher = me()
            if watcher is None or watcher.records.get(module) is not record:
                return
            if call.input is not None and x._version != version:
                raise InputError(f"the input of {name} was changed in place after it was read; use a copy there")
            record.forget_dropped(parameter.grad)  # between the forward pass and this one
            kept = None if call.input is None else grad  # may be of a vmapped pass, which never counts
            record.pending.append((torch._C._current_graph_task_id(), call, kept))

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    def accumulated(self, parameter: Tensor) -> None:
        """The gradient of a module's parameter is complete for this `backward()`."""
        if self.idle:
            return
        module = self.by_parameter.get(id(parameter))
        if module is not None:
            record = self.records[module]
            record.commit()
            record.mark = None if parameter.grad is None else mark_of(parameter.grad)


def mark_of(grad: Tensor) -> tuple[int, int]:
    """Changes when a gradient is replaced or written to: only then is a GPU asked what is in it."""
    return grad.data_ptr(), grad._version


def examples_of(x: Tensor, examples: int | None) -> tuple[int, Layout]:
    """How many examples a layer's input [rows, ...] holds, and where they lie.

    The rows are those of the model's `examples`, or several for each (tokens, windows); or else they are positions and
    the second dimension is that of the examples, as in a transformer without batch_first; or else they are examples.
    """
    rows = x.shape[0] if x.dim() else 0
    if examples and rows % examples:
        positions = x.dim() - (1 if x.is_floating_point() else 0)  # an embedding's input has no channels
        if positions >= 2 and x.shape[1] == examples:
            return examples, Layout(1, 1)
        return rows, Layout(0, 1)
    return (examples, Layout(0, rows // examples)) if examples else (rows, Layout(0, 1))


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
