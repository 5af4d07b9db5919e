"""Fig. 5: a linear feature against a circle (the simplicity contest), with the linear one moved down the spectrum of G.

Each feature alone solves the task. "Linear" accuracy is on test inputs without the circle's plane, "circle" accuracy on
test inputs without the linear direction.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope import InputError
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope_papers.gih.fig10_14 import order, too_few
from biascope_papers.gih.geometries import Geometry, check_axes, spread_indices
from biascope_papers.gih.networks import ISOTROPIC, factory, is_a, named, scope, shape_of
from biascope_papers.gih.sets import Noise, contest_task, without
from biascope_papers.gih.training import Lazy, Protocol, Task, Training, mean_of, percent, train_tasks

NETS = ("mlp", "lenet", "resnet18", "vit")
TRAINING = Training()


@study(
    "gih/fig5",
    sizes={
        "smoke": {"nets": ("lenet",), "side": 16, "networks": 64, "heads": 32, "stride": 255, "n_train": 512,
                  "n_test": 400, "epochs": 8, "repeats": 3, "plane": (1, 2), "engine": "vmap"},
        "laptop": {"nets": ("mlp", "lenet"), "side": 16, "networks": 256, "heads": 32, "stride": 64, "n_train": 4000,
                   "repeats": 3, "plane": (1, 2)},
        "paper": {},
    },
)  # fmt: skip
def fig5(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, with normalisation; or your own as module:factory"] = NETS,
    side: Annotated[int, "side of the grey input image"] = 32,
    stride: Annotated[int, "every how many eigenvectors the linear feature is tried"] = 10,
    plane: Annotated[tuple[int, ...], "indices of the circle's plane; empty: 15,16, for ResNet18 5,6"] = (),
    eps: Annotated[float, "gap of the linear feature between the classes"] = 1.0,
    radius: Annotated[float, "radius of the outer circle; 0: 1.5, for ResNet18 3"] = 0.0,
    n_train: Annotated[int, "training examples"] = 10_000,
    n_test: Annotated[int, "test examples"] = 2000,
    repeats: Annotated[int, "independent data sets and trainings per direction"] = 5,
    batch_size: Annotated[int, "examples per step"] = 128,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    momentum: Annotated[float, "momentum (0 in the text; 0.9 with lr 0.1 in the published code)"] = 0.0,
    chunk: Annotated[int, "networks trained together and saved together"] = 64,
    training: Training = TRAINING,
) -> StudyResult:
    """Which of two features a network uses, as the simple one moves down the spectrum of G."""
    nets = named(nets)
    shape = shape_of(1, side, nets)
    if len(plane) not in (0, 2):
        raise InputError(f"plane={plane}: give two indices, or none")
    planes = {net: plane or ((5, 6) if is_a(net, "resnet") else (15, 16)) for net in nets}
    tried = {net: [i for i in spread_indices(side**2, stride) if i not in planes[net]] for net in nets}
    for net, pair in planes.items():  # before anything is computed
        given = f"plane={pair[0]},{pair[1]}"
        check_axes(given, pair, side**2)
        if not tried[net]:
            raise InputError(f"stride={stride}, {given}: no direction is left for the linear feature")
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    text: list[str] = []
    for net, indices in tried.items():
        radii = (0.25, radius or (3.0 if is_a(net, "resnet") else 1.5))

        def accuracies(net: str = net, radii: tuple[float, float] = radii) -> dict[str, Tensor]:
            G, protocol = training.geometry(run, net, shape), training.protocol(lr, batch_size, momentum)
            sets = [[Noise.draw(n, shape, 1.0, run.seed, run.device, part, r) for r in range(repeats)]
                    for part, n in (("train", n_train), ("test", n_test))]  # fmt: skip
            scores = contest(run, net, G, tried[net], planes[net], eps, radii, sets, protocol, chunk)
            return {"indices": torch.tensor(tried[net]), "accuracy": scores}

        scores = torch.as_tensor(run.cached(f"contest {net}", accuracies)["accuracy"])
        both, linear, circle = scores.unbind(-1)  # [repeats, indices]
        found = {
            "linear minus circle, first direction, points": mean_of(percent(linear[:, 0] - circle[:, 0])),
            "circle minus linear, last direction, points": mean_of(percent(circle[:, -1] - linear[:, -1])),
            "accuracy with both features, first direction, %": mean_of(percent(both[:, 0])),
            "accuracy with both features, last direction, %": mean_of(percent(both[:, -1])),
            "Spearman(index, linear accuracy)": order(indices, linear),
            "Spearman(index, circle accuracy)": order(indices, circle),
        }
        numbers |= {f"{net}: {name}": value for name, value in found.items()}
        first, last, *_ = found.values()
        text.append(f"{net}: linear ahead by {first} points along the first direction, circle by {last} along the last")
        caption = f"Circle in the plane of eigenvectors {planes[net]}, radii 0.25 and {radii[1]:g}; linear gap {eps:g}."
        charts.append(_chart(net, indices, scores, caption))
    return StudyResult(
        measured=f"{'; '.join(text)}. Radii, gap and noise are the published code's, the text gives none."
        f"{too_few(*(tried[net] for net in nets if net not in ISOTROPIC))}{scope(networks=(nets, NETS))}",
        numbers=numbers,
        figures=tuple(charts),
    )


def contest(
    run: Run, net: str, G: Geometry, indices: list[int], plane: tuple[int, ...], eps: float,
    radii: tuple[float, float], sets: list[list[Noise]], protocol: Protocol, chunk: int,
) -> Tensor:  # fmt: skip
    """Accuracies [repeats, indices, 3]: on the test set, with the plane removed, with the linear direction removed.

    `sets` are the noise for training and for testing, of every repeat.
    """
    U, count = {i: G.direction(i).to(run.device) for i in {*indices, *plane}}, len(indices)
    axes, (train, test) = [U[i] for i in plane], sets
    total = len(train) * count

    def task(noise: list[Noise], i: int) -> Task:
        return contest_task(noise[i // count], [U[indices[i % count]], *axes], eps, radii)

    tests = [
        Lazy(lambda i: task(test, i), total),
        Lazy(lambda i: without(task(test, i), *axes), total),
        Lazy(lambda i: without(task(test, i), U[indices[i % count]]), total),
    ]
    made, tasks = factory(net, G.shape), Lazy(lambda i: task(train, i), total)
    _, found = train_tasks(run, f"contest {net}", made, tasks, tests, protocol, chunk=chunk)
    return found.view(len(train), count, 3)


def _chart(net: str, indices: list[int], scores: Tensor, caption: str) -> Chart:
    names = ("both features", "linear feature alone", "circle alone")
    series = tuple(
        curve(name, indices, percent(scores[..., k]), "line" if k else "dashed") for k, name in enumerate(names)
    )
    return Chart(
        f"contest-{net}", f"Which feature {net} uses",
        "index of the linear feature's direction, largest eigenvalue of G first", "test accuracy, %", series,
        "Accuracy of the linear feature and of the circle alone over the index of the linear feature's direction.",
        caption,
    )  # fmt: skip
