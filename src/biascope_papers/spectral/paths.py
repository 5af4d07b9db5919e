"""Figs A.11 and A.12: all images that a network puts into one class are connected inside that class.

Between pairs of training images of a class, and images of other classes turned into adversarials for it, AutoNEB bends
the straight line so that the class is predicted all along. The net is the registry's ResNet with blocks 3-3-3
(ResNet-20).
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope import data as sets
from biascope import nets
from biascope.ensembles import train_ensemble
from biascope.spectral import autoneb
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, generator, progress
from biascope_papers.spectral.fitting import tensors

MEASURED = ("length_ratio", "min_probability", "straight_probability", "connected", "straight_connected")
Precision = Literal["float32", "tf32", "bf16"]


@study(
    "spectral/figA.12",
    sizes={
        "smoke": {"data": "digits", "images": 0, "epochs": 8, "classes": 3, "members": 4, "pairs": 12, "pixels": "raw"},
        "laptop": {"images": 4000, "epochs": 5, "classes": 3, "members": 6, "pairs": 20, "pixels": "raw"},
        "paper": {"precision": "tf32", "pixels": "raw"},
    },
)
def fig_a_12(
    run: Run,
    *,
    data: Annotated[str, "cifar10, or digits (then a small multilayer perceptron)"] = "cifar10",
    images: Annotated[int, "training images, 0 for all"] = 0,
    epochs: Annotated[int, "passes over the training images"] = 30,
    classes: Annotated[int, "classes, from 0 on"] = 10,
    members: Annotated[int, "training images, and as many adversarials, of each class"] = 50,
    pairs: Annotated[int, "pairs of each class, 0 for all"] = 0,
    pixels: Annotated[Literal["raw", "standardised"], "units of `lr`: [0, 1], or as fed"] = "standardised",
    pivots: Annotated[int, "of a path at the beginning (not given in the text)"] = 5,
    rounds: Annotated[int, "NEB iterations"] = 4,
    steps: Annotated[int, "SGD steps in each"] = 10,
    lr: Annotated[float, "of these steps"] = 1e-3,
    attack_steps: Annotated[int, "steps of the targeted attack"] = 40,
    batch: Annotated[int, "paths at a time"] = 256,
    precision: Annotated[Precision, "of training on a GPU"] = "float32",
) -> StudyResult:
    """Paths between images of one class that never leave the class."""
    train = sets.load(data, "train")
    count = images or len(train)
    order = torch.randperm(len(train), generator=generator(run.seed, "subset"))[:count]
    mean, std = sets.channel_stats(train.x)
    x, y = (train.x[order] - mean.view(-1, 1, 1)) / std.view(-1, 1, 1), train.y[order]
    net, accuracy = _fitted(run, x, y, "mlp" if data == "digits" else "resnet18", epochs, precision)
    reach = 0.05
    if pixels == "raw":
        x, net = train.x[order], Standardised(net, mean.to(run.device), std.to(run.device))
        reach = 0.05 * float(std.mean())

    def paths(c: int) -> dict[str, Any]:
        device = run.device
        rng = generator(run.seed, "class", c)
        own = _chosen((y == c).nonzero()[:, 0], 3 * members, rng)
        own = own[(net(x[own].to(device)).argmax(1) == c).cpu()][:members]
        others = _chosen((y != c).nonzero()[:, 0], 2 * members, rng)
        fooled = attack(net, x[others].to(device), c, attack_steps, reach)
        fooled = fooled.clamp(0, 1) if pixels == "raw" else fooled
        fooled = fooled[net(fooled).argmax(1) == c][:members]
        ends = torch.cat([x[own].to(device), fooled])
        index = torch.combinations(torch.arange(len(ends)), 2)
        index = index[torch.randperm(len(index), generator=rng)][: pairs or None]
        target = torch.full((len(index),), c, device=device)
        found = [
            autoneb(net, ends[a], ends[b], t, pivots=pivots, rounds=rounds, steps=steps, lr=lr)
            for a, b, t in zip(*(torch.split(v, batch) for v in (index[:, 0], index[:, 1], target) if len(v)))
        ]
        empty = torch.empty(0, device=device)  # a class that the network never predicts has no pairs
        kept = {name: torch.cat([empty, *(getattr(f, name).float() for f in found)]) for name in MEASURED}
        return {**kept, "members": len(own), "adversarials": len(fooled)}

    parts = [tensors(part) for part in run.cached_each("class", progress(range(classes), "classes"), paths)]
    parts = [part for part in parts if len(part["connected"])]
    numbers = {"training accuracy of the network": Estimate(accuracy)}
    if not parts:
        return StudyResult(measured="The network predicts no class; train longer or on more images.", numbers=numbers)
    every = {name: torch.cat([part[name].double() for part in parts]) for name in MEASURED}

    def by_class(name: str, less: float = 0.0) -> Estimate:
        return Estimate.of([float(part[name].double().mean()) - less for part in parts])

    numbers |= {
        "share of pairs connected": by_class("connected"),
        "share of pairs connected by the straight line": by_class("straight_connected"),
        "how much longer than the straight line": by_class("length_ratio", 1.0),
        "least probability of the class on a path": by_class("min_probability"),
        "share of paths above 95 % all along": Estimate(float((every["min_probability"] >= 0.95).double().mean())),
        "pairs": Estimate(len(every["connected"])),
    }
    levels = [i / 50 for i in range(51)]
    shares = tuple(
        Series.of(label, levels, [float((every[name] >= p).double().mean()) for p in levels])
        for label, name in (("AutoNEB", "min_probability"), ("straight line", "straight_probability"))
    )
    stand_in = " 8x8 digits and a multilayer perceptron stand in for CIFAR-10 and ResNet-20." * (data == "digits")
    return StudyResult(
        measured=f"{float(every['connected'].mean()):.2%} of {len(every['connected'])} pairs are connected "
        f"({float(every['straight_connected'].mean()):.2%} by the straight line).{stand_in}",
        numbers=numbers,
        figures=(
            Chart("probability", "Least probability of the class along a path", "probability p",
                  "share of paths above p all along", shares,
                  alt="More of the bent paths than of the straight ones stay above every probability."),
        ),
    )  # fmt: skip


class Standardised(nn.Module):
    """A network of standardised images as one of pixels in [0, 1]."""

    def __init__(self, net: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.net, self.mean, self.std = net, mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 10] of x [n, c, s, s]."""
        out: Tensor = self.net((x - self.mean) / self.std)
        return out


