"""Options that the studies of training regimes share: how long each network trains, with which alpha and rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from biascope.studies.lazy.training import Setting

Factor = Annotated[float, "ratio of successive losses at which the groups are measured"]


@dataclass(frozen=True)
class Pace:
    """What the trainings of a study have in common."""

    batch: Annotated[int, "examples per step"] = 125
    stop: Annotated[float, "training loss at which a run ends"] = 0.05
    seeds: Annotated[int, "initialisations"] = 3
    capture: Annotated[bool, "replay a CUDA graph, on CUDA"] = True

    def setting(self, alpha: float, lr: float, steps: int, factor: float, every: int = 20) -> Setting:
        """One training, with momentum 0.9."""
        return Setting(alpha, lr, 0.9, self.batch, steps, self.stop, factor, every, capture=self.capture)


@dataclass(frozen=True)
class Regimes(Pace):
    """Regimes that differ in alpha alone."""

    alphas: Annotated[tuple[float, ...], "the non-linear and the linear regime"] = (1.0, 100.0)
    lr: Annotated[float, "learning rate of the plain network"] = 0.01
    steps: Annotated[tuple[int, ...], "steps at most, one number per alpha"] = (2000, 8000)

    def settings(self, factor: float, every: int = 20, kind: str = "") -> dict[str, Setting]:
        """One training per alpha, by label."""
        return {
            f"{kind}alpha = {alpha:g}": self.setting(alpha, self.lr, steps, factor, every)
            for alpha, steps in zip(self.alphas, self.steps, strict=True)
        }


REGIMES = Regimes()
