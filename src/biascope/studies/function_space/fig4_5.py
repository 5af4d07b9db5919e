"""Fig. 4.5: the first anisotropy directions of a network's tangent kernel, in pixels and in Fourier space.

The directions of single networks at their initial weights are drawn and compared with those of the architecture
(Algorithm 1 of the NAD paper, an average over many networks): the overlap of two spans of k directions is the mean
squared cosine of their principal angles, k / D for random ones.

Verdict (fixed before running), over networks: confirmed if for every architecture the overlap of the first ten is above
three times that of random directions by two standard errors, and the strongest 5 % of frequencies hold more than half
of the energy of the first three directions, likewise (random directions: about a fifth). One network tests nothing.
"""

from functools import partial
from typing import Annotated

import torch

from biascope.geometry import nads
from biascope.linalg import subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, curve, decide
from biascope.studies.function_space.directions import cached_directions, initialiser
from biascope.studies.function_space.setting import title
from biascope.studies.nad.fig5 import concentration
from biascope.studies.pictures import direction_picture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "The first anisotropy directions of the tangent kernel of a single network are structured in space and in Fourier "
    "space and close to those of the architecture."
)


@study(
    "ntk/fig4.5",
    paper="function-space",
    figure="4.5",
    claim=CLAIM,
    sizes={
        "smoke": {"nets": "lenet", "image_size": 8, "networks": 64, "n_points": 16, "seeds": 2},
        "laptop": {},
        "paper": {"nets": "lenet,resnet18", "image_size": 32, "networks": 10_000, "n_points": 64, "seeds": 3},
    },
)
def fig4_5(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "lenet, resnet18, resnet18-narrow or mlp"] = ("lenet",),
    image_size: Annotated[int, "side of the grey input"] = 16,
    networks: Annotated[int, "networks for the directions of the architecture"] = 1000,
    n_points: Annotated[int, "Gaussian inputs in the mean of the mixed derivative"] = 64,
    k: Annotated[int, "leading directions that are compared"] = 10,
    seeds: Annotated[int, "single networks"] = 3,
) -> StudyResult:
    """Directions of single networks' kernels, in pixels and Fourier space, and against the architecture's."""
    shape, D = (1, image_size, image_size), image_size**2
    numbers: dict[str, Estimate] = {}
    charts, holds, said, judged = [], [], [], list[Estimate]()
    for name in progress(nets, "networks"):
        kept = run.cached(f"architecture {name}", partial(_architecture, run, name, shape, networks))
        reference = torch.as_tensor(kept["directions"]).flatten(1).double()
        spectra, overlaps, sharp = [], [], []
        for seed in range(seeds):
            directions, alignments = cached_directions(run, name, image_size, n_points, seed)
            overlaps.append(subspace_overlap(directions[:k].flatten(1).double().T, reference[:k].T))
            sharp.append(concentration(directions[:3, 0]))
            spectra.append(alignments / alignments[0])
            if seed == 0:
                direction_picture(
                    run,
                    f"directions-{name}",
                    f"First NTK-NADs of {name}",
                    directions[:k, 0],
                    [str(i + 1) for i in range(k)],
                    k,
                )
        overlap, energy = Estimate.of(overlaps), Estimate.of(sharp)
        numbers[f"overlap of the first {k} with the architecture's, {title(name)}"] = overlap
        numbers[f"energy in the strongest 5 % of frequencies, {title(name)}"] = energy
        holds.append(above(overlap, 3 * k / D) and above(energy, 0.5))
        judged += [overlap, energy]
        said.append(f"{title(name)}: overlap {overlap} (random: {k / D:.3f}), energy {energy}")
        charts.append(
            Chart(
                f"alignments-{name}",
                f"Alignment of the kernel with linear functions along its directions, {title(name)}",
                "direction",
                "alignment relative to the first",
                (curve(f"mean over {seeds} networks", range(1, D), torch.stack(spectra)[:, : D - 1]),),
                alt="Alignments fall over the index of the direction.",
                log_x=True,
                log_y=True,
            )
        )
    return StudyResult(
        decide(all(holds), judged),
        CLAIM,
        f"{'; '.join(said)}. Inputs of side {image_size}, {seeds} networks, {n_points} points each.",
        numbers,
        tuple(charts),
    )


def _architecture(run: Run, name: str, shape: tuple[int, int, int], networks: int) -> dict[str, Value]:
    drawn = initialiser(name, shape[1])
    found = nads(
        drawn, shape, networks, device=run.device, seed=derive(run.seed, "architecture", name), head="marginal"
    )
    return {"directions": found.directions[:64]}
