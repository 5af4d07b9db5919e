"""A probe as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from biascope.errors import InputError, UnsupportedError
from biascope.inputs import map_inputs
from biascope.probes.groups import moved_groups
from biascope.probes.probe import Probe
from biascope.probes.record import Record
from biascope.probes.schedules import as_schedule

if TYPE_CHECKING:
    TrainerCallback = Any
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise UnsupportedError('this callback needs transformers: pip install "biascope[hf]"') from error


class ProbeCallback(TrainerCallback):  # type: ignore[misc]
    """Measures a model while the Hugging Face `Trainer` trains it: `Trainer(..., callbacks=[ProbeCallback(x, y)])`.

    The probe (`callback.probe`) is made when training starts, on the model's device, in the first process only.

    The Trainer tells its callbacks the loss only when it logs. A schedule by the loss therefore goes by logged losses:
    set `logging_steps=1` for the finest. Other schedules see every step and record the loss logged last.

    Args:
        x_probe: a dict of keyword tensors (`input_ids`, `attention_mask`, ...), each [n, ...], or one tensor.
        y_probe: labels.
        network: a function of the model that gives the part to follow; None for the model.
        options: arguments of `Probe`.

    Example:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[ProbeCallback(dict(batch), labels)])
    """

    def __init__(
        self,
        x_probe: Any,
        y_probe: Tensor | None = None,
        network: Callable[[nn.Module], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.x_probe, self.y_probe, self.network, self.options = x_probe, y_probe, network, options
        self.by_loss = as_schedule(options.get("schedule", "log")).needs_loss
        self.probe: Probe | None = None
        self._loss: float | None = None

    @property
    def records(self) -> tuple[Record, ...]:
        """Records so far; empty before training and in processes other than the first."""
        return self.probe.records if self.probe is not None else ()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the probe, where the parameters are now."""
        if not state.is_world_process_zero:
            return
        if model is None:
            raise InputError("the Trainer gave no model to its callbacks")
        device = next(model.parameters()).device
        options = {**self.options, "groups": moved_groups(self.options.get("groups"), device)}
        x = map_inputs(self.x_probe, lambda t: t.to(device))
        y = None if self.y_probe is None else self.y_probe.to(device)
        self.probe = Probe(model if self.network is None else self.network(model), x, y, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the probe of an optimiser step."""
        if self.probe is not None and not self.by_loss:
            self.probe.step(self._loss, step=state.global_step, epoch=state.epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the loss."""
        if self.probe is None or not logs or "loss" not in logs:
            return
        self._loss = float(logs["loss"])
        if self.by_loss and state.global_step > self.probe.at:
            self.probe.step(self._loss, step=state.global_step, epoch=state.epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the last state and close files."""
        if self.probe is not None:
            self.probe.finish()
