"""Fig 3.8: on a curve with many petals the same high frequencies are easier to learn.

The target is a sum of sinusoids of the latent z; the network sees gamma_L(z), a flower of L petals. Its spectrum is
that of f(gamma_L(z)).

Verdict rule. For every run (one set of phases, on all L) two rank correlations with L: of the loss at the end, and of
the amplitude at the upper half of the frequencies averaged over training (capped at 1). "Confirmed" if the first is
below 0 and the second above 0 by two standard errors.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.spectral import amplitude_spectrum, flower
from biascope.studies.estimates import above, below, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import draw_mlps, fit
from biascope.studies.spectral.waves import rank_correlation, wave_targets

CLAIM = "Manifolds with more petals (larger L) attenuate the spectral bias: high frequencies are learned more easily."


@study(
    "spectral/fig3.8",
    paper="alignment",
    figure="3.8",
    claim=CLAIM,
    sizes={
        "smoke": {"frequencies": (4, 8, 12, 16), "petals": (0, 4, 8), "samples": 100, "width": 64, "depth": 4,
                  "steps": 250, "runs": 3, "lr": 1e-3, "every": 25},
        "laptop": {"frequencies": (8, 16, 24, 32, 40, 48, 56, 64), "samples": 320, "runs": 3, "steps": 1000,
                   "every": 25},
        "paper": {},
    },
)  # fmt: skip
def fig3_8(
    run: Run,
    *,
    frequencies: Annotated[tuple[int, ...], "k_i, cycles of z on [0, 1]"] = tuple(range(20, 220, 20)),
    petals: Annotated[tuple[int, ...], "L of the curves"] = (0, 4, 10, 16),
    depth: Annotated[int, "Linear layers"] = 6,
    width: Annotated[int, "units in a hidden layer"] = 256,
    samples: Annotated[int, "points of the grid z = j/n"] = 1000,
    steps: Annotated[int, "full-batch Adam steps"] = 50_000,
    runs: Annotated[int, "networks for each curve, each with its own phases"] = 10,
    lr: Annotated[float, "of Adam (not given in the text)"] = 3e-4,
    every: Annotated[int, "steps between two measurements"] = 100,
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32",
) -> StudyResult:
    """Learning the same waves on curves of more and more petals."""
    z, y = wave_targets(frequencies, [1.0] * len(frequencies), samples, runs, run.seed)

    def train() -> dict[str, Value]:
        x = torch.stack([flower(L)(z) for L in petals]).repeat_interleave(runs, 0)  # [L runs, n, 2]
        networks = draw_mlps(len(petals) * runs, 2, depth, width, derive(run.seed, "init"), run.device)

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"spectrum": amplitude_spectrum(out)[:, list(frequencies)]}

        done = fit(networks, x, y.repeat(len(petals), 1), steps=steps, lr=lr, every=every, measure=measure,
                   precision=precision)  # fmt: skip
        return {"steps": done.steps, "losses": done.losses, **done.records}

    got = run.cached("trained", train)
    at = torch.as_tensor(got["steps"])
    losses = torch.as_tensor(got["losses"]).reshape(len(at), len(petals), runs)
    spectrum = torch.as_tensor(got["spectrum"]).reshape(len(at), len(petals), runs, len(frequencies))
    L = torch.tensor(petals)
    high = spectrum.clamp(max=1)[..., len(frequencies) // 2 :].mean((0, 3))  # [L, runs]
    numbers = {
        "rank correlation of L with the last loss": Estimate.of(rank_correlation(L, losses[-1].T)),
        "rank correlation of L with early learning of high k": Estimate.of(rank_correlation(L, high.T)),
    }
    loss, early = numbers.values()
    for i, petal in enumerate(petals):
        numbers[f"mean squared error at the end, L = {petal}"] = Estimate.of(losses[-1, i])
        numbers[f"mean amplitude of the upper half of k over training, L = {petal}"] = Estimate.of(high[i])
    rows = torch.linspace(0, len(at) - 1, min(len(at), 50)).round().long()
    return StudyResult(
        verdict="confirmed" if below(loss, 0.0) and above(early, 0.0) else "not confirmed",
        claim=CLAIM,
        measured=f"Rank correlation of L with the last loss {loss}, with early learning of high frequencies {early}. "
        f"Loss at the end: {', '.join(f'{float(losses[-1, i].mean()):.3g} (L = {p})' for i, p in enumerate(petals))}. "
        f"{runs} runs of {steps} steps, {depth} Linear layers of {width} units, k up to {max(frequencies)}.",
        numbers=numbers,
        figures=(
            *(
                HeatMap.of(
                    f"spectrum-L{petal}",
                    f"Spectrum over training, L = {petal}",
                    x=frequencies,
                    y=at[rows].tolist(),
                    z=spectrum[rows, i].mean(1).clamp(0, 1).tolist(),
                    x_label="frequency",
                    y_label="step",
                    z_label="amplitude",
                    low=0.0,
                    high=1.0,
                    alt=f"Which frequencies are learned when, on {petal} petals.",
                )
                for i, petal in enumerate(petals)
            ),
            Chart(
                "losses",
                "Mean squared error for each L",
                "step",
                "mean squared error",
                tuple(curve(f"L = {p}", at[rows], losses[rows, i].T) for i, p in enumerate(petals)),
                alt="The loss falls faster on curves with more petals.",
                log_y=True,
            ),
        ),
    )
