"""What the alignment studies share: image classes with label noise, networks, and a training that is probed.

At log-spaced iterations the kernel of the ten outputs is computed on fixed batches of training (with their possibly
wrong labels) and of test images. Features are centred per output, unless said otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from biascope import InputError, Kernel, nets, ntk
from biascope.data import Dataset
from biascope.linalg import effective_rank
from biascope.studies import Run
from biascope.studies.estimates import errors_over
from biascope.support import derive, generator
from biascope_papers.ntk.setting import images
from biascope_papers.ntk.training import Recipe, evaluate, fit, spread_out, steps_of

STATISTICS = ("largest", "mean", "median", "rank", "T1", "T2", "T3", "cka", "uncentred")
SHARES = (0.04, 0.08, 0.16)  # T1, T2, T3: the first 40, 80 and 160 of 1000 eigenvalues
CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """Everything a probed training depends on, apart from the seed."""

    dataset: str = "cifar10"
    net: str = "vgg19"
    width: int = 64
    depth: int = 6
    n_train: int = 50_000
    n_test: int = 10_000
    noise: float = 0.0
    lr: float = 0.01
    momentum: float = 0.9
    batch: int = 100
    epochs: float = 60.0
    probes: int = 30
    probe_size: int = 100
    probe_sets: int = 1
    precision: str = "tf32"

    def key(self, seed: int) -> str:
        """A name that tells every setting apart."""
        return f"{self.net} noise={self.noise:g} lr={self.lr:g} seed={seed} {derive(0, *asdict(self).items()) % 10**8}"


@dataclass(frozen=True)
class Task:
    """Options of the studies of VGG-19 with random labels: what is learnt, and by which network."""

    dataset: Annotated[str, "cifar10, mnist, or digits as a stand-in"] = "cifar10"
    net: Annotated[Literal["vgg19", "resnet18", "mlp"], "the network"] = "vgg19"
    width: Annotated[int, "channels of the first stage (64 is the published one), or units of the mlp"] = 8
    noises: Annotated[tuple[float, ...], "fractions of random labels"] = (0.0, 0.5)

    @property
    def stand_in(self) -> str:
        """What differs from the published network and images, empty if nothing does."""
        published = (self.dataset, self.net, self.width) == ("cifar10", "vgg19", 64)
        return "" if published else f"{self.net} of width {self.width} on {self.dataset}"

    def setting(self, noise: float, lr: float, epochs: float) -> Setting:
        """A training of this network, as far as these options say."""
        return Setting(self.dataset, self.net, self.width, noise=noise, lr=lr, epochs=epochs)


@dataclass(frozen=True)
class Probing:
    """Options of all studies of probed trainings: how many images, measurements and seeds."""

    n_train: Annotated[int, "training images"] = 2000
    n_test: Annotated[int, "test images"] = 500
    batch: Annotated[int, "images per step"] = 100
    probes: Annotated[int, "measurements, evenly spaced in log iterations"] = 10
    probe_size: Annotated[int, "images per kernel"] = 30
    probe_sets: Annotated[int, "disjoint batches per measurement, for the error bars"] = 2
    seeds: Annotated[int, "initialisations"] = 1
    precision: Annotated[str, "float32, tf32 or bf16 while training on a GPU"] = "tf32"

    def __str__(self) -> str:
        over = errors_over(self.seeds, self.probe_sets, "probe batches")
        return f"{self.probe_sets} batches of {self.probe_size} ({over})"

    def trainings(self, run: Run, setting: Setting, reuse: str = "") -> list[dict[str, Any]]:
        """The setting with these options in it, trained from every seed: see `trajectory`."""
        own = asdict(self)
        seeds = range(own.pop("seeds"))
        return [trajectory(run, replace(setting, **own), seed, reuse) for seed in seeds]


VGG = Task()
PROBING = Probing()


def build(net: str, shape: Sequence[int], seed: int, *, width: int = 64, depth: int = 6) -> nn.Module:
    """A network with ten outputs: vgg19 or resnet18 (width: channels of the first stage), or mlp (depth x width units).

    Weights N(0, 2 / fan-in) and zero biases for mlp and vgg19, torch's own for resnet18 (with batch norm).
    """
    own: dict[str, Any] = {"hidden": (width,) * depth} if net == "mlp" else {"width": width}
    made = nets.build(net, seed=seed, outputs=CLASSES, **(own | nets.info(net).options_for(shape)))
    if net == "mlp":  # as the published code: with torch's own weights six layers pass on next to nothing
        rng = generator(seed, "weights")
        for layer in made.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, generator=rng)
                nn.init.zeros_(layer.bias)
    return made


def randomise(y: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Uniformly random classes for a fraction of labels y [n]: (labels, which were drawn). One in ten stays right."""
    rng = generator(seed, "label noise")
    drawn = torch.zeros(len(y), dtype=torch.bool)
    drawn[torch.randperm(len(y), generator=rng)[: round(fraction * len(y))]] = True
    other = torch.randint(CLASSES, (len(y),), generator=rng).to(y.device)
    drawn = drawn.to(y.device)
    return torch.where(drawn, other, y), drawn


