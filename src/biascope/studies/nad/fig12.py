"""Fig. 12: a random orthonormal basis shows nothing; its directions are all alike to a network.

Rule for the verdict, set before any run, for every network: the spread of the accuracy over random directions is less
than half of that over Fourier directions, and smaller by two standard errors.
"""

from typing import Annotated

import numpy as np

from biascope.arguments import check_count
from biascope.data.bases import random_orthogonal
from biascope.seeds import derive
from biascope.studies.estimates import above, difference, spread
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "Over a random orthonormal basis the accuracy on D(v) is flat, unlike over the Fourier basis."


@study(
    "nad/fig12",
    paper="nad",
    figure="12",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "nets": ("lenet",), "count": 10},
        "laptop": {**d.LAPTOP, "nets": ("lenet",), "count": 16},
        "paper": {},
    },
)
def fig12(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures"] = ("lenet", "resnet18"),
    image_size: d.Side = 32,
    width: d.Width = 0,
    count: Annotated[int, "random directions, and about as many Fourier bins"] = 130,
    stride: f.Stride = 2,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy over random orthonormal directions, beside that over Fourier directions."""
    D = image_size**2
    check_count(count, "count", least=2)
    random = random_orthogonal(D, seed=derive(run.seed, "basis")).T[:count].reshape(-1, image_size, image_size)
    basis = f.bins(image_size, "re", stride, 0, count, run.seed)
    numbers: dict[str, Estimate] = {}
    series, said, holds = list[Series](), list[str](), list[bool]()
    for net in nets:
        factory = d.architecture(net, image_size, width=width)
        on_random = d.train_directions(run, f"{net} random", factory, random, protocol).test
        on_fourier = d.train_directions(run, f"{net} fourier", factory, basis.vectors, protocol).test
        flat, uneven = spread(on_random), spread(on_fourier)
        less = difference(uneven, flat)
        numbers |= {
            f"spread over random directions, {net}": flat,
            f"spread over Fourier directions, {net}": uneven,
            f"difference of the spreads, {net}": less,
            f"mean accuracy on random directions, {net}": Estimate.of(on_random),
            f"mean accuracy on Fourier directions, {net}": Estimate.of(on_fourier),
        }
        holds.append(flat.value < uneven.value / 2 and above(less))
        said.append(f"{net} {flat} over random, {uneven} over Fourier directions")
        for label, values, style in (("random", on_random, "line"), ("Fourier", on_fourier, "dashed")):
            series.append(Series.of(f"{net}, {label}", np.linspace(0, 1, len(values)), np.sort(values), None, style))  # type: ignore[arg-type]
    chart = Chart(
        name="sorted-accuracy",
        title="Accuracy on random and on Fourier directions, sorted",
        x_label="share of directions with a lower accuracy",
        y_label="test accuracy",
        series=tuple(series),
        alt="; ".join(f"{s.label} from {s.y[0]:.2f} to {s.y[-1]:.2f}" for s in series) + ".",
        caption=str(protocol),
    )
    return StudyResult(
        "confirmed" if all(holds) else "not confirmed",
        CLAIM,
        f"Standard deviation of the accuracy, {len(random)} random and {len(basis)} Fourier directions ({protocol}): "
        f"{'; '.join(said)}.",
        numbers,
        (chart,),
    )
