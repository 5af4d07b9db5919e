"""A probe as a callback of the Hugging Face Trainer."""

from typing import TYPE_CHECKING, Any

from biascope.probes.callbacks import Follower
from biascope.probes.schedules import as_schedule
from biascope.support.errors import UnsupportedError

if TYPE_CHECKING:
    TrainerCallback = Any
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise UnsupportedError('this callback needs transformers: pip install "biascope[hf]"') from error


class ProbeCallback(Follower, TrainerCallback):  # type: ignore[misc]
    """Measures a model while the Hugging Face `Trainer` trains it: `Trainer(..., callbacks=[ProbeCallback(x, y)])`.

    The probe (`callback.probe`) is made when training starts, on the model's device, in the first process only.

    The Trainer gives its callbacks the loss only when it logs. A schedule by the loss therefore goes by logged losses:
    set `logging_steps=1` for the finest. Other schedules see every step and record the loss logged last.

    Args:
        x_probe: a dict of keyword tensors (`input_ids`, `attention_mask`, ...), each [n, ...], or one tensor.
        y_probe: labels.
        network: the name of a submodule to follow, or a function of the model that gives it; None for the model.
        options: arguments of `Probe`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.by_loss = as_schedule(options.get("schedule", "log")).needs_loss
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the probe."""
        if state.is_world_process_zero:
            self.follow(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report an optimiser step to the probe."""
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
        self.finish()
