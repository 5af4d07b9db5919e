"""Figs 3.2 and A.1: the curve a network has learned on the way, and its loss, for a sum of sinusoids.

Fig. 3.2, verdict. A moment is intermediate when between a tenth and nine tenths of the loss have gone. Over these
moments and over runs, "confirmed" if (1) the learned curve is smoother than the target, its mean squared frequency over
the target's below 1 by two standard errors, and (2) it is a version of the target: nearer to the best low-pass of it
than to the best high-pass, by two standard errors (each the nearest of those that keep 1, ..., m - 1 sinusoids).

Fig. A.1, verdict. "Confirmed" if in both settings, over runs, the rank correlation of loss and step is below -0.9 and
the largest climb above an earlier loss is below a tenth of the first loss, both by two standard errors.
"""

import torch
from torch import Tensor

from biascope.studies.estimates import below, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult, Verdict
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fig3_1 import learned_chart
from biascope.studies.spectral.waves import SIZES, WAVES, Waves, rank_correlation

SMOOTH = "At intermediate iterations the learned curve is a smooth version of the target."
MONOTONE = "The training loss of the sum of sines decays almost monotonically, with equal and with growing amplitudes."


@study("spectral/fig3.2", paper="alignment", figure="3.2", claim=SMOOTH, sizes=SIZES)
def fig3_2(
    run: Run,
    *,
    waves: Waves = WAVES,
) -> StudyResult:
    """Smoothness of the learned curve on the way, and which part of the target it is."""
    got = _train(run, "equal", waves)
    at, losses, out, y = (torch.as_tensor(got[name]) for name in ("steps", "losses", "out", "target"))
    gone = 1 - losses / losses[0]
    between = (gone > 0.1) & (gone < 0.9)  # [r, runs]
    if not bool(between.any(0).all()):
        return StudyResult(
            "not tested", SMOOTH, "A run has no intermediate moment: train longer or measure more often."
        )
    rough = roughness(out) / roughness(y)
    low, high = nearest_parts(out, y, waves.frequencies)

    def mean(v: Tensor) -> Estimate:
        return Estimate.of([float(v[between[:, i], i].double().mean()) for i in range(v.shape[1])])

    ratio, near, far, gap = mean(rough), mean(low), mean(high), mean(low - high)
    numbers = {
        "mean squared frequency over the target's, intermediate": ratio,
        "distance to the best low-pass, intermediate": near,
        "distance to the best high-pass, intermediate": far,
        "low-pass minus high-pass, intermediate": gap,
        "mean squared error at the end": Estimate.of(losses[-1]),
    }
    reached = f" {float(gone[-1].mean()):.0%} of the loss have gone at the end."
    return StudyResult(
        "confirmed" if below(ratio, 1.0) and below(gap, 0.0) else "not confirmed",
        SMOOTH,
        f"While a tenth to nine tenths of the loss go, the mean squared frequency of the curve is {ratio} of the "
        f"target's; its distance to the best low-pass of the target is {near}, to the best high-pass {far} (norm "
        f"of the target: 1).{reached} "
        f"{waves}.",
        numbers,
        (
            learned_chart(at, out[:, 0], y[0]),
            Chart(
                "smoothness",
                "Mean squared frequency of the learned curve over the target's",
                "step",
                "ratio",
                (curve("mean of runs", at, rough.T),),
                alt="The ratio grows towards 1 during training.",
            ),
        ),
    )


@study("spectral/figA.1", paper="alignment", figure="A.1", claim=MONOTONE, sizes=SIZES)
def figA_1(
    run: Run,
    *,
    waves: Waves = WAVES,
) -> StudyResult:
    """How monotone the loss of the sum of sinusoids is."""
    numbers: dict[str, Estimate] = {}
    curves: list[Series] = []
    met, said = [], []
    for setting in ("equal", "growing"):
        got = _train(run, setting, waves)
        at, losses = torch.as_tensor(got["steps"]), torch.as_tensor(got["losses"])
        order = Estimate.of(rank_correlation(at, losses.T))
        climb = Estimate.of(climbs(losses))
        numbers[f"rank correlation of loss and step, {setting}"] = order
        numbers[f"largest climb over the first loss, {setting}"] = climb
        numbers[f"last loss over the first, {setting}"] = Estimate.of(losses[-1] / losses[0])
        curves.append(curve(f"{setting} amplitudes", at, losses.T))
        said.append(
            f"{setting} amplitudes: rank correlation of loss and step {order}, largest climb {climb} of the first loss"
        )
        met.append(below(order, -0.9) and below(climb, 0.1))
    verdict: Verdict = "confirmed" if all(met) else "not confirmed"
    return StudyResult(
        verdict,
        MONOTONE,
        f"{'; '.join(said)}. {waves.runs} runs of {waves.steps} steps, looked at every {waves.every}, "
        f"{waves.depth} Linear layers of {waves.width} units.",
        numbers,
        (
            Chart(
                "loss",
                "Training loss of the sum of sinusoids",
                "step",
                "mean squared error",
                tuple(curves),
                alt="Both losses fall, with small bumps.",
                log_y=True,
            ),
        ),
    )


def _train(run: Run, setting: str, waves: Waves) -> dict[str, Value]:
    """The trainings of spectral/fig3.1 (same networks and phases), with the whole curves kept."""

    def train() -> dict[str, Value]:
        done, y = waves.fit(run, setting, lambda out, _: {"out": out})
        return {"steps": done.steps, "losses": done.losses, "target": y.float(), **done.records}

    return run.cached(setting, train)


def roughness(curve: Tensor) -> Tensor:
    """Mean squared frequency of curves [..., n], weighted by power; the mean of a curve does not count.

    Example:
        >>> z = torch.arange(64, dtype=torch.float64) / 64
        >>> round(float(roughness((2 * torch.pi * 3 * z).sin() + 5)), 6)
        9.0
    """
    power = torch.fft.rfft(curve.double()).abs().square()[..., 1:]
    k = torch.arange(1, power.shape[-1] + 1, dtype=torch.float64)
    found: Tensor = (power * k.square()).sum(-1) / power.sum(-1).clamp_min(1e-300)
    return found


def nearest_parts(curve: Tensor, target: Tensor, frequencies: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Distances [r, T] (over the norm of the target) of curves [r, T, n] to the nearest low-pass and high-pass of
    the targets [T, n], those that keep 1, ..., m - 1 of the m sinusoids.
    """
    coefficients = torch.fft.rfft(target.double())
    parts = []
    for k in sorted(frequencies):
        kept = torch.zeros_like(coefficients)
        kept[..., k] = coefficients[..., k]
        parts.append(torch.fft.irfft(kept, n=target.shape[-1]))
    stacked = torch.stack(parts)  # [m, T, n]
    total = stacked.sum(0)
    lows = stacked.cumsum(0)[:-1]
    norm = target.double().norm(dim=-1)

    def nearest(candidates: Tensor) -> Tensor:
        every = torch.stack([(curve.double() - candidate).norm(dim=-1) for candidate in candidates])
        out: Tensor = every.amin(0) / norm
        return out

    return nearest(lows), nearest(total - lows)


def climbs(losses: Tensor) -> Tensor:
    """The largest rise of losses [r, T] above an earlier value, over the first value, for each run [T].

    Example:
        >>> climbs(torch.tensor([[4.0], [1.0], [3.0], [0.5]])).tolist()
        [0.5]
    """
    lowest = losses.cummin(0).values
    found: Tensor = (losses - lowest).amax(0) / losses[0]
    return found
