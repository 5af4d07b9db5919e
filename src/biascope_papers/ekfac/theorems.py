"""Theorem 1: among all scalings in its eigenbasis, EKFAC's are those with the least Frobenius error.

The least error is found without the theorem: the diagonals D that minimise ||G - Q D Q^T|| are a least-squares problem
in the matrices q_i q_i^T. Q is read off KFAC's matrix, as the theorem has it; layers are small and random, in float64.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from biascope import fisher
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import generator


@study("ekfac/theorem1", sizes={"smoke": {"layers": 2}, "laptop": {}, "paper": {}})
def theorem1(
    run: Run,
    *,
    layers: Annotated[int, "random layers of 5 inputs and 4 classes"] = 10,
    n: Annotated[int, "random inputs of each"] = 40,
) -> StudyResult:
    """EKFAC's scalings beside those of least squares, and its error beside KFAC's."""
    apart, errors = list[float](), list[tuple[float, float]]()
    for layer in range(layers):
        true, kfac, ekfac = (kind.cpu() for kind in metrics(run, n, layer))
        Q = torch.linalg.eigh(kfac)[1]
        best = best_scalings(true, Q)
        used = torch.einsum("pi,pq,qi->i", Q, ekfac, Q)
        apart.append(float((used - best).norm() / best.norm()))
        errors.append((float((true - ekfac).norm()), float((true - kfac).norm())))
    theirs = torch.tensor(errors, dtype=torch.float64).T  # [2, layers]
    worst = Estimate(max(apart))
    return StudyResult(
        measured=f"EKFAC's scalings are those of least squares to {worst.value:.1e}; its error is "
        f"{float((theirs[0] / theirs[1]).mean()):.2f} of KFAC's on average over {layers} random layers.",
        numbers={
            "largest relative difference of EKFAC's scalings and the best": worst,
            "smallest error of KFAC minus EKFAC": Estimate(float((theirs[1] - theirs[0]).min())),
        },
        figures=(
            Chart("errors", "Error of KFAC and of EKFAC", "layer", "Frobenius error",
                  (Series.of("KFAC", range(layers), theirs[1], style="points"),
                   Series.of("EKFAC", range(layers), theirs[0], style="points")),
                  alt="EKFAC's error lies below KFAC's for every layer."),
        ),
    )  # fmt: skip


def metrics(run: Run, n: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """The exact Fisher matrix of a softmax layer with correlated inputs, KFAC's and EKFAC's: [20, 20] each."""
    rng = generator(run.seed, "layer", layer)
    net = nn.Linear(5, 4, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.randn(4, 5, generator=rng, dtype=torch.float64))
    x = torch.randn(n, 5, generator=rng, dtype=torch.float64) @ torch.randn(5, 5, generator=rng, dtype=torch.float64)
    true, kfac, ekfac = (fisher(net, x, kind).to_dense() for kind in ("dense", "kfac", "ekfac"))
    return true, kfac, ekfac


def best_scalings(true: Tensor, Q: Tensor) -> Tensor:
    """The diagonal [p] with the least ||true - Q diag Q^T||, by least squares over the matrices q_i q_i^T."""
    columns = torch.einsum("pi,qi->pqi", Q, Q).flatten(0, 1)
    found: Tensor = torch.linalg.lstsq(columns, true.flatten()[:, None]).solution[:, 0]
    return found
