"""Fig 3.7: networks that agree on the manifold differ away from it.

The same labels (k, L, phi) are learned from different initial networks; how often do two of them disagree on the
manifold, and on the square around it?

Verdict rule, over disjoint pairs of networks: "confirmed" if the training accuracy is above 0.95 for all, and the
disagreement on the square exceeds that on the manifold by two standard errors.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.studies.estimates import above
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import forward
from biascope.studies.spectral.flowers import BOX, TRAINING, Training, flower_classes, plane, probability_map

CLAIM = "Two networks, identical up to initialisation, agree on the samples of the manifold, yet differ elsewhere."


@study(
    "spectral/fig3.7",
    paper="alignment",
    figure="3.7",
    claim=CLAIM,
    sizes={
        "smoke": {"k": 6, "petals": 4, "samples": 80, "width": 64, "depth": 4, "steps": 400, "lr": 2e-3, "side": 40},
        "laptop": {"k": 30, "petals": 10, "samples": 300, "width": 128, "steps": 3000, "lr": 1e-3, "side": 120},
        "paper": {},
    },
)
def fig3_7(
    run: Run,
    *,
    k: Annotated[int, "frequency of the labels"] = 200,
    petals: Annotated[int, "petals of the curve"] = 20,
    threshold: Annotated[float, "label 1 above it"] = 0.5,
    runs: Annotated[int, "initial networks; pairs are 1 and 2, 3 and 4, ..."] = 6,
    side: Annotated[int, "points along the square's side"] = 200,
    training: Training = TRAINING,
) -> StudyResult:
    """The same labels learned twice: on the manifold and away from it."""
    x, y, majority = flower_classes([(k, petals)], training.samples, threshold, run.seed)

    def train() -> dict[str, Value]:
        done = training.fit(run, derive(run.seed, "init"), x[0], y.expand(runs, -1), training.steps)
        params = list(done.networks.params.values())
        with torch.no_grad():
            return {"on": forward(params, x[0]), "off": forward(params, plane(side))}

    got = run.cached("trained", train)
    on, off = torch.as_tensor(got["on"]), torch.as_tensor(got["off"])
    accuracy = ((on > 0) == (y > 0.5)).double().mean(1)

    def disagreement(logits: Tensor) -> list[float]:
        pairs = logits[: 2 * (runs // 2)].reshape(runs // 2, 2, -1) > 0
        return (pairs[:, 0] != pairs[:, 1]).double().mean(1).tolist()

    on_manifold, off_manifold = disagreement(on), disagreement(off)
    difference = Estimate.of([b - a for a, b in zip(on_manifold, off_manifold)])
    numbers = {
        "disagreement on the square minus on the manifold": difference,
        "disagreement on the manifold": Estimate.of(on_manifold),
        "disagreement on the square": Estimate.of(off_manifold),
        "training accuracy": Estimate.of(accuracy),
        "lowest training accuracy": Estimate(float(accuracy.min())),
        "majority baseline": Estimate(float(majority[0])),
    }
    maps = tuple(
        probability_map(
            f"network-{i + 1}",
            f"Probability of label 1, network {i + 1}",
            off[i].sigmoid().reshape(side, side),
            f"What network {i + 1} predicts on the square of half side {BOX}.",
        )
        for i in range(2)
    )
    return StudyResult(
        verdict="confirmed" if float(accuracy.min()) > 0.95 and above(difference, 0.0) else "not confirmed",
        claim=CLAIM,
        measured=f"Training accuracy {numbers['training accuracy']} (baseline {float(majority[0]):.3f}); two networks "
        f"disagree on {numbers['disagreement on the manifold']} of the manifold and "
        f"{numbers['disagreement on the square']} of the square. k = {k}, L = {petals}, {training.steps} steps.",
        numbers=numbers,
        figures=maps,
    )
