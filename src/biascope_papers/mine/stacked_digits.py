"""Table 5.1 and Fig. 5.5: modes of stacked MNIST that a GAN finds, without and with MINE.

Three random digits are the colours of one image: 1000 modes. A classifier trained here names the digit in every
channel; it names a digit in anything, so its confidence says whether there are digits at all. Modes are distinct
triples, KL is that of their histogram from the uniform one. The GAN is that of Tables C.1, C.2 with batch normalisation
as in DCGAN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, softplus

from biascope import data
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.pictures import picture
from biascope.support import derive, generator, progress
from biascope_papers.mine.stacks import ACTIVATIONS, Replayed, SingleMine, adam, descend, train_by

Network = TypeVar("Network", bound=nn.Module)
Sizes = tuple[int, ...]
MODES, LATENT, SIDE = 1000, 100, 28
norm = partial(nn.BatchNorm2d, track_running_stats=False)  # by the batch at hand, always
SURE = 0.8  # mean confidence from which images are taken for digits
SHOWN = 25  # images of an arm in the picture
CHUNK = 2000  # images in one pass
ARMS = ("GAN", "GAN + MINE")


@dataclass(frozen=True)
class Setting:
    """Options of the study; both arms share all but `beta`."""

    dataset: Annotated[str, "mnist, or digits (8 x 8, enlarged; ships with the library)"] = "mnist"
    images: Annotated[int, "stacked images to train on"] = 128_000
    steps: Annotated[int, "iterations (published: 50 epochs)"] = 100_000
    batch: Annotated[int, "images in an iteration (not given)"] = 64
    lr: Annotated[float, "of Adam, all networks (not given; DCGAN's)"] = 2e-4
    beta: Annotated[float, "weight of the information (not given for this table)"] = 1.0
    width: Annotated[int, "channels at 14 x 14 of generator and discriminator"] = 64
    critic_width: Annotated[int, "channels at 14 x 14 of the statistics network"] = 16
    samples: Annotated[int, "generated images that are classified"] = 26_000
    classifier_steps: Annotated[int, "Adam steps of the classifier, batches of 100"] = 3000
    seeds: Annotated[int, "GANs of each arm"] = 3


PUBLISHED = Setting()


@study(
    "mine/table5.1",
    sizes={
        "smoke": {"dataset": "digits", "images": 2000, "steps": 4, "batch": 16, "width": 2, "critic_width": 2,
                  "samples": 400, "classifier_steps": 60, "seeds": 2},
        "laptop": {"images": 20_000, "steps": 1000, "lr": 1e-3, "width": 8, "critic_width": 4, "samples": 6000,
                   "classifier_steps": 600, "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def table5_1(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Modes of stacked MNIST, without and with MINE."""
    x, y = digit_images(setting.dataset, "train", run.device)
    classifier = train_classifier(x, y, setting.classifier_steps, derive(run.seed, "classifier"))
    x_test, y_test = digit_images(setting.dataset, "test", run.device)
    accuracy = float((classify(classifier, x_test[:, None])[:, 0] == y_test).float().mean())

    def compute(weight: float, i: int) -> dict[str, Any]:
        seed = derive(run.seed, "gan", i)
        made = _train(x, weight, setting, seed)
        labels = torch.cat([classify(classifier, part) for part in torch.split(made, CHUNK)])
        modes, kl = modes_and_divergence(triples(labels))
        run.log(beta=weight, seed=seed, modes=modes, kl=kl)
        sure = confidence(classifier, made[:CHUNK])
        return {"modes": modes, "kl": kl, "sure": sure, "images": made[:SHOWN].cpu()}

    found: dict[str, list[dict[str, Any]]] = {
        arm: run.cached_each(arm, progress(range(setting.seeds), arm), partial(compute, weight))
        for arm, weight in zip(ARMS, (0.0, setting.beta))
    }
    words = {"modes": "modes", "kl": "KL (nats)", "sure": "confidence of the classifier"}
    numbers = {
        f"{label}, {arm}": Estimate.of([made[name] for made in rows])
        for arm, rows in found.items()
        for name, label in words.items()
    }
    modes, kl, sure, modes_mine, kl_mine, sure_mine = numbers.values()
    less = Estimate.of([a["kl"] - b["kl"] for a, b in zip(*found.values())])
    true = torch.randint(MODES, (setting.samples,), generator=generator(run.seed, "true samples"))
    most, floor = modes_and_divergence(true)
    on_digits = confidence(classifier, x_test[:CHUNK, None])
    numbers |= {"KL without MINE - with": less, "KL of as many true samples": Estimate(floor)}
    numbers |= {"modes of as many true samples": Estimate(most), "accuracy of the classifier": Estimate(accuracy)}
    numbers["confidence of the classifier, test digits"] = Estimate(on_digits)
    index = torch.randint(len(x), (SHOWN, 3), generator=generator(run.seed, "shown")).to(x.device)
    panels = {"data": x[index].cpu(), **{arm: rows[0]["images"] for arm, rows in found.items()}}
    caption = "Stacks of three digits, one in each colour, of the data and of both GANs (first seed)."
    show(run, "images", panels, caption)
    blank = " Neither arm makes digits yet." if max(sure.value, sure_mine.value) < SURE else ""
    points = (
        Series.of(arm, [made["kl"] for made in rows], [made["modes"] for made in rows], style="points")
        for arm, rows in found.items()
    )
    chart = Chart(
        "modes", "Stacked MNIST: modes found and divergence", "KL from the uniform distribution (nats)",
        "modes of 1000", tuple(points), alt="A point for every GAN: few modes go with a large divergence.",
        caption="One point for each seed.",
    )  # fmt: skip
    return StudyResult(
        measured=f"Modes of 1000: {modes} without and {modes_mine} with MINE; KL {kl} and {kl_mine} ({setting.samples} "
        f"true samples: {most} and {floor:.3f}).{blank}{stand_in(setting.dataset)}",
        numbers=numbers,
        figures=(chart,),
    )


