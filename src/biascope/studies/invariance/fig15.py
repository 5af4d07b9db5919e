"""Fig. 15 and example A.10: one filter of two taps on three pixels, average pooled: G has eigenvalues 3, 1 and 0.

The paper prints the factor s^2/2; with its own definition (the mean of two patches) it is s^2/4, which changes no
direction. Verdict rule: u^T (4 G / s^2) u of sampled networks along the exact eigenvectors u is 3 and 1 within 3
standard errors over groups of networks and within 10 % even 2 standard errors off (added after the first run: wide
errors had helped), the third is zero to rounding, and so is its eigenvector (1, -1, 1)/sqrt 3.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from biascope.arguments import check_count, check_number
from biascope.ensembles import record
from biascope.geometry import average_geometry
from biascope.geometry.linear_cnn import pooled_cnn_geometry, tap_matrices
from biascope.linalg import psd_eigh
from biascope.seeds import derive
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The average geometry of a linear convolution of two taps on three pixels with average pooling has eigenvalues 3, "
    "1 and 0 (times a constant): one direction can never be learnt."
)

EXACT = torch.tensor([[1.0, 2.0, 1.0], [-1.0, 0.0, 1.0], [1.0, -1.0, 1.0]], dtype=torch.float64)
EXACT = EXACT / EXACT.norm(dim=1, keepdim=True)


@study(
    "gih/fig15",
    paper="invariance",
    figure="15",
    claim=CLAIM,
    sizes={"smoke": {"networks": 4000}, "laptop": {}, "paper": {}},
)
def fig15(
    run: Run,
    *,
    networks: Annotated[int, "networks sampled"] = 100_000,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 10,
    s: Annotated[float, "standard deviation of the filter"] = 1.0,
) -> StudyResult:
    """Eigenvalues and eigenvectors of the smallest convolutional example."""
    check_count(groups, "groups", least=2)  # one has no error
    check_count(networks, "networks", least=groups)
    check_number(s, "s", above=0)
    made = record(lambda: example(s))
    values = []
    total = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(groups):
        found = average_geometry(
            made, (1, 3), networks // groups, seed=derive(run.seed, i), device=run.device, probes=torch.ones(1, 1, 3)
        ).matrix  # a linear network: any probe will do
        values.append(4 * ((EXACT @ found) * EXACT).sum(1) / s**2)
        total += found / groups
    exact = pooled_cnn_geometry(tap_matrices((3,), 2), 1, sp=s)
    numbers = {
        f"eigenvalue {k + 1} of 4 G / s^2 (exact: {want})": Estimate.of([float(v[k]) for v in values])
        for k, want in enumerate((3, 1, 0))
    }
    vectors = psd_eigh(total).vectors
    overlap = abs(float(vectors[:, 2] @ EXACT[2]))
    numbers["overlap of the third eigenvector with (1, -1, 1)"] = Estimate(overlap, None, networks)
    numbers["largest difference of G from the closed form / s^2"] = Estimate(
        float((total - exact).abs().max()) / s**2, None, networks
    )
    estimates = list(numbers.values())
    errors = [(abs(e.value - want), e.standard_error or 0.0, want) for e, want in zip(estimates[:2], (3, 1))]
    near = all(off < 3 * error and off + 2 * error < 0.1 * want for off, error, want in errors)
    right = near and estimates[2].value < 1e-5 and overlap > 1 - 1e-5
    return StudyResult(
        verdict="confirmed" if right else "not confirmed",
        claim=CLAIM,
        measured=f"4 G / s^2 of {networks} networks has the eigenvalues {estimates[0]}, {estimates[1]} and "
        f"{estimates[2].value:.1g}; the last eigenvector is (1, -1, 1) up to {1 - overlap:.1g}. The printed factor "
        "s^2/2 should be s^2/4.",
        numbers=numbers,
        figures=(_chart(vectors, estimates),),
    )


def example(s: float) -> nn.Module:
    """f(x) = mean over the two patches of phi.patch, phi ~ N(0, s^2 I): [n, 1, 3] -> [n, 1].

    Example:
        >>> example(1.0)(torch.zeros(4, 1, 3)).shape
        torch.Size([4, 1])
    """
    convolution = nn.Conv1d(1, 1, 2, bias=False)
    nn.init.normal_(convolution.weight, std=s)
    return nn.Sequential(convolution, nn.AdaptiveAvgPool1d(1), nn.Flatten())


def _chart(vectors: Tensor, values: list[Estimate]) -> Chart:
    return Chart(
        name="eigenvectors",
        title="Eigenvectors of the example",
        x_label="pixel",
        y_label="entry",
        series=tuple(
            Series.of(
                f"eigenvalue {values[k].value:.2f}", (1, 2, 3), vectors[:, k], None, "dashed" if k == 2 else "line"
            )
            for k in range(3)
        ),
        alt="Three eigenvectors over three pixels; the one with eigenvalue zero alternates in sign.",
        caption="Dashed: the direction that is never learnt.",
    )
