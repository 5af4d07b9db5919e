"""Fig. 4a: how much of the label survives average pooling, as a function of the frequency that carries it."""

from typing import Annotated

import numpy as np
import torch

from biascope.errors import InputError
from biascope.geometry.pooling import box_prefilter, pooling_bayes_accuracy, transfer
from biascope.studies.estimates import spearman
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "After average pooling the best accuracy on D(v) falls with the frequency of v, "
    "from 100 % at DC to chance at the zeros of the filter."
)


@study(
    "nad/fig4a",
    paper="nad",
    figure="4a",
    claim=CLAIM,
    sizes={"smoke": {"D": 64}, "laptop": {}, "paper": {}},
)
def fig4a(
    run: Run,
    *,
    D: Annotated[int, "signal length"] = 128,
    S: Annotated[int, "pooling factor"] = 4,
    eps: Annotated[float, "distance of a class mean from the origin (not in the paper)"] = 1.0,
    sigma: Annotated[float, "noise level (not in the paper)"] = 3.0,
) -> StudyResult:
    """Bayes accuracy after average pooling, exact and by the paper's closed form."""
    box = box_prefilter(S, D)
    frequencies = list(range(D // 2 + 1))
    ordinary = np.array([(2 * f) % (D // S) != 0 for f in frequencies])
    if D % S or ordinary.sum() < 3:
        raise InputError(
            f"D = {D}, S = {S}: S must divide D, and leave at least three frequencies that do not alias onto their own "
            f"conjugates (here {ordinary.sum()}); a longer signal or a smaller pooling factor has more"
        )

    def curves() -> dict[str, Value]:
        return {
            variant: torch.tensor(
                [pooling_bayes_accuracy(box, S, f, eps, sigma, variant) for f in frequencies], dtype=torch.float64
            )
            for variant in ("exact", "real", "complex", "printed")
        }

    accuracy = {name: np.asarray(values, dtype=float) for name, values in run.cached("curves", curves).items()}
    exact, gain = accuracy["exact"], np.abs(transfer(box))[: D // 2 + 1]
    zeros = np.isclose(gain, 0.0, atol=1e-12)
    order = spearman(gain[ordinary], exact[ordinary])
    agreement = float(np.abs(accuracy["real"] - exact)[ordinary].max())
    off = float(np.abs(accuracy["printed"] - exact)[ordinary].max())
    run.log(spearman=order, closed_form_error=agreement, printed_error=off)

    chance = bool(np.allclose(exact[zeros], 0.5, atol=1e-6))
    confirmed = order > 0.99 and chance and exact[0] > 0.999
    measured = (
        f"Accuracy {exact[0]:.3f} at DC, {exact[zeros].max() if zeros.any() else exact.min():.3f} at its zeros; "
        f"rank correlation with |m^| is {order:.3f}. The corrected closed form is exact to {agreement:.0e}; "
        f"the printed one is off by up to {off:.3f}."
    )
    chart = Chart(
        name="bayes-accuracy",
        title=f"Bayes accuracy after average pooling (D = {D}, S = {S})",
        x_label="frequency l of the discriminative direction",
        y_label="best possible accuracy",
        series=(
            Series.of("exact (any classifier)", frequencies, exact),
            Series.of("Theorem 1, corrected, real signals", frequencies, accuracy["real"], style="points"),
            Series.of("Theorem 1, as printed", frequencies, accuracy["printed"], style="dashed"),
        ),
        alt=f"Accuracy starts at 1 for frequency 0, falls to one half at frequency {D // S} and stays near one half.",
        caption=f"Box filter, eps = {eps:g}, sigma = {sigma:g}. The paper does not give eps and sigma.",
    )
    return StudyResult(
        verdict="confirmed" if confirmed else "not confirmed",
        claim=CLAIM,
        measured=measured,
        numbers={
            "Spearman(|m^|, accuracy)": Estimate(order),
            "accuracy at DC": Estimate(float(exact[0])),
            "largest error of the corrected closed form": Estimate(agreement),
            "largest error of the printed formula": Estimate(off),
        },
        figures=(chart,),
    )
