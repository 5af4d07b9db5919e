"""What the callbacks of Lightning and Hugging Face share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from biascope.probes.probe import Probe
from biascope.probes.records import Record
from biascope.support.inputs import map_inputs


class Follower:
    """Arguments of a probe that is made when training starts, where the parameters are then."""

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

    def follow(self, model: nn.Module) -> None:
        """Make the probe of a model or a part of it, with the batch and the groups moved to its device."""
        device = next(model.parameters()).device
        if self.network is not None:
            model = model.get_submodule(self.network) if isinstance(self.network, str) else self.network(model)
        groups = self.options.get("groups")
        if groups is not None:
            own = {k: g for k, g in groups.items() if isinstance(g, tuple)}
            groups = groups | {k: (map_inputs(x, lambda t: t.to(device)), y.to(device)) for k, (x, y) in own.items()}
        x = map_inputs(self.x_probe, lambda t: t.to(device))
        y = None if self.y_probe is None else self.y_probe.to(device)
        self.probe = Probe(model, x, y, **{**self.options, "groups": groups})

    def finish(self) -> None:
        """Measure the last state and close files."""
        if self.probe is not None:
            self.probe.finish()
