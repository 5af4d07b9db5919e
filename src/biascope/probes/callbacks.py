"""What the callbacks of Lightning and Hugging Face share."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from biascope.probes.probe import Probe
from biascope.probes.records import Record


class Follower:
    """Arguments of a probe that is made when training starts, where the parameters are then."""

    def __init__(
        self,
        x_probe: Any,
        y_probe: Any = None,
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
        move = partial(tree_map_only, Tensor, lambda t: t.to(device))
        if self.network is not None:
            model = model.get_submodule(self.network) if isinstance(self.network, str) else self.network(model)
        groups = self.options.get("groups")
        if groups is not None:
            groups = groups | move({k: g for k, g in groups.items() if isinstance(g, tuple)})
        self.probe = Probe(model, move(self.x_probe), move(self.y_probe), **{**self.options, "groups": groups})

    def finish(self) -> None:
        """Measure the last state and close files."""
        if self.probe is not None:
            self.probe.finish()
