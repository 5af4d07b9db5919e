"""Fig. 6, compared between networks: does the accuracy fall sooner where the eigenvalues decay faster?

How fast eigenvalues decay is said by the effective rank of the spectrum (the exponential of its entropy: as many equal
eigenvalues would have it). How soon the accuracy falls is said by the number of directions that are learnt, the sum of
2 accuracy - 1 over all indices, estimated from those trained on: each stands for the range that lies nearest to it.

`--runs` takes the folders of finished runs of `nad/fig6`, as they are kept in `reproductions`; without it networks are
trained.

Rule: of every two networks the one with the larger effective rank learns more directions, by two standard errors
(leaving out one index at a time). One pair that is surely the other way round is enough for "not confirmed"; where none
is, but some are not sure, nothing is tested. (Written when the kept runs of four networks were known.)
"""

from __future__ import annotations

from itertools import combinations
from typing import Annotated

import numpy as np
import torch

from biascope.errors import InputError
from biascope.linalg import effective_rank
from biascope.studies.estimates import above, below, difference, jackknife_error
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad.fig6 import Count
from biascope.studies.nad.finished import Runs, finished_runs
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "The faster the eigenvalues of a network decay, the sooner its accuracy on D(u_i) falls with the index."
NETS = ("lenet", "vgg11", "resnet18", "densenet121")


@study(
    "nad/fig6-decay",
    paper="nad",
    figure="6",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "nets": ("lenet", "mlp"), "networks": 32, "count": 6, "epochs": 8},
        "laptop": {**d.LAPTOP, "nets": ("lenet", "mlp"), "image_size": 16, "networks": 256, "count": 16},
        "paper": {},
    },
)
def fig6_decay(
    run: Run,
    *,
    runs: Runs = (),
    nets: Annotated[tuple[str, ...], "architectures, where networks are trained"] = NETS,
    image_size: d.Side = 32,
    networks: a.Networks = 10_000,
    head: a.Head = "marginal",
    count: Count = 64,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Effective rank of the spectrum against the number of directions that are learnt, one point per network."""
    sweeps: dict[str, tuple[d.Array, d.Array, d.Array]] = {}  # indices, accuracies, eigenvalues
    if runs:
        alike = ("image_size", "head", "step", "n", "sigma", "eps", "gap", "epochs")
        for each in finished_runs(runs, "nad/fig6", "sweep", alike):
            at, test, values = (each.arrays[key].double().numpy() for key in ("indices", "test", "eigenvalues"))
            sweeps[each.net] = at, test, values
    else:
        at = np.array(a.spread_indices(count, image_size**2), dtype=float)
        for net in nets:
            U, spectrum = a.directions_of(run, a.Source(net, image_size, 0, networks, head), protocol.precision)
            trained = d.train_directions(run, net, d.architecture(net, image_size), U[at.astype(int)], protocol)
            sweeps[net] = at, trained.test, spectrum.numpy()
    if len(sweeps) < 2:
        raise InputError(f"{len(sweeps)} network: two or more are compared; give their --runs, or more --nets")
    ranks = {net: effective_rank(torch.as_tensor(values).clamp(min=0)) for net, (_, _, values) in sweeps.items()}
    learnt = {net: directions_learnt(at, test, len(values)) for net, (at, test, values) in sweeps.items()}
    ordered = sorted(ranks, key=ranks.__getitem__, reverse=True)
    gaps = [difference(learnt[slow], learnt[fast]) for slow, fast in combinations(ordered, 2)]
    verdict = "confirmed" if all(map(above, gaps)) else "not confirmed" if any(map(below, gaps)) else "not tested"
    numbers = {f"{net}: directions learnt": learnt[net] for net in sweeps}
    numbers |= {f"{net}: effective rank of the spectrum": Estimate(ranks[net]) for net in sweeps}
    said = "; ".join(f"{net} effective rank {ranks[net]:.3g}, {learnt[net]} directions learnt" for net in sweeps)
    reversed_ = sum(map(below, gaps))
    return StudyResult(
        verdict,  # type: ignore[arg-type]
        CLAIM,
        f"{said}. Pairs of networks: {len(gaps)}, of which {sum(map(above, gaps))} surely in the claimed order and "
        f"{reversed_} surely in the other.",
        numbers,
        (
            Chart(
                name="decay",
                title="Directions learnt and the decay of the spectrum",
                x_label="effective rank of the spectrum",
                y_label="directions learnt",
                series=tuple(
                    Series.of(net, [ranks[net]], [learnt[net].value], [learnt[net].standard_error or 0.0], "points")
                    for net in sweeps
                ),
                alt="One point per network; as claimed, networks further to the right lie higher.",
                caption="The sum of 2 accuracy - 1 over all indices; bars: one standard error.",
                log_x=True,
                log_y=True,
            ),
        ),
    )


def directions_learnt(at: d.Array, accuracy: d.Array, total: int) -> Estimate:
    """The sum of 2 accuracy - 1 over `total` indices, from those trained on, `at` [k], rising.

    Example:
        >>> print(directions_learnt(np.arange(4.0), np.array([1.0, 1.0, 0.5, 0.5]), 4).value)
        2.0
    """

    def total_of(at: d.Array, accuracy: d.Array) -> float:
        weight = np.diff([-0.5, *(at[1:] + at[:-1]) / 2, total - 0.5])
        return float(weight @ (2 * accuracy - 1))

    n = len(at)
    left = [total_of(np.delete(at, i), np.delete(accuracy, i)) for i in range(n)] if n > 3 else []
    return Estimate(total_of(at, accuracy), jackknife_error(left) if left else None, n)
