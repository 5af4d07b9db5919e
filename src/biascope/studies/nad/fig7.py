"""Fig. 7: CIFAR-10 poisoned along anisotropy directions, tested on clean images.

Each training image's coefficient along the carrier of its class is replaced by +-eps; ten classes need directions i and
i + 1 in three channels (directions of the grey network, placed in a channel). The network can then be right by reading
the carrier or by looking at the image.

Rule for the verdict, set before any run: the clean accuracy rises with the index of the carrier (rank correlation above
0.5 even two standard errors down, errors from leaving out one index at a time).

Added after a run was seen, because a correlation says nothing of how low and how high: with the first carrier the clean
accuracy is less than half of that without a carrier, with the last it is at most 0.05 below it; both by two standard
errors of the finite test set (one network each, so the luck of a training is not in them).
"""

import functools
import math
from typing import Annotated, Literal

import numpy as np
from torch import Tensor

from biascope.data.images import poison
from biascope.progress import progress
from biascope.studies.estimates import above, below, decide, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad import images as im
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "A network trained on CIFAR-10 with a carrier of the label along early anisotropy directions fails on clean "
    "images; along the last directions it ignores the carrier and is nearly as good as without it."
)


@study(
    "nad/fig7",
    paper="nad",
    figure="7",
    claim=CLAIM,
    sizes={
        "smoke": {**im.SMOKE, "net": "lenet", "count": 8, "eps": 0.5},
        "laptop": {**im.LAPTOP, "net": "lenet", "count": 8},
        "paper": {},
    },
)
def fig7(
    run: Run,
    *,
    net: d.Net = "resnet18",
    dataset: im.Set = "cifar10",
    image_size: Annotated[int, "side of the images: 32 for cifar10, 16 for digits"] = 32,
    width: d.Width = 0,
    n: im.Images = 0,
    epochs: im.Epochs = 50,
    networks: a.Networks = 1000,
    head: a.Head = "marginal",
    step: a.Step = 100.0,
    reuse: a.Reuse = "",
    count: Annotated[int, "how many carriers, half evenly and half logarithmically spaced"] = 12,
    eps: Annotated[float, "coefficient along the carrier, pixels in [0, 1]"] = 0.05,
    rule: Annotated[Literal["choice", "code"], "which carrier belongs to which class"] = "code",
    overwrite: Annotated[Literal["own", "all"], "replace the own carrier only, or set the others to 0 as well"] = "own",
    precision: d.Arithmetic = "auto",
) -> StudyResult:
    """Clean accuracy of a network trained on poisoned CIFAR-10, against the index of the carrier."""
    (note, n_test), protocol = im.described(dataset, n), im.ImageProtocol(epochs, precision=precision)
    factory = d.architecture(net, image_size, channels=3, outputs=10, width=width)

    @functools.cache  # images and directions are fetched when something is trained; a finished run is judged without
    def images() -> im.ImageSet:
        return im.image_set(run, dataset, n)

    @functools.cache
    def directions() -> Tensor:
        return a.directions_of(run, a.Source(net, image_size, width, networks, head, step, reuse), precision)[0]

    def original() -> tuple[Tensor, Tensor]:
        return images().normalised(images().x), images().y

    def test() -> dict[str, tuple[Tensor, Tensor]]:
        return {"test": (images().normalised(images().test_x), images().test_y)}

    def poisoned(i: int) -> tuple[Tensor, Tensor]:
        x = poison(images().x, images().y, directions(), i, eps=eps, rule=rule, overwrite=overwrite)
        return images().normalised(x), images().y

    clean = im.train_on_images(run, "clean", factory, original, test, protocol)
    indices = a.spread_indices(count, image_size**2 - 1)
    found = [
        im.train_on_images(run, f"carrier {i}", factory, functools.partial(poisoned, i), test, protocol)
        for i in progress(indices, "carriers")
    ]
    accuracy, at = np.array([each["test"] for each in found]), np.array(indices, dtype=float)
    order, lowest = rank_correlation(at, accuracy), min(each["train"] for each in found)
    ruined, spared = against_clean(clean["test"], float(accuracy[0]), float(accuracy[-1]), n_test)
    run.save_arrays("sweep", indices=np.array(indices), test=accuracy, train=np.array([e["train"] for e in found]))
    chart = Chart(
        name="poisoning",
        title=f"Clean accuracy of {net} trained with a carrier along u_i",
        x_label="index i of the carrier",
        y_label="accuracy",
        series=(
            Series.of("clean test images", at + 1, accuracy),
            Series.of("poisoned training images", at + 1, [each["train"] for each in found], style="points"),
            Series.of("trained without a carrier, test", [1, image_size**2], [clean["test"]] * 2, style="dashed"),
        ),
        alt=f"Clean accuracy goes from {accuracy[0]:.2f} with the first carrier to {accuracy[-1]:.2f} with the last; "
        f"{clean['test']:.2f} without one.",
        caption=f"{note}, eps = {eps:g}, {epochs} epochs. One network per carrier.",
        log_x=True,
    )
    return StudyResult(
        decide(above(order, 0.5) and below(ruined, 0.0) and above(spared, -0.05), [order]),
        CLAIM,
        f"{net}, {note}, {epochs} epochs, eps = {eps:g}: clean accuracy {accuracy[0]:.3f} with the first "
        f"carrier, {accuracy[-1]:.3f} with the last ({spared} against none), {clean['test']:.3f} without one; rank "
        f"correlation of index and clean accuracy {order}; training accuracy at least {lowest:.3f}.",
        {
            "Spearman(index, clean accuracy)": order,
            "clean accuracy, first carrier": Estimate(float(accuracy[0])),
            "clean accuracy, last carrier": Estimate(float(accuracy[-1])),
            "clean accuracy without a carrier": Estimate(clean["test"]),
            "clean accuracy, first carrier, minus half of that without": ruined,
            "clean accuracy, last carrier, minus that without": spared,
            "lowest training accuracy": Estimate(lowest),
        },
        (chart,),
    )


def against_clean(clean: float, first: float, last: float, n_test: int) -> tuple[Estimate, Estimate]:
    """first - clean / 2 and last - clean, accuracies on n_test images, with the errors of the finite test set.

    Example:
        >>> print(*against_clean(0.9, 0.2, 0.88, 10_000), sep="; ")
        -0.2500 ± 0.0043; -0.0200 ± 0.0044
    """
    variance = {share: share * (1 - share) / n_test for share in (clean, first, last)}
    return (
        Estimate(first - clean / 2, math.sqrt(variance[first] + variance[clean] / 4)),
        Estimate(last - clean, math.sqrt(variance[last] + variance[clean])),
    )
