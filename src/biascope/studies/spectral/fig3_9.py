"""Fig 3.9: classification accuracy over the frequency of the labels and the petals of the curve they live on.

y = 1[sin(2 pi k z + phi) > threshold] on gamma_L(z), cross-entropy. An accuracy means nothing without its majority
baseline, which depends on k and phi (if k divides n, few phases are hit); skill is (accuracy - baseline) / (1 -
baseline).

Verdict rule. Rank correlation of L with skill at fixed k, averaged over k, for every run: "confirmed" if above 0 by two
standard errors.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.studies.estimates import above, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.flowers import Training, cell_map, flower_classes
from biascope.studies.spectral.waves import rank_correlation

CLAIM = "Increasing L gives better classification of the same target signal."
SHORT = Training(steps=10_000)


@study(
    "spectral/fig3.9",
    paper="alignment",
    figure="3.9",
    claim=CLAIM,
    sizes={
        "smoke": {"frequencies": (8, 16), "petals": (0, 4, 8), "samples": 100, "width": 64, "depth": 4, "steps": 250,
                  "runs": 3, "lr": 1e-3},
        "laptop": {"frequencies": (20, 40, 80), "petals": (0, 4, 8, 12, 16, 20), "samples": 250, "width": 128,
                   "steps": 1000, "runs": 3, "lr": 1e-3},
        "paper": {},
    },
)  # fmt: skip
def fig3_9(
    run: Run,
    *,
    frequencies: Annotated[tuple[int, ...], "k, cycles of z on [0, 1]"] = tuple(range(50, 450, 50)),
    petals: Annotated[tuple[int, ...], "L of the curves"] = tuple(range(0, 22, 2)),
    threshold: Annotated[float, "label 1 above it (the published code has 0)"] = 0.5,
    runs: Annotated[int, "networks for each cell, each with its own phase"] = 3,
    training: Training = SHORT,
) -> StudyResult:
    """Accuracy over frequency and petals, beside the majority baseline."""
    cells = [(k, L) for k in frequencies for L in petals]
    shape = (len(frequencies), len(petals))

    def train(i: int) -> dict[str, Value]:
        x, y, majority = flower_classes(cells, training.samples, threshold, derive(run.seed, i))
        labels = y.to(run.device)

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"accuracy": ((out > 0) == (labels > 0.5)).float().mean(1)}

        done = training.fit(run, derive(run.seed, "init", i), x, y, max(1, training.steps // 20), measure)
        return {"steps": done.steps, "majority": majority, **done.records}

    parts = run.cached_each("run", range(runs), train)
    at = torch.as_tensor(parts[0]["steps"])
    accuracy = torch.stack([torch.as_tensor(p["accuracy"]) for p in parts]).reshape(runs, len(at), *shape)
    majority = torch.stack([torch.as_tensor(p["majority"]) for p in parts]).reshape(runs, *shape)
    skill = ((accuracy[:, -1] - majority) / (1 - majority)).double()
    correlation = Estimate.of(rank_correlation(torch.tensor(petals), skill).mean(1))
    numbers = {"rank correlation of L with skill at fixed k": correlation}
    for i, k in enumerate(frequencies):
        for j in (0, len(petals) - 1):
            numbers[f"accuracy, k = {k}, L = {petals[j]}"] = Estimate.of(accuracy[:, -1, i, j])
        numbers[f"majority baseline, k = {k}"] = Estimate.of(majority[:, i, 0])
    mean, last = accuracy[:, -1].mean(0), len(petals) - 1
    return StudyResult(
        verdict="confirmed" if above(correlation, 0.0) else "not confirmed",
        claim=CLAIM,
        measured=f"Rank correlation of L with skill at fixed k: {correlation}. Mean accuracy "
        f"{float(mean[:, 0].mean()):.3f} at L = {petals[0]} and {float(mean[:, last].mean()):.3f} at "
        f"L = {petals[last]}; majority baseline "
        f"{float(majority.mean()):.3f}. {runs} runs of {training.steps} steps, {training.depth} Linear layers of "
        f"{training.width} units.",
        numbers=numbers,
        figures=(
            *(
                cell_map(name, title, frequencies, petals, values, name, low)
                for name, title, values, low in (
                    ("accuracy", "Training accuracy", mean, 0.5),
                    ("baseline", "Majority baseline", majority.mean(0), 0.5),
                    ("skill", "Skill: accuracy above the baseline", skill.mean(0), 0.0),
                )
            ),
            Chart(
                "skill-over-petals",
                "Skill over the number of petals",
                "petals L",
                "skill",
                tuple(curve(f"k = {k}", petals, skill[:, i]) for i, k in enumerate(frequencies)),
                alt="Skill rises with the number of petals.",
            ),
        ),
    )
