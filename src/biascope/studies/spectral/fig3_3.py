"""Fig 3.3: low frequencies are more robust to noise in the parameters than high ones.

Networks are trained to a sum of sinusoids; their parameters are moved by delta in a uniformly random direction; the
amplitude at each k, averaged over directions (of magnitudes), is divided by that before the move.

Verdict rule. Frequencies of which a network holds at least half the target amplitude count. "Confirmed" if the rank
correlation of k with the amplitude left (averaged over all delta > 0), over networks, is below 0 by two
standard errors.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.progress import progress
from biascope.seeds import derive
from biascope.spectral import amplitude_spectrum, perturbation_robustness
from biascope.studies.estimates import below, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import draw_mlps, fit
from biascope.studies.spectral.waves import rank_correlation, wave_targets

CLAIM = "The lower frequencies are more robust to perturbations of the parameters than the higher frequencies."
LEARNED = 0.5


@study(
    "spectral/fig3.3",
    paper="alignment",
    figure="3.3",
    claim=CLAIM,
    sizes={
        "smoke": {"frequencies": (1, 2, 3, 4, 5), "width": 64, "depth": 4, "samples": 64, "steps": 700, "runs": 3,
                  "lr": 2e-3, "draws": 10, "deltas": 6, "largest": 3.0},
        "laptop": {"frequencies": (2, 4, 6, 8, 10, 12, 14, 16), "samples": 100, "runs": 4, "steps": 2500, "draws": 40,
                   "deltas": 13, "lr": 1e-3},
        "paper": {},
    },
)  # fmt: skip
def fig3_3(
    run: Run,
    *,
    frequencies: Annotated[tuple[int, ...], "k_i, cycles on [0, 1]"] = tuple(range(10, 55, 5)),
    depth: Annotated[int, "Linear layers"] = 6,
    width: Annotated[int, "units in a hidden layer"] = 256,
    samples: Annotated[int, "points of the grid z = j/n"] = 200,
    steps: Annotated[int, "full-batch Adam steps, to convergence"] = 80_000,
    runs: Annotated[int, "networks, each with its own phases"] = 10,
    lr: Annotated[float, "of Adam (not given in the text)"] = 3e-4,
    draws: Annotated[int, "random directions for each network"] = 100,
    deltas: Annotated[int, "lengths of the step, from 0 to `largest`"] = 51,
    largest: Annotated[float, "longest step (not given in the text)"] = 5.0,
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32",
) -> StudyResult:
    """Which frequencies survive noise in the parameters."""
    z, y = wave_targets(frequencies, [1.0] * len(frequencies), samples, runs, run.seed)

    def train() -> dict[str, Value]:
        networks = draw_mlps(runs, 1, depth, width, derive(run.seed, "init"), run.device)
        done = fit(networks, z[:, None], y, steps=steps, lr=lr, every=steps, precision=precision)
        return {"loss": done.losses[-1], **done.networks.params}

    trained = run.cached("trained", train)
    loss = torch.as_tensor(trained.pop("loss"))
    template = draw_mlps(1, 1, depth, width, 0)
    grid = [largest * i / (deltas - 1) for i in range(deltas)]

    def robustness(i: int) -> dict[str, Value]:
        net = template.module(0)
        net.load_state_dict({name: torch.as_tensor(value)[i] for name, value in trained.items()})
        net = net.to(run.device)
        x = z[:, None].float().to(run.device)
        with torch.no_grad():
            held = amplitude_spectrum(net(x)[:, 0])[list(frequencies)]
        found = perturbation_robustness(net, x, frequencies, grid, draws, seed=derive(run.seed, "noise", i))
        return {"held": held, "left": found.mean, "error": found.standard_error}

    parts = run.cached_each("network", progress(range(runs), "perturbing"), robustness)
    held = torch.stack([torch.as_tensor(p["held"]) for p in parts])  # [runs, m]
    left = torch.stack([torch.as_tensor(p["left"]) for p in parts])  # [runs, deltas, m]
    k = torch.tensor(frequencies, dtype=torch.float64)
    mean_left = left[:, 1:].mean(1)
    enough = [i for i in range(runs) if int((held[i] >= LEARNED).sum()) >= 3]
    numbers = {"mean squared error after training": Estimate.of(loss)}
    middle = deltas // 2
    for i, f in enumerate(frequencies):
        numbers[f"amplitude left at k = {f}, delta = {grid[middle]:.3g}"] = Estimate.of(left[:, middle, i])
    if not enough:
        return StudyResult("not tested", CLAIM, "No network learned three frequencies; train longer.", numbers)
    correlation = Estimate.of([float(_correlation(k, mean_left[i], held[i] >= LEARNED)) for i in enough])
    numbers = {"rank correlation of k with the amplitude left": correlation, **numbers}
    return StudyResult(
        verdict="confirmed" if below(correlation, 0.0) else "not confirmed",
        claim=CLAIM,
        measured=f"Rank correlation of frequency with the amplitude left after noise: {correlation}; "
        f"{float((held >= LEARNED).double().mean()):.0%} of the frequencies were learned. {runs} networks of {depth} "
        f"Linear layers of {width} units, {steps} steps, k = {frequencies[0]} to {frequencies[-1]}.",
        numbers=numbers,
        figures=(
            HeatMap.of(
                "robustness",
                "Amplitude left after a random step in parameter space",
                x=frequencies,
                y=grid,
                z=left.mean(0).clamp(0, 1).tolist(),
                x_label="frequency",
                y_label="length of the step",
                z_label="amplitude over that before",
                low=0.0,
                high=1.0,
                alt="The amplitude falls with the step, and sooner at high frequencies.",
            ),
            Chart(
                "curves",
                "Amplitude left, by frequency",
                "length of the step",
                "amplitude over that before",
                tuple(curve(f"k = {f}", grid, left[:, :, i]) for i, f in enumerate(frequencies)),
                alt="Curves of higher frequency fall faster.",
            ),
        ),
    )


def _correlation(k: Tensor, left: Tensor, counts: Tensor) -> Tensor:
    return rank_correlation(k[counts], left[counts])
