"""Fig. 3.7: the tangent kernel of a difference of two classes, before, during and after training.

The kernel of f_b - f_a on held-out images of the classes a and b, normalised to cosines, at several points of a
training on all ten classes. Block structure is the mean cosine of two images of one class minus that of two images of
different classes. Separation is the accuracy of a linear discriminant on the first two coordinates of kernel PCA, each
image judged by the discriminant of the others (leave one out; 0.5 is chance). The paper has ResNet-50 on TinyImageNet;
here it is ResNet-18 on CIFAR-10 or, small, a dense network on digits.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from biascope import data, nets, ntk
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, progress
from biascope_papers.ekfac.common import along_training, require

ENDS = (("before", 0), ("after", -1))


@study(
    "ekfac/fig3.7",
    sizes={
        "smoke": {"dataset": "digits", "network": "mlp", "width": 32, "n": 1000, "each": 25, "steps": 60, "seeds": 2}
        | {"classes": (3, 8)},  # digits that are hard to tell apart: 0 and 1 are separated before any training
        "laptop": {"n": 4000, "width": 8, "steps": 150, "seeds": 5},
        "paper": {"n": 50_000, "width": 64, "steps": 1000, "lr": 0.05, "seeds": 5},
    },
)
def fig3_7(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    network: Annotated[Literal["mlp", "resnet18"], "what is trained"] = "resnet18",
    width: Annotated[int, "hidden units, or channels of the first stage"] = 16,
    classes: Annotated[tuple[int, ...], "the two classes whose difference is taken"] = (0, 1),
    n: Annotated[int, "training images"] = 4000,
    each: Annotated[int, "held-out images per class"] = 50,
    steps: Annotated[int, "training steps between two points of measurement"] = 150,
    points: Annotated[int, "points of measurement, the first before training"] = 4,
    lr: Annotated[float, "learning rate of SGD, momentum 0.9 (not in the paper)"] = 0.02,
    size: Annotated[int, "examples per batch"] = 100,
    seeds: Annotated[int, "trainings"] = 3,
) -> StudyResult:
    """Block structure and kernel PCA of the tangent kernel of f_b - f_a along training."""
    wanted = f"points={points}, classes={classes}: at least two points, and two different classes"
    require(points > 1 and len(set(classes)) == len(classes) == 2, wanted)
    (x, y), (held, of) = (_images(run, dataset, part, network) for part in ("train", "test"))
    x, y = x[:n], y[:n]
    a, b = classes
    shown = torch.cat([held[of == label][:each] for label in classes])
    count = [int((of == label).sum().clamp(max=each)) for label in classes]
    label = torch.tensor([0] * count[0] + [1] * count[1])

    def training(seed: int) -> dict[str, Tensor]:
        net = _network(network, derive(run.seed, "init", seed), width, x).to(run.device)
        kernels, accuracy = [], []
        for _ in along_training(run, net, x, y, seed, points, steps, lr, size):
            net.eval()
            kernel = ntk(net, shown, outputs=0, output=lambda out: (out[:, b] - out[:, a])[:, None])
            kernels.append(kernel.matrix().double().cpu())
            with torch.no_grad():
                accuracy.append(float(((net(shown)[:, b] > net(shown)[:, a]).cpu() == label).double().mean()))
            net.train()
        return {"kernels": torch.stack(kernels), "accuracy": torch.tensor(accuracy)}

    rows = run.cached_each("seed", progress(range(seeds), "trainings"), training)
    kernels, accuracy = (torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in ("kernels", "accuracy"))
    block = torch.tensor([[blocks(K, label) for K in row] for row in kernels], dtype=torch.float64)
    apart = torch.tensor([[separation(pca(K), label) for K in row] for row in kernels], dtype=torch.float64)
    found = {"block structure": block, "separation": apart}  # [seeds, points]
    numbers = {f"{name}, {when}": Estimate.of(v[:, i]) for name, v in found.items() for when, i in ENDS}
    numbers |= {f"gain of {name}": Estimate.of(v[:, -1] - v[:, 0]) for name, v in found.items()}
    numbers["accuracy of the network on the two classes, after"] = Estimate.of(accuracy[:, -1])
    at = [i * steps for i in range(points)]
    curves = {**found, "accuracy of the network": accuracy.double()}
    return StudyResult(
        measured=f"{network} of width {width} on {dataset} (not ResNet-50 on TinyImageNet): block structure grows by "
        f"{numbers['gain of block structure']}, separation by {numbers['gain of separation']}.",
        numbers=numbers,
        figures=(
            Chart("training", "Block structure and separation along training", "training step",
                  "difference of mean cosines, or accuracy", tuple(curve(name, at, v) for name, v in curves.items()),
                  alt="Block structure and separation grow with training.",
                  caption="Mean over seeds; band: standard error."),
            *(_kernel(normalised(kernels[0, i]), when) for when, i in ENDS),
            *(_components(pca(kernels[0, i]), label, classes, when) for when, i in ENDS),
        ),
    )  # fmt: skip


def normalised(K: Tensor) -> Tensor:
    """K_ij / sqrt(K_ii K_jj)."""
    d = K.diagonal().clamp_min(torch.finfo(K.dtype).tiny).rsqrt()
    return K * d[:, None] * d


def blocks(K: Tensor, label: Tensor) -> float:
    """Mean cosine of different images of one class minus that of images of two classes."""
    cosine = normalised(K)
    same = label[:, None] == label
    pairs = ~torch.eye(len(label), dtype=torch.bool)
    return float(cosine[same & pairs].mean() - cosine[~same].mean())


def pca(K: Tensor, k: int = 2) -> Tensor:
    """Coordinates [m, k] of kernel PCA of the normalised kernel."""
    cosine = normalised(K)
    centred = cosine - cosine.mean(0) - cosine.mean(1, keepdim=True) + cosine.mean()
    values, vectors = torch.linalg.eigh(centred)
    found: Tensor = vectors[:, -k:].flip(1) * values[-k:].flip(0).clamp_min(0).sqrt()
    return found


def separation(z: Tensor, label: Tensor) -> float:
    """Leave-one-out accuracy of the linear discriminant of two classes at z [m, k]."""
    right = 0
    for i in range(len(z)):
        keep = torch.arange(len(z)) != i
        ours, theirs = z[keep & (label == 0)], z[keep & (label == 1)]
        spread = torch.cat([ours - ours.mean(0), theirs - theirs.mean(0)])
        within = spread.T @ spread / len(spread)
        within = within + 1e-9 * within.trace().clamp_min(1e-30) * torch.eye(len(within), dtype=z.dtype)
        direction = torch.linalg.solve(within, theirs.mean(0) - ours.mean(0))
        second = (z[i] - (ours.mean(0) + theirs.mean(0)) / 2) @ direction > 0
        right += int(bool(second) == bool(label[i] == 1))
    return right / len(z)


def _images(run: Run, dataset: str, part: str, network: str) -> tuple[Tensor, Tensor]:
    found = data.load(dataset, "train" if part == "train" else "test")
    mean, std = data.channel_stats(data.load(dataset, "train").x[:5000])
    x = data.normalise(found, mean, std).x.to(run.device)
    return (x.flatten(1) if network == "mlp" else x), found.y.to(run.device)


def _network(network: str, seed: int, width: int, x: Tensor) -> nn.Module:
    if network == "mlp":
        return nets.build("mlp", seed=seed, in_features=x.shape[1], hidden=(width, width), outputs=10)
    return nets.build("resnet18", seed=seed, outputs=10, width=width, in_channels=x.shape[1], image_size=x.shape[2])


def _kernel(K: Tensor, when: str) -> HeatMap:
    at = range(len(K))
    return HeatMap.of(f"kernel-{when}", f"Normalised tangent kernel {when} training, first seed", x=at, y=at,
                      z=K.tolist(), x_label="image", y_label="image", z_label="cosine", low=-1.0, high=1.0,
                      diverging=True, alt="One row per image, the images of the first class first.")  # fmt: skip


def _components(z: Tensor, label: Tensor, classes: tuple[int, ...], when: str) -> Chart:
    points = tuple(
        Series.of(f"class {name}", z[label == i, 0], z[label == i, 1], style="points") for i, name in enumerate(classes)
    )
    return Chart(f"components-{when}", f"Kernel PCA {when} training, first seed", "first component",
                 "second component", points, alt="One point per image, one colour per class.")  # fmt: skip
