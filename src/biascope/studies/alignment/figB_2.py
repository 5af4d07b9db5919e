"""Fig. B.2: eigenvectors of the tangent kernel of an untrained MLP on a line look like Fourier modes.

50 evenly spaced points of [0, 1], an MLP with 6 hidden layers of 256 (torch's own initialisation; with He weights and
zero biases the network is linear on positive inputs and the kernel has rank 2). The dominant frequency of every
eigenvector of the centred kernel is read off its discrete Fourier transform.

Verdict (fixed before running), over networks: (a) the rank correlation of the dominant frequency with the index, over
the first half of the eigenvectors, is above 0.8 by two standard errors; (b) lambda_10 / lambda_1 is below 10 %. The
published ratio of about 4 % is not demanded: no usual initialisation gives it. One network tests nothing.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope import nets
from biascope.kernels import dominant_frequency, fourier_power, ntk
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, below, curve, decide, spearman
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "The eigenvectors of the tangent kernel of a random MLP on a line are like Fourier modes of higher frequency "
    "for smaller eigenvalues (first half), and the eigenvalues decay fast (lambda_10 / lambda_1 below 10 %; that it is "
    "about 4 %, and how close the eigenvectors are to Fourier modes, is not judged)."
)


@study(
    "alignment/figB.2",
    paper="alignment",
    figure="B.2",
    claim=CLAIM,
    sizes={"smoke": {"networks": 3}, "laptop": {}, "paper": {"networks": 100}},
)
def fig_b2(
    run: Run,
    *,
    points: Annotated[int, "evenly spaced points of [0, 1]"] = 50,
    width: Annotated[int, "units per hidden layer"] = 256,
    depth: Annotated[int, "hidden layers"] = 6,
    networks: Annotated[int, "random networks"] = 20,
) -> StudyResult:
    """Frequencies of the eigenvectors of the tangent kernel of random networks on a line."""
    work = partial(_measure, run, points, width, depth)
    found: list[dict[str, Any]] = run.cached_each("network", progress(range(networks), "networks"), work)
    half = points // 2
    order = range(1, half + 1)
    trends = Estimate.of([spearman(list(order), f["frequency"][:half].tolist()) for f in found])
    ratio = Estimate.of([float(f["values"][9] / f["values"][0]) for f in found])
    share = Estimate.of([float(f["power"][:, :half].amax(0).mean()) for f in found])
    numbers = {
        "rank correlation of index and dominant frequency, first half": trends,
        "lambda_10 / lambda_1, centred": ratio,
        "lambda_10 / lambda_1, uncentred": Estimate.of([float(f["raw"][9] / f["raw"][0]) for f in found]),
        "energy of an eigenvector at its dominant frequency, first half": share,
    }
    frequency = torch.stack([f["frequency"].double() for f in found])
    values = torch.stack([f["values"] / f["values"][0] for f in found])
    power = torch.stack([f["power"] for f in found]).mean(0)
    every = range(1, points + 1)
    charts = (
        Chart(
            "frequency",
            "Dominant frequency of the eigenvectors",
            "index of the eigenvector",
            "periods over [0, 1]",
            (
                curve("mean over networks", every, frequency),
                Series.of("cosines in order", every, [j / 2 for j in every], style="dashed"),
            ),
            alt="The dominant frequency grows with the index, close to half of it.",
        ),
        Chart(
            "spectrum",
            "Eigenvalues relative to the first",
            "index",
            "lambda_j / lambda_1",
            (
                Series.of("centred kernel", range(1, points), values.mean(0)[: points - 1]),
                Series.of("published, lambda_10", [10], [0.04], style="points"),
            ),
            alt="Eigenvalues fall over several orders of magnitude.",
            log_y=True,
        ),
        HeatMap.of(
            "power",
            "Energy of each eigenvector at each frequency",
            x=every,
            y=range(power.shape[0]),
            z=power.tolist(),
            x_label="index of the eigenvector",
            y_label="periods over [0, 1]",
            z_label="share of energy",
            alt="Energy sits along a line: higher frequency for larger index.",
            low=0.0,
        ),
    )
    return StudyResult(
        decide(above(trends, 0.8) and below(ratio, 0.1), (trends, ratio)),
        CLAIM,
        f"Index and dominant frequency of the first {half} eigenvectors have the rank correlation {trends}; an "
        f"eigenvector has {share} of its energy at its dominant frequency; lambda_10 / lambda_1 is {ratio} "
        f"(published: about 0.04), {networks} networks.",
        numbers,
        charts,
    )


def _measure(run: Run, points: int, width: int, depth: int, index: int) -> dict[str, Value]:
    seed = derive(run.seed, "init", index)
    net = nets.build("mlp", seed=seed, in_features=1, hidden=(width,) * depth).to(run.device)
    x = torch.linspace(0, 1, points, device=run.device)[:, None]
    K = ntk(net, x, outputs=0, precision="float64")
    centred = K.centered().eigh()
    vectors: Tensor = centred.vectors.cpu()
    return {
        "frequency": dominant_frequency(vectors),
        "power": fourier_power(vectors),
        "values": centred.values.double(),
        "raw": K.eigh().values.double(),
    }
