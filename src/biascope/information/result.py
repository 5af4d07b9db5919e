"""What an estimate of mutual information says about itself."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.support.figures import axes_or_new, once
from biascope.support.signatures import checked
from biascope.support.tables import facts, number

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


class EstimateWarning(UserWarning):
    """The number is there, but something about it should be known before it is used."""


@dataclass(frozen=True)
class MutualInformation:
    """An estimate of I(x; y) in nats, on pairs that no choice was made with.

    `standard_error` is over blocks of pairs: it says how the number would move with other held-out pairs, not how with
    another training. `is_lower_bound`: the expectation of `nats` is at most I(x; y). `curve` [k] is the estimate on
    validation pairs at `steps` [k] of training; its maximum was chosen, so the curve is no bound. `cap` is the largest
    value the estimator can give (log K for InfoNCE). `plug_in` (mine) is Donsker-Varadhan with the logarithm of
    the held-out mean itself: the number usually printed, above a lower bound by Jensen's inequality. `notes` are the
    warnings raised.
    """

    nats: float
    standard_error: float
    estimator: str
    is_lower_bound: bool
    n: int
    n_held_out: int
    seed: int
    curve: Tensor = field(default=torch.empty(0, dtype=torch.float64, device="cpu"), repr=False)
    steps: Tensor = field(default=torch.empty(0, dtype=torch.int64, device="cpu"), repr=False)
    notes: tuple[str, ...] = ()
    cap: float | None = None
    plug_in: float | None = None
    critic: nn.Module | None = field(default=None, repr=False)

    @property
    def bits(self) -> float:
        """The same number in bits."""
        return self.nats / math.log(2)

    def __str__(self) -> str:
        kind = "a lower bound in expectation" if self.is_lower_bound else "not a bound"
        lines = [f"I(x; y) = {number(self.nats, self.standard_error)} nats ({self.estimator}, {self.n} pairs; {kind})"]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _repr_html_(self) -> str:
        """The number and what to know about it, for notebooks."""
        rows: dict[str, object] = {
            "nats": number(self.nats, self.standard_error),
            "lower bound": "in expectation" if self.is_lower_bound else "no",
            "pairs": f"{self.n}, of which {self.n_held_out} for this number",
            "seed": self.seed,
        }
        rows |= {} if self.cap is None else {"cap": self.cap}
        rows |= {} if self.plug_in is None else {"Donsker-Varadhan, plug-in": self.plug_in}
        return facts(
            f"Mutual information, {self.estimator}", rows | {f"note {i + 1}": n for i, n in enumerate(self.notes)}
        )

    @checked
    def plot(self, ax: Any = None) -> Any:
        """The curve on validation pairs, and the held-out number with two standard errors; returns the figure."""
        ax = axes_or_new(ax)
        if len(self.curve):
            ax.plot(self.steps.cpu(), self.curve.cpu(), color=BLUE, label="validation")
            ax.set_xlabel("training step")
            top = max(float(self.curve.max()), self.nats)
            if float(self.curve.min()) < top - 10:  # a critic that overfits falls without end
                ax.set_ylim(top - 10, top + 1)
        else:  # nothing was trained: the number alone
            ax.set_xticks([])
        ax.axhline(self.nats, color=ORANGE, label=f"{self.estimator}, ± 2 standard errors")
        band = 2 * self.standard_error
        ax.axhspan(self.nats - band, self.nats + band, color=ORANGE, alpha=0.2, linewidth=0)
        if self.cap is not None and self.nats > self.cap / 2:
            ax.axhline(self.cap, color=GREY, linestyle="--", label="cap")
        ax.set_ylabel("mutual information (nats)")
        ax.legend(frameon=False)
        return once(ax.figure)