def _fitted(run: Run, x: Tensor, y: Tensor, kind: str, epochs: int, precision: Precision) -> tuple[nn.Module, float]:
    """A network trained on x [n, c, s, s], y, on the run's device, and its training accuracy."""
    channels, side = x.shape[1], x.shape[2]

    def factory() -> nn.Module:
        if kind == "mlp":
            return nets.build("mlp", in_features=channels * side**2, hidden=(64, 64), outputs=10)
        return nets.build("resnet18", in_channels=channels, outputs=10, blocks=(3, 3, 3), width=16, image_size=side)

    def train() -> dict[str, Any]:
        done = train_ensemble(
            factory, [(x, y)], epochs=epochs, batch_size=128, lr=0.1, momentum=0.9, weight_decay=5e-4, clip_norm=None,
            seed=derive(run.seed, "network"), device=run.device, precision=precision,
        )  # fmt: skip
        return {"accuracy": float(done.train_accuracy[0]), **(done.networks.one(0) if done.networks else {})}

    got = tensors(run.cached("network", train))
    accuracy = float(got.pop("accuracy"))
    net = factory()
    net.load_state_dict(got)
    return net.to(run.device).eval().requires_grad_(False), accuracy


def attack(net: nn.Module, x: Tensor, target: int, steps: int, size: float = 0.05) -> Tensor:
    """x [n, ...] moved by signed gradient steps until each is put into class `target` (or the steps are spent)."""
    goal = torch.full((len(x),), target, device=x.device)
    moved = x.clone()
    for _ in range(steps):
        leaf = moved.detach().requires_grad_(True)
        with torch.enable_grad():
            out = net(leaf)
            (up,) = torch.autograd.grad(nn.functional.cross_entropy(out, goal, reduction="sum"), leaf)
        # a margin: stop once the class holds 90 %
        going = (out.detach().softmax(1)[:, target] < 0.9).view(-1, *[1] * (x.dim() - 1))
        moved = moved - size * up.sign() * going
    return moved


def _chosen(index: Tensor, count: int, rng: torch.Generator) -> Tensor:
    return index[torch.randperm(len(index), generator=rng)[:count]]
