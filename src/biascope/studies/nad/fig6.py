"""Fig. 6: test accuracy on D(u_i), u_i the i-th anisotropy direction, beside the eigenvalues.

Rule for the verdict, set before any run: the rank correlation of index and accuracy is below -0.5 even two standard
errors up (errors from leaving out one index at a time); fewer than four indices test nothing.
"""

from typing import Annotated

import numpy as np

from biascope.studies.estimates import below, decide, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The test accuracy on D(u_i) falls with the index i of the anisotropy direction, and falls early and sharply where "
    "the eigenvalues do."
)
Count = Annotated[int, "how many indices to train on, half evenly and half logarithmically spaced; 0: all"]
RANGES = ((0, 16), (16, 64), (64, 128), (128, 256), (256, 512), (512, 1023))
PUBLISHED = {  # mean accuracy in RANGES, Spearman(index, accuracy)
    "lenet": ((1.000, 0.970, 0.840, 0.699, 0.579, 0.516), -0.99),
    "vgg11": ((0.791, 0.639, 0.545, 0.521, 0.509, 0.503), -0.77),
    "resnet18": ((0.976, 0.939, 0.702, 0.615, 0.554, 0.517), -0.95),
    "densenet121": ((0.829, 0.558, 0.510, 0.504, 0.501, 0.500), -0.49),
}
PUBLISHED_SPECTRUM = {  # singular values at indices 10, 100 and 500, over the first
    "lenet": (0.68, 0.30, 0.112),
    "vgg11": (0.235, 0.121, 0.065),
    "resnet18": (0.281, 0.065, 0.016),
    "densenet121": (0.060, 0.0067, 0.0017),
}


@study(
    "nad/fig6",
    paper="nad",
    figure="6",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "networks": 16, "count": 16},
        "laptop": {**d.LAPTOP, "networks": 128, "count": 20},
        "paper": {},
    },
)
def fig6(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    width: d.Width = 0,
    networks: a.Networks = 2000,
    head: a.Head = "marginal",
    step: a.Step = 100.0,
    reuse: a.Reuse = "",
    count: Count = 256,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy on D(u_i) against the index i, with the normalised eigenvalues."""
    U, values = a.directions_of(
        run, net, image_size, networks, width=width, head=head, step=step, precision=protocol.precision, reuse=reuse
    )
    indices = a.spread_indices(count, len(U))
    found = d.train_directions(run, net, d.architecture(net, image_size, width=width), U[indices], protocol)
    at = np.array(indices, dtype=float)
    order = rank_correlation(at, found.test)
    numbers = {"Spearman(index, accuracy)": order, **by_range(net, at, found.test, image_size)}
    numbers |= spectrum_numbers(net, values.numpy(), image_size)
    run.save_arrays("sweep", indices=np.array(indices), test=found.test, train=found.train, eigenvalues=values)
    published = PUBLISHED.get(net) if image_size == 32 else None
    said = f" The published curve has {published[1]:.2f}." if published else ""
    if published and published[1] > -0.5:
        said += " (That does not meet the rule either: most of its indices are at chance, in no order.)"
    return StudyResult(
        decide(below(order, -0.5), [order]),
        CLAIM,
        f"{net}, {len(indices)} of {len(U)} directions ({protocol}): rank correlation of index and accuracy {order}; "
        f"accuracy {found.test[0]:.3f} at the first direction, {found.test[-1]:.3f} at the last; mean training "
        f"accuracy {found.train.mean():.3f}.{said}",
        numbers,
        (sweep_chart(net, at, found, values.numpy(), protocol),),
    )


def by_range(net: str, at: d.Array, accuracy: d.Array, side: int) -> dict[str, Estimate]:
    """Mean accuracy in ranges of the index, beside the published means where the image size is theirs."""
    numbers = {}
    published = PUBLISHED.get(net) if side == 32 else None
    for place, (low, high) in enumerate(RANGES):
        inside = (at >= low) & (at < high)
        if not inside.any():
            continue
        numbers[f"accuracy, index {low} to {high - 1}"] = Estimate.of(accuracy[inside].tolist())
        if published:
            numbers[f"published accuracy, index {low} to {high - 1}"] = Estimate(published[0][place])
    if published:
        numbers["published Spearman(index, accuracy)"] = Estimate(published[1])
    return numbers


def spectrum_numbers(net: str, values: d.Array, side: int) -> dict[str, Estimate]:
    """Decay of the spectrum as the paper's files give it: square roots of eigenvalue ratios."""
    numbers = {}
    published = PUBLISHED_SPECTRUM.get(net, ()) if side == 32 else ()
    for place, i in enumerate((10, 100, 500)):
        if i < len(values):
            numbers[f"sqrt(lambda_{i} / lambda_0)"] = Estimate(float(np.sqrt(max(values[i], 0.0) / values[0])))
            if published:
                numbers[f"published sqrt(lambda_{i} / lambda_0)"] = Estimate(published[place])
    return numbers


def sweep_chart(net: str, at: d.Array, found: d.Trained, values: d.Array, protocol: d.Protocol) -> Chart:
    """Accuracies and normalised eigenvalues (their square roots, as published) against the index."""
    shown = np.unique(np.geomspace(1, len(values), 100).round().astype(int)) - 1
    series = [
        Series.of("test accuracy", at + 1, found.test),
        Series.of("training accuracy", at + 1, found.train, style="points"),
        Series.of(
            "sqrt(lambda_i / lambda_1)", shown + 1, np.sqrt(np.maximum(values[shown], 0) / values[0]), None, "dashed"
        ),
    ]
    return Chart(
        name=f"sweep-{net}",
        title=f"Accuracy of {net} on D(u_i) and the spectrum",
        x_label="index i of the direction",
        y_label="accuracy; normalised singular value",
        series=tuple(series),
        alt=f"Test accuracy goes from {found.test[0]:.2f} at the first index to {found.test[-1]:.2f} at the last, "
        f"the singular values from 1 to {np.sqrt(max(values[-1], 0) / values[0]):.2g}.",
        caption=f"{protocol}. One network per index.",
        log_x=True,
    )
