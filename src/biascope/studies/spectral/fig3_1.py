"""Figs 3.1, 3.2 and A.1: a network learns the low frequencies of a sum of sinusoids first, whatever their amplitudes.

Verdict rule. A frequency that is learned early has a large amplitude when averaged over training (each normalised by
its target and capped at 1). "Confirmed" if in both settings the rank correlation of that average with k, over runs, is
below -0.5 by two standard errors, and the spectral norms of the hidden layers have grown (ratio above 1 by two).
"""

import torch
from torch import Tensor

from biascope.spectral import amplitude_spectrum
from biascope.studies.estimates import above, below, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import norms_of
from biascope.studies.spectral.waves import SIZES, WAVES, Waves, first_above, rank_correlation

CLAIM = (
    "Lower frequencies are regressed first, regardless of their amplitudes; the spectral norms of the layers grow as "
    "higher frequencies are fitted."
)
SHOWN = 4  # moments at which the learned function is shown


@study("spectral/fig3.1", paper="alignment", figure="3.1", claim=CLAIM, sizes=SIZES)
def fig3_1(
    run: Run,
    *,
    waves: Waves = WAVES,
) -> StudyResult:
    """Which frequencies a ReLU network learns first, with equal and with growing amplitudes."""
    frequencies = waves.frequencies
    k = torch.tensor(frequencies)
    numbers: dict[str, Estimate] = {}
    figures: list[Chart | HeatMap] = []
    correlations, growths = [], []
    for setting in ("equal", "growing"):

        def train(setting: str = setting) -> dict[str, Value]:
            targets = torch.tensor(waves.amplitudes(setting), device=run.device)

            def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
                spectrum = amplitude_spectrum(out)[:, list(frequencies)] / targets
                return {"spectrum": spectrum, "norms": norms_of(params), "first": out[:1]}

            done, y = waves.fit(run, setting, measure)
            return {"steps": done.steps, "losses": done.losses, "target": y[:1], **done.records}

        got = run.cached(setting, train)
        at, losses, spectrum, norms = (torch.as_tensor(got[n]) for n in ("steps", "losses", "spectrum", "norms"))
        learned = spectrum.clamp(max=1.0).mean(0)  # [runs, m]
        correlation = Estimate.of(rank_correlation(k, learned))
        growth = Estimate.of((norms[-1, :, 1:-1] / norms[0, :, 1:-1]).mean(1))
        correlations.append(correlation)
        growths.append(growth)
        numbers[f"rank correlation of k with early learning, {setting}"] = correlation
        numbers[f"growth of hidden spectral norms, {setting}"] = growth
        numbers[f"mean squared error at the end, {setting}"] = Estimate.of(losses[-1])
        times = first_above(spectrum.mean(1), at, 0.9)
        for i, f in enumerate(frequencies):
            numbers[f"amplitude at k = {f} at the end, {setting}"] = Estimate.of(spectrum[-1, :, i])
            if not times[i].isnan():
                numbers[f"step at which k = {f} passes 0.9, {setting}"] = Estimate(float(times[i]))
        figures += charts(setting, frequencies, at, losses, spectrum, norms)
        if setting == "equal":
            figures.append(learned_chart(at, torch.as_tensor(got["first"])[:, 0], torch.as_tensor(got["target"])[0]))
    confirmed = all(below(c, -0.5) for c in correlations) and all(above(g, 1.0) for g in growths)
    return StudyResult(
        verdict="confirmed" if confirmed else "not confirmed",
        claim=CLAIM,
        measured=f"Rank correlation of frequency with early learning: {correlations[0]} with equal amplitudes, "
        f"{correlations[1]} with growing ones (-1 = strictly low first). Hidden spectral norms grew "
        f"{growths[0].value:.3g} and {growths[1].value:.3g} times. "
        f"{waves}.",
        numbers=numbers,
        figures=tuple(figures),
    )


def charts(
    setting: str, frequencies: tuple[int, ...], at: Tensor, losses: Tensor, spectrum: Tensor, norms: Tensor
) -> list[Chart | HeatMap]:
    """The heat map of the spectrum over training, the norms beside it, and the loss."""
    rows = torch.linspace(0, len(at) - 1, min(len(at), 60)).round().long()
    steps = at[rows].tolist()
    return [
        HeatMap.of(
            f"spectrum-{setting}",
            f"Normalised spectrum over training, {setting} amplitudes",
            x=frequencies,
            y=steps,
            z=spectrum.mean(1)[rows].clamp(0, 1).tolist(),
            x_label="frequency",
            y_label="step",
            z_label="amplitude over target",
            low=0.0,
            high=1.0,
            alt="Columns of low frequency fill up before columns of high frequency.",
        ),
        Chart(
            f"norms-{setting}",
            f"Spectral norm of each layer, {setting} amplitudes",
            "step",
            "spectral norm",
            tuple(curve(f"layer {i + 1}", steps, layer.T) for i, layer in enumerate(norms[rows].unbind(2))),
            alt="The norms of the hidden layers grow during training.",
        ),
        Chart(
            f"loss-{setting}",
            f"Mean squared error, {setting} amplitudes",
            "step",
            "mean squared error",
            (curve("mean of runs", steps, losses[rows].T),),
            alt="The loss falls during training.",
            log_y=True,
        ),
    ]


def learned_chart(at: Tensor, first: Tensor, target: Tensor) -> Chart:
    """Fig 3.2: the function of the first run at a few moments, over its target."""
    n = len(target)
    moments = [min(len(at) - 1, round((len(at) - 1) * 4.0 ** -(SHOWN - 1 - i))) for i in range(SHOWN)]
    z = [j / n for j in range(n)]
    return Chart(
        "learned",
        "The learned function and its target (first run, equal amplitudes)",
        "z",
        "f(z)",
        (
            Series.of("target", z, target, style="dashed"),
            *(Series.of(f"step {int(at[i])}", z, first[i]) for i in dict.fromkeys(moments)),
        ),
        alt="Early functions follow only the slow parts of the target, later ones all of it.",
    )
