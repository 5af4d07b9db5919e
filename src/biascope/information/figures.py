"""Pictures of estimates (matplotlib, imported only when one is asked for)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from biascope.figures import once, pyplot

if TYPE_CHECKING:
    from biascope.information.result import MutualInformation

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


def plot_estimate(found: MutualInformation, ax: Any = None) -> Any:
    """Validation curve over training steps; a line with a band of two standard errors for the held-out number."""
    if ax is None:
        _, ax = pyplot().subplots(figsize=(3.4, 2.6), layout="constrained")
    if len(found.curve):
        ax.plot(found.steps.cpu(), found.curve.cpu(), color=BLUE, label="validation")
        ax.set_xlabel("training step")
        top = max(float(found.curve.max()), found.nats)
        if float(found.curve.min()) < top - 10:  # a critic that overfits falls without end
            ax.set_ylim(top - 10, top + 1)
    else:  # nothing was trained: the number alone
        ax.set_xticks([])
    ax.axhline(found.nats, color=ORANGE, label=found.estimator)
    band = 2 * found.standard_error
    ax.axhspan(found.nats - band, found.nats + band, color=ORANGE, alpha=0.2, linewidth=0)
    if found.cap is not None and found.nats > found.cap / 2:
        ax.axhline(found.cap, color=GREY, linestyle="--", label="cap")
    ax.set_ylabel("mutual information (nats)")
    ax.legend(frameon=False)
    return once(ax.figure)