def _train(x: Tensor, beta: float, setting: Setting, seed: int) -> Tensor:
    """One GAN on stacks of digits x [n, 28, 28]; images [samples, 3, 28, 28] that it makes at the end."""
    device, lr = x.device, setting.lr
    stacks = torch.randint(len(x), (setting.images, 3), generator=generator(seed, "stacks")).to(device)
    g = generator_network(setting.width, generator(seed, "generator")).to(device)
    d = discriminator_network(setting.width, generator(seed, "discriminator")).to(device)
    term = SingleMine(statistics_network(setting.critic_width, generator(seed, "statistics")).to(device), lr)
    g_step, d_step = (adam(net.parameters(), lr) for net in (g, d))
    rows, draws = (generator(seed, name, device=device) for name in ("batches", "latent"))

    def latent(n: int) -> Tensor:
        return 2 * torch.rand(n, LATENT, generator=draws, device=device) - 1

    def play() -> Tensor:
        real = x[stacks[torch.randint(setting.images, (setting.batch,), generator=rows, device=device)]]
        z = latent(setting.batch)
        fake = g(z)
        descend(d_step, d.parameters(), (softplus(-d(real)) + softplus(d(fake.detach()))).mean())
        if beta:
            term.fit(fake, z)
        loss = softplus(-d(fake)).mean()
        descend(g_step, g.parameters(), loss, term(fake, z) if beta else None, beta)
        return loss.detach()

    players = [g_step, d_step, *([term.optimizer] if beta else [])]
    train_by(Replayed(play, players, (rows, draws), term.state), setting.steps, f"beta = {beta:g}")
    with torch.no_grad():
        sizes = [min(CHUNK, setting.samples - start) for start in range(0, setting.samples, CHUNK)]
        return torch.cat([g(latent(size)) for size in sizes])


def triples(labels: Tensor) -> Tensor:
    """The mode 0..999 of labels [n, 3]."""
    places = torch.tensor([100, 10, 1], device=labels.device)
    return (labels * places).sum(-1)  # CUDA has no product of integer matrices


def modes_and_divergence(found: Tensor) -> tuple[int, float]:
    """How many of 1000 modes occur in found [n], and KL of their histogram from the uniform one, in nats.

    n true samples give about 999 / (2 n), not 0.
    """
    share = torch.bincount(found.cpu(), minlength=MODES).double() / len(found)
    return int((share > 0).sum()), float(torch.xlogy(share, share * MODES).sum())


def generator_network(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.1: z [n, 100] -> images [n, 3, 28, 28]; published width 64. With batch normalisation, as in DCGAN."""
    return upwards(LATENT, (8 * width, 4 * width, 2 * width, width, 3), 2, (1, 0, 1, 1), rng)  # 2 -> 4 -> 7 -> 14 -> 28


def upwards(latent: int, channels: Sizes, side: int, grow: Sizes, rng: torch.Generator) -> nn.Sequential:
    """z [n, latent] -> images [n, channels, 28, 28] in (-1, 1), by transposed convolutions of stride 2 from `side`."""
    with torch.device("meta"):
        layers: list[nn.Module] = [
            nn.Linear(latent, side**2 * channels[0]), nn.Unflatten(1, (channels[0], side, side)), nn.ReLU(),
        ]  # fmt: skip
        for i, more in enumerate(grow):
            layers.append(nn.ConvTranspose2d(channels[i], channels[i + 1], 5, 2, 2, more))
            layers += [nn.Tanh()] if i + 1 == len(grow) else [norm(channels[i + 1]), nn.ReLU()]
        net = nn.Sequential(*layers)
    return drawn(net, rng)


def discriminator_network(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.2: images [n, 3, 28, 28] -> logits [n, 1]; published width 64."""
    channels = (3, width, 2 * width, 4 * width, 8 * width)
    with torch.device("meta"):
        layers: list[nn.Module] = []
        for i in range(4):  # 28 -> 14 -> 7 -> 4 -> 2
            layers.append(nn.Conv2d(channels[i], channels[i + 1], 5, 2, 2))
            layers += [norm(channels[i + 1]), nn.ReLU()] if i else [nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels[-1], 1))
    return drawn(net, rng)