def statistics(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, float]]:
    """`STATISTICS` of the kernel of all outputs on x with labels y, and the CKA of every layer."""
    K = ntk(net, x, by_layer=True)
    values = K.centered().eigh().values.double()
    total, N = values.sum(), len(values)
    shares = [float(values[: max(1, round(share * N))].sum() / total) for share in SHARES]
    found = [float(values[0]), float(values.mean()), float(values.median()), effective_rank(values), *shares]
    found += [cka(K, y), K.alignment(y, centered=False)]
    return torch.tensor(found, dtype=torch.float64), {name: cka(part, y) for name, part in K.by_layer().items()}


def cka(K: Kernel, y: Tensor) -> float:
    """Centred alignment with the labels; NaN where the kernel is zero (a layer that has died)."""
    try:
        return K.alignment(y)
    except InputError:
        return float("nan")


def trajectory(run: Run, setting: Setting, seed: int, reuse: str = "") -> dict[str, Any]:
    """A probed training, from this run's folder, or from the folder `reuse` if it has the same one.

    steps [p]; train_accuracy, test_accuracy, train_loss [p]; train, test [p, probe sets, statistics];
    train_layers, test_layers [p, probe sets, layers]; layers: their names, joined by commas.
    """
    key = setting.key(seed)
    if reuse and key not in run.arrays():
        other = Run.open(Path(reuse))
        if key in other.arrays():
            return run.cached(key, lambda: other.cached(key, dict))  # a copy, so that this run stands by itself
    return run.cached(key, lambda: _train(run, setting, seed))


def column(found: dict[str, Any], which: str, statistic: str) -> Tensor:
    """One statistic of "train" or "test" over the probes: [probe sets, p]."""
    return cast(Tensor, found[which])[:, :, STATISTICS.index(statistic)].T


def repeats(found: list[dict[str, Any]], which: str, statistic: str) -> Tensor:
    """One statistic over the probes for every repeat, [repeats, p], and errors are over its rows.

    Seeds are the repeats, their probe batches averaged; with one seed, its probe batches are.
    """
    return by_repeat([column(each, which, statistic) for each in found])


def by_repeat(tables: list[Tensor]) -> Tensor:
    """[repeats, ...] from one table [probe sets, ...] per seed: probe sets averaged, or with one seed as they are."""
    return tables[0] if len(tables) == 1 else torch.stack([table.mean(0) for table in tables])


def iterations(found: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where probes are drawn on a logarithmic axis: at their iteration, the first (iteration 0) at 1."""
    return [max(1, int(step)) for step in found[0]["steps"]]


def mean_curve(found: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """A curve [p] averaged over seeds."""
    return torch.stack([each[name] for each in found]).mean(0)


def stand_in(dataset: str) -> str:
    """A sentence, where the digits are not MNIST."""
    return "" if dataset == "mnist" else f" The digits are {dataset}, a stand-in for MNIST."


def _train(run: Run, s: Setting, seed: int) -> dict[str, Any]:
    if s.probe_size * s.probe_sets > min(s.n_train, s.n_test):
        raise InputError(
            f"{s.probe_sets} probe sets of {s.probe_size} do not fit into {s.n_train} training and {s.n_test} test "
            "images"
        )
    train, test = train_and_test(run, s.dataset, s.n_train, s.n_test)
    noisy, _ = randomise(train.y, s.noise, derive(run.seed, "noise", seed))
    net = build(s.net, train.x.shape[1:], derive(run.seed, "init", seed), width=s.width, depth=s.depth).to(run.device)
    recipe = Recipe(
        steps_of(s.epochs, len(train), s.batch), s.batch, s.lr, s.momentum, "constant", precision=s.precision
    )
    at = spread_out(recipe.steps, s.probes, first=min(5, recipe.steps))
    few = min(len(train), len(test))
    rows: dict[str, list[Tensor]] = {name: [] for name in ("train", "test", "train_layers", "test_layers", "curves")}
    names: list[str] = []

    def look(step: int) -> None:
        loss, right = evaluate(net, train.x[:few], noisy[:few])
        if not math.isfinite(loss):
            raise InputError(f"{s.net}: the training loss is not finite at iteration {step}; choose a smaller lr")
        _, good = evaluate(net, test.x, test.y)
        rows["curves"].append(torch.tensor([loss, right, good], dtype=torch.float64))
        for which, x, y in (("train", train.x, noisy), ("test", test.x, test.y)):
            sets = [slice(i * s.probe_size, (i + 1) * s.probe_size) for i in range(s.probe_sets)]
            found = [statistics(net, x[part], y[part]) for part in sets]
            names[:] = list(found[0][1])
            rows[which].append(torch.stack([each[0] for each in found]))
            rows[f"{which}_layers"].append(torch.tensor([list(each[1].values()) for each in found]))
        run.log(net=s.net, noise=s.noise, lr=s.lr, seed=seed, step=step, loss=loss, train=right, test=good)

    fit(net.train(), train.x, noisy, recipe, derive(run.seed, "order", seed), at=at, look=look)
    tables = {name: torch.stack(parts) for name, parts in rows.items()}
    curves = tables.pop("curves")
    return {
        **tables,
        "steps": torch.tensor(at),
        "train_loss": curves[:, 0],
        "train_accuracy": curves[:, 1],
        "test_accuracy": curves[:, 2],
        "layers": ",".join(names),
    }


def train_and_test(run: Run, dataset: str, n_train: int, n_test: int) -> tuple[Dataset, Dataset]:
    """Training and test images, on the run's device."""
    seed = derive(run.seed, "images")
    train = images(dataset, "train", n_train, seed, run.device)
    return train, images(dataset, "test", n_test, seed, run.device, like=train)
