"""A probe as a Lightning callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from biascope.errors import InputError, UnsupportedError
from biascope.inputs import map_inputs
from biascope.probes.groups import moved_groups
from biascope.probes.probe import Probe
from biascope.probes.record import Record

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


class ProbeCallback(Callback):  # type: ignore[misc]
    """Measures a Lightning module while it trains: `Trainer(callbacks=[ProbeCallback(x, y, metrics=[...])])`.

    The probe (`callback.probe`) is made when training starts, on the module's device, in the first process only, and
    is told of every optimiser step. The loss is what `training_step` returned.

    Args:
        x_probe: inputs [n, ...] or a dict of keyword tensors; moved to the module's device.
        y_probe: labels.
        network: which part of the module to follow: the name of a submodule, or a function of the module; None for the
            module itself (its `forward`).
        options: arguments of `Probe`.

    Example:
        trainer = lightning.Trainer(callbacks=[ProbeCallback(x, y, network="net", schedule="log")])
    """

    def __init__(
        self,
        x_probe: Any,
        y_probe: Tensor | None = None,
        network: str | Callable[[nn.Module], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.x_probe, self.y_probe, self.network, self.options = x_probe, y_probe, network, options
        self.probe: Probe | None = None

    @property
    def records(self) -> tuple[Record, ...]:
        """Records so far; empty before training and in processes other than the first."""
        return self.probe.records if self.probe is not None else ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the probe, where the parameters are now."""
        if not trainer.is_global_zero:
            return
        model = self._pick(pl_module)
        device = pl_module.device
        options = {**self.options, "groups": moved_groups(self.options.get("groups"), device)}
        x = map_inputs(self.x_probe, lambda t: t.to(device))
        y = None if self.y_probe is None else self.y_probe.to(device)
        self.probe = Probe(model, x, y, **options)

    def _pick(self, module: nn.Module) -> nn.Module:
        if self.network is None:
            return module
        if callable(self.network):
            chosen: nn.Module = self.network(module)
            return chosen
        names = dict(module.named_modules())
        if self.network not in names:
            raise InputError(f"network={self.network!r}: the module has {', '.join(filter(None, names))}")
        part: nn.Module = names[self.network]
        return part

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the probe of a step, if the optimiser took one (with accumulated gradients it does not always)."""
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
        if self.probe is not None:
            self.probe.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close files; what was recorded is there."""
        if self.probe is not None:
            self.probe.close()
