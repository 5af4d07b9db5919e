"""Fig. 20: the sweep of Fig. 6 for the MLP, which has no preference, and for VGG-11, which has.

Rule for the verdict, set before any run: the MLP reaches 0.95 at every index; for every convolutional network the rank
correlation of index and accuracy is below -0.5 even two standard errors up.

The directions are measured with sampled last layers by default, as in the paper: then the spectrum of the MLP decays a
little by sampling alone, and the Marchenko-Pastur ratio says by how much.
"""

from typing import Annotated

import numpy as np

from biascope.linalg import marchenko_pastur
from biascope.studies.estimates import below, decide, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad.fig1 import ISOTROPIC
from biascope.studies.nad.fig6 import Count, by_range, spectrum_numbers, sweep_chart, whole_range
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "On D(u_i) the MLP generalises at every index of its directions; VGG-11 loses accuracy with the index."


@study(
    "nad/fig20",
    paper="nad",
    figure="20",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "nets": ("mlp", "lenet"), "networks": 300, "count": 10, "epochs": 12},
        "laptop": {**d.LAPTOP, "nets": ("mlp",), "networks": 2000, "count": 12},
        "paper": {},
    },
)
def fig20(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures"] = ("mlp", "vgg11"),
    image_size: d.Side = 32,
    networks: a.Networks = 10_000,
    head: a.Head = "sampled",
    step: a.Step = 100.0,
    count: Count = 64,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy on D(u_i) against the index for the MLP and VGG-11, with the eigenvalues."""
    numbers: dict[str, Estimate] = {}
    charts, said, holds, orders = list[Chart](), list[str](), list[bool](), list[Estimate]()
    for net in nets:
        U, values = a.directions_of(run, a.Source(net, image_size, 0, networks, head, step), protocol.precision)
        indices = a.spread_indices(count, len(U))
        found = d.train_directions(run, net, d.architecture(net, image_size), U[indices], protocol)
        at = np.array(indices, dtype=float)
        order = rank_correlation(at, found.test)
        own = {"Spearman(index, accuracy), chosen indices": order}
        own["Spearman(index, accuracy), all indices"] = whole_range(at, found.test, len(U))  # as published (see fig6)
        own["lowest accuracy"] = Estimate(float(found.test.min()))
        own |= by_range(net, at, found.test, image_size) | spectrum_numbers(net, values.numpy(), image_size)
        if head == "sampled" and networks > len(U):
            band = marchenko_pastur(networks, len(U))
            own["largest over smallest eigenvalue"] = Estimate(float(values[0] / values[-1]))
            own["the same by sampling alone (Marchenko-Pastur)"] = Estimate(band.upper / band.lower)
        numbers |= {f"{name}, {net}": value for name, value in own.items()}
        if net in ISOTROPIC:
            holds.append(bool(found.test.min() >= 0.95))
            said.append(f"{net} at least {found.test.min():.3f} at every index")
        else:
            orders.append(order)
            holds.append(below(order, -0.5))
            said.append(f"{net} rank correlation {order}, {found.test[0]:.3f} first and {found.test[-1]:.3f} last")
        charts.append(sweep_chart(net, at, found.test, found.train, values.numpy(), protocol))
    return StudyResult(
        decide(all(holds), orders),
        CLAIM,
        f"Accuracy on D(u_i), {protocol}: {'; '.join(said)}.",
        numbers,
        tuple(charts),
    )