def statistics_network(width: int, rng: torch.Generator) -> StatisticsNetwork:
    """Table C.3: scores [n] of images [n, 3, 28, 28] and z [n, 100]; published width 16."""
    return StatisticsNetwork((3, width, 2 * width, 4 * width), LATENT, (64 * width,), "elu", rng)


class StatisticsNetwork(nn.Module):
    """T(x, z) [n] of images [n, c, 28, 28] and z [n, latent]; z is a bias of every channel."""

    def __init__(self, channels: Sizes, latent: int, hidden: Sizes, activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        with torch.device("meta"):
            self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 5, 2, 2) for a, b in pairwise(channels))
            self.biases = nn.ModuleList(nn.Linear(latent, b) for b in channels[1:])
            linear = [nn.Linear(a, b) for a, b in pairwise((16 * channels[-1], *hidden, 1))]
            self.head = nn.Sequential(nn.Flatten(), *linear)
        drawn(self, rng, small=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Scores [n]."""
        for convolution, bias in zip(self.convolutions, self.biases):
            x = self.activation(convolution(x) + bias(z)[:, :, None, None])
        scores: Tensor = self.head(x)
        return scores[:, 0]


def digit_images(name: str, split: Literal["train", "test"], device: str) -> tuple[Tensor, Tensor]:
    """Images [n, 28, 28] in [-1, 1] and labels [n]; smaller ones are enlarged."""
    found = data.load(name, split)
    x = found.x if found.x.shape[-1] == SIDE else interpolate(found.x, (SIDE, SIDE), mode="bilinear")
    return (2 * x[:, 0] - 1).to(device), found.y.to(device)


def stand_in(dataset: str) -> str:
    """A sentence, where the images are not MNIST."""
    return "" if dataset == "mnist" else f" {dataset} stands in for MNIST."


def drawn(net: Network, rng: torch.Generator, small: bool = True) -> Network:
    """Initial values from `rng`: N(0, 0.02) as in DCGAN (small), or torch's default ranges."""
    net.to_empty(device="cpu")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear) and module.bias is not None:
            if small:
                nn.init.normal_(module.weight, 0, 0.02, generator=rng)
                nn.init.zeros_(module.bias)
            else:
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.weight, -bound, bound, generator=rng)
                nn.init.uniform_(module.bias, -bound, bound, generator=rng)
    return net


def train_classifier(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Sequential:
    """A small convolutional network for single digits x [n, 28, 28] in [-1, 1], trained by Adam."""
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
    net = drawn(net, generator(seed, "classifier"), small=False).to(x.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    rows = generator(seed, "classifier batches", device=x.device)
    for _ in progress(range(steps), "classifier", leave=False):
        index = torch.randint(len(x), (100,), generator=rows, device=x.device)
        descend(optimizer, net.parameters(), cross_entropy(net(x[index][:, None]), y[index]))
    return net.eval()


@torch.no_grad()
def classify(net: nn.Module, images: Tensor) -> Tensor:
    """Labels [n, c] of every channel of images [n, c, 28, 28]."""
    labels: Tensor = net(images.reshape(-1, 1, SIDE, SIDE)).argmax(1)
    return labels.reshape(images.shape[:2])


@torch.no_grad()
def confidence(net: nn.Module, images: Tensor) -> float:
    """Mean over channels of the largest probability: low where images [n, c, 28, 28] are no digits."""
    return float(net(images.reshape(-1, 1, SIDE, SIDE)).softmax(1).amax(1).mean())


def show(run: Run, name: str, panels: Mapping[str, Tensor], caption: str) -> None:
    """A picture of sheets of images, three in a row."""

    def draw(axes: Any) -> None:
        for axis, (title, made) in zip(axes.flat, panels.items()):
            axis.imshow(sheet(made).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.axis("off")
            axis.set_title(title, fontsize=10)

    picture(run, name, len(panels) // 3, 3, draw, (2.2, 2.2), caption=caption)


def sheet(images: Tensor) -> Tensor:
    """The first k^2 of images [n, c, 28, 28] in [-1, 1] as one picture [28 k, 28 k, c] in [0, 1]."""
    k, c = math.isqrt(len(images)), images.shape[1]
    rows = images[: k * k].reshape(k, k, c, SIDE, SIDE).permute(0, 3, 1, 4, 2)
    return ((rows.reshape(k * SIDE, k * SIDE, c) + 1) / 2).clamp(0, 1)
