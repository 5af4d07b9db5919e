"""Fig A.13: a network's probability map has less high frequency than that of nearest-neighbour classifiers.

Labels of frequency k on gamma_L; the map is sampled on a square, its 2-D FFT summed over rings: zeta(k). For the heat
maps of nearest neighbours (training accuracy over k and L) note that one neighbour is perfect by construction.

Verdict rule, over runs (phases and initial networks): "confirmed" if for every number of neighbours the mean of
log(zeta_network / zeta_neighbours) over the upper third of the wave numbers is below 0 by two standard errors. "Not
tested" with one run, or where a network's training accuracy is not above 0.95 (as in Fig. 3.7): one that has learnt
nothing has no high frequencies either. (The last sentence was added after runs had been seen.)
"""

from typing import Annotated

import torch

from biascope.seeds import derive
from biascope.spectral import radial_spectrum
from biascope.studies.estimates import below, decide
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import forward
from biascope.studies.spectral.flowers import (
    BOX,
    TRAINING,
    Training,
    cell_map,
    flower_classes,
    nearest_probability,
    plane,
    probability_map,
)
from biascope.studies.spectral.waves import rank_correlation

CLAIM = "The spectrum of a network decays faster than that of nearest-neighbour classifiers, for every K considered."
LEARNT = 0.95  # training accuracy of every network


@study(
    "spectral/figA.13",
    paper="alignment",
    figure="A.13",
    claim=CLAIM,
    sizes={
        "smoke": {"k": 8, "petals": 4, "samples": 100, "neighbours": (1, 5), "width": 64, "depth": 4, "steps": 300,
                  "runs": 3, "lr": 2e-3, "side": 64, "map_k": (8, 16), "map_petals": (0, 4, 8)},
        "laptop": {"k": 30, "petals": 10, "samples": 300, "width": 128, "steps": 2500, "runs": 3, "lr": 1e-3,
                   "map_k": (15, 30, 60, 90), "map_petals": (0, 4, 8, 12, 16, 20)},
        "paper": {},
    },
)  # fmt: skip
def fig_a_13(
    run: Run,
    *,
    k: Annotated[int, "frequency of the labels"] = 150,
    petals: Annotated[int, "petals of the curve"] = 20,
    neighbours: Annotated[tuple[int, ...], "K of the classifiers (not given in the text)"] = (1, 3, 5, 10),
    threshold: Annotated[float, "label 1 above it"] = 0.5,
    runs: Annotated[int, "phases and initial networks"] = 5,
    side: Annotated[int, "points along the square's side"] = 200,
    map_k: Annotated[tuple[int, ...], "frequencies of the heat maps"] = tuple(range(50, 450, 50)),
    map_petals: Annotated[tuple[int, ...], "petals of the heat maps"] = tuple(range(0, 22, 2)),
    training: Training = TRAINING,
) -> StudyResult:
    """Radial spectrum of a network's probability map against nearest neighbours."""

    def compare() -> dict[str, Value]:
        made = [flower_classes([(k, petals)], training.samples, threshold, derive(run.seed, i)) for i in range(runs)]
        x, y = torch.cat([m[0] for m in made]), torch.cat([m[1] for m in made])
        done = training.fit(run, derive(run.seed, "init"), x, y, training.steps)
        params, square = list(done.networks.params.values()), plane(side)
        with torch.no_grad():
            on = forward(params, x)
            network = forward(params, square).sigmoid()
        nearest = torch.stack(
            [torch.stack([nearest_probability(x[i], y[i], square, K) for i in range(runs)]) for K in neighbours]
        )
        maps = torch.cat([network[None], nearest]).reshape(1 + len(neighbours), runs, side, side)
        wave, zeta = radial_spectrum(maps.double(), 2 * BOX)
        return {"wave": wave, "zeta": zeta, "accuracy": ((on > 0) == (y > 0.5)).double().mean(1),
                "majority": torch.cat([m[2] for m in made]), "maps": maps[:, 0].float()}  # fmt: skip

    def heat() -> dict[str, Value]:
        cells = [(kk, L) for kk in map_k for L in map_petals]
        x, y, majority = flower_classes(cells, training.samples, threshold, derive(run.seed, "heat"))
        accuracy = [
            ((nearest_probability(a, b, a, K) > 0.5) == (b > 0.5)).double().mean()
            for K in neighbours
            for a, b in zip(x, y)
        ]
        shape = (len(neighbours), len(map_k), len(map_petals))
        return {"accuracy": torch.stack(accuracy).view(shape), "majority": majority}

    got = {name: torch.as_tensor(value) for name, value in run.cached("spectra", compare).items()}
    heats = torch.as_tensor(run.cached("heat maps", heat)["accuracy"])
    wave, zeta = got["wave"], got["zeta"]
    upper = slice(2 * len(wave) // 3, None)
    numbers = {
        f"log zeta, network over K = {K}, high wave numbers": Estimate.of(
            (zeta[0, :, upper] / zeta[1 + i, :, upper]).log().mean(1)
        )
        for i, K in enumerate(neighbours)
    }
    judged = list(numbers.values())
    numbers["training accuracy of the network"] = Estimate.of(got["accuracy"])
    numbers["majority baseline"] = Estimate.of(got["majority"].double())
    for i, K in enumerate(neighbours):
        if K > 1:
            numbers[f"rank correlation of L with training accuracy, K = {K}"] = Estimate.of(
                rank_correlation(torch.tensor(map_petals), heats[i])
            )
    names = ["network", *(f"K = {K}" for K in neighbours)]
    largest = max(judged, key=lambda number: number.value)
    learnt = float(got["accuracy"].min()) > LEARNT
    return StudyResult(
        verdict=decide(all(map(below, judged)), judged) if learnt else "not tested",
        claim=CLAIM,
        measured=f"log(zeta_network / zeta_K) at high wave numbers is at most {largest} over K = {neighbours}; the "
        f"network's training accuracy is {numbers['training accuracy of the network']} (baseline "
        f"{numbers['majority baseline'].value:.3f}). k = {k}, L = {petals}, {training.steps} steps."
        + ("" if learnt else " A network has not learnt its labels: nothing is tested."),
        numbers=numbers,
        figures=(
            Chart(
                "radial-spectrum",
                "Radial spectrum of the probability map",
                "wave number, cycles per unit length",
                "zeta",
                tuple(Series.of(name, wave[1:], zeta[i].mean(0)[1:]) for i, name in enumerate(names)),
                alt="The curve of the network falls below those of the nearest-neighbour classifiers.",
                log_y=True,
            ),
            *(
                cell_map(
                    f"accuracy-K{K}", f"Training accuracy of K = {K} neighbours", map_k, map_petals, heat, "accuracy"
                )
                for K, heat in zip(neighbours, heats)
            ),
            *(
                probability_map(
                    f"map-{name.replace(' ', '').replace('=', '')}",
                    f"Probability of label 1, {name}",
                    got["maps"][i],
                    f"Probability map of {name} on the square.",
                )
                for i, name in enumerate(names[:2])
            ),
        ),
    )
