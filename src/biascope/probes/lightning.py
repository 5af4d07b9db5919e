"""A probe as a Lightning callback."""

from typing import TYPE_CHECKING, Any

from biascope.probes.callbacks import Follower
from biascope.support.errors import UnsupportedError

if TYPE_CHECKING:
    Callback = Any
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise UnsupportedError('this callback needs Lightning: pip install "biascope[lightning]"') from error


class ProbeCallback(Follower, Callback):  # type: ignore[misc]
    """Measures a Lightning module while it trains: `Trainer(callbacks=[ProbeCallback(x, y, metrics=[...])])`.

    The probe (`callback.probe`) is made when training starts, on the module's device, in the first process only, and
    sees every optimiser step. The loss is what `training_step` returned.

    Args:
        x_probe: inputs [n, ...] or a dict of keyword tensors; moved to the module's device.
        y_probe: labels.
        network: which part of the module to follow: the name of a submodule, or a function of the module; None for the
            module itself (its `forward`).
        options: arguments of `Probe`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the probe."""
        if trainer.is_global_zero:
            self.follow(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a step to the probe, if the optimiser took one (with accumulated gradients it does not always)."""
        if self.probe is None or trainer.global_step <= self.probe.at:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # Lightning divides it by the number of accumulated batches
            loss = loss * trainer.accumulate_grad_batches
        per_epoch = trainer.num_training_batches
        epoch = trainer.current_epoch + ((batch_idx + 1) / per_epoch if per_epoch != float("inf") else 0)
        self.probe.step(loss, step=trainer.global_step, epoch=epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the last state and close files."""
        self.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close files; what was recorded is there."""
        if self.probe is not None:
            self.probe.close()
