"""Fig. B.2: eigenvectors of the tangent kernel of an untrained MLP on a line look like Fourier modes.

The initialisation is torch's: with He weights and zero biases the network is linear on positive inputs and the kernel
has rank 2. A discrete Fourier transform takes the line for a circle, so how much of an eigenvector is one wave is also
measured by the best wave of 1/2, 1, 3/2, ... periods, of any phase.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from biascope import nets, ntk
from biascope.kernels import fourier_power
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, mean_of_ranks, spearman
from biascope.support import derive, progress


@study("alignment/figB.2", sizes={"smoke": {"networks": 3}, "laptop": {}, "paper": {"networks": 100}})
def fig_b2(
    run: Run,
    *,
    points: Annotated[int, "evenly spaced points of [0, 1]"] = 50,
    width: Annotated[int, "units per hidden layer"] = 256,
    depth: Annotated[int, "hidden layers"] = 6,
    networks: Annotated[int, "random networks"] = 20,
) -> StudyResult:
    """Frequencies of the eigenvectors of the tangent kernel of random networks on a line."""

    def measure(index: int) -> dict[str, Tensor]:
        seed = derive(run.seed, "init", index)
        net = nets.build("mlp", seed=seed, in_features=1, hidden=(width,) * depth).to(run.device)
        K = ntk(net, torch.linspace(0, 1, points, device=run.device)[:, None], outputs=0, precision="float64")
        centred = K.centered().eigh()
        power = fourier_power(centred.vectors.cpu())
        return {
            "frequency": power.argmax(0),
            "power": power,
            "wave": wave_power(centred.vectors.double().cpu()),
            "values": centred.values.double(),
            "raw": K.eigh().values.double(),
        }

    found: list[dict[str, Any]] = run.cached_each("network", progress(range(networks), "networks"), measure)
    half, every = points // 2, range(1, points + 1)
    frequency, values, raw, power = (
        torch.stack([f[name].double() for f in found]) for name in ("frequency", "values", "raw", "power")
    )  # [networks, ...]
    trends = mean_of_ranks([spearman(list(every[:half]), row) for row in frequency[:, :half].tolist()], half)
    ratio = Estimate.of(values[:, 9] / values[:, 0])
    numbers = {
        "rank correlation of index and dominant frequency, first half": trends,
        "lambda_10 / lambda_1, centred": ratio,
        "lambda_10 / lambda_1, uncentred": Estimate.of(raw[:, 9] / raw[:, 0]),
    }
    cosines = Series.of("cosines in order", every, [j / 2 for j in every], style="dashed")
    spectrum = (values / values[:, :1]).mean(0)[: points - 1]
    if all("wave" in f for f in found):
        wave = torch.stack([f["wave"] for f in found])[:, :, :half]
        order = [spearman(list(range(half)), row) for row in wave.argmax(1).double().tolist()]
        numbers["energy of an eigenvector in its best wave, first half"] = Estimate.of(wave.amax(1).mean(1))
        numbers["rank correlation of index and best wave, first half"] = mean_of_ranks(order, half)
    charts = (
        Chart(
            "frequency", "Dominant frequency of the eigenvectors", "index of the eigenvector", "periods over [0, 1]",
            (curve("mean over networks", every, frequency), cosines),
            alt="The dominant frequency grows with the index, close to half of it.",
        ),
        Chart(
            "spectrum", "Eigenvalues relative to the first", "index", "lambda_j / lambda_1",
            (Series.of("centred kernel", range(1, points), spectrum),
             Series.of("published, lambda_10", [10], [0.04], style="points")),
            alt="Eigenvalues fall over several orders of magnitude.", log_y=True,
        ),
        HeatMap.of(
            "power", "Energy of each eigenvector at each frequency",
            x=every, y=range(power.shape[1]), z=power.mean(0).tolist(),
            x_label="index of the eigenvector", y_label="periods over [0, 1]", z_label="share of energy",
            alt="Energy sits along a line: higher frequency for larger index.", low=0.0,
        ),
    )  # fmt: skip
    return StudyResult(
        measured=f"Index and dominant frequency of the first {half} eigenvectors have the rank correlation {trends}; "
        f"lambda_10 / lambda_1 is {ratio}.",
        numbers=numbers,
        figures=charts,
    )


def wave_power(vectors: Tensor) -> Tensor:
    """Share of the energy of vectors [n, k], evenly spaced on [0, 1], in a wave of m = 1, ..., n - 1 half periods, any
    phase: [n - 1, k].
    """
    n = len(vectors)
    angle = torch.pi * torch.arange(1, n, dtype=vectors.dtype)[:, None] * torch.linspace(0, 1, n, dtype=vectors.dtype)
    basis = torch.linalg.qr(torch.stack([angle.cos(), angle.sin()], 2))[0]  # [n - 1, n, 2]
    basis[-1, :, 1] = 0  # sin(pi (n - 1) z) is zero on the grid
    found: Tensor = (basis.mT @ vectors).square().sum(1) / vectors.square().sum(0)
    return found
