"""Table 5.2 (MNIST): reconstructions of ALI, ALICE and ALI with MINE.

Networks and objectives: Tables C.4 to C.7 and Eq. 19. Accuracy is the share of test images whose reconstruction has the
image's true label by a classifier trained here; MS-SSIM has the two scales that 28 pixels allow.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

from biascope.studies import Estimate, Run, StudyResult, study
from biascope.support import derive, generator
from biascope_papers.mine import stacked_digits as digits
from biascope_papers.mine.ali import ARMS, Arm, by_model, play
from biascope_papers.mine.stacks import LEAKY, SingleMine

LATENT = 128  # of z, and of the encoder's noise
SHOWN = 25
RECOGNISED = 0.5  # accuracy of the best model from which there is something to compare
MEASURES = {
    "error": "Euclidean distance of a test image and its reconstruction, pixels in [-1, 1].",
    "accuracy": "Share of test images whose reconstruction is classified as what they are.",
    "MS-SSIM": "Structural similarity on two scales: 1 for equal images.",
}
WINDOW, SIGMA = 11, 1.5  # of the structural similarity
C1, C2 = 0.01**2, 0.03**2  # for values in [0, 1]
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of the scales; renormalised where there are fewer


@dataclass(frozen=True)
class Setting:
    """Options of the study; all arms share them."""

    dataset: Annotated[str, "mnist, or digits (8 x 8, enlarged; ships with the library)"] = "mnist"
    n_test: Annotated[int, "test images that are reconstructed"] = 10_000
    steps: Annotated[int, "iterations"] = 50_000
    batch: Annotated[int, "images in an iteration"] = 100
    lr: Annotated[float, "of Adam, all networks"] = 1e-4
    weight: Annotated[float, "of the reconstruction loss (ALICE) and of the information (not given)"] = 1.0
    width: Annotated[int, "channels at 14 x 14 of all networks"] = 64
    classifier_steps: Annotated[int, "Adam steps of the classifier, batches of 100"] = 3000
    seeds: Annotated[int, "models of each kind"] = 3


PUBLISHED = Setting()


@study(
    "mine/table5.2",
    sizes={
        "smoke": {"dataset": "digits", "n_test": 60, "steps": 2, "batch": 10, "width": 2, "classifier_steps": 40,
                  "seeds": 2},
        "laptop": {"n_test": 1000, "steps": 400, "batch": 50, "width": 8, "lr": 5e-4, "classifier_steps": 600,
                   "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def table5_2(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Reconstructions of digits by four bi-directional models."""
    x, y = digits.digit_images(setting.dataset, "train", run.device)
    classifier = digits.train_classifier(x, y, setting.classifier_steps, derive(run.seed, "classifier"))
    x_test, y_test = (part[: setting.n_test] for part in digits.digit_images(setting.dataset, "test", run.device))
    known = float((digits.classify(classifier, x_test[:, None])[:, 0] == y_test).float().mean())

    def compute(arm: Arm, i: int) -> dict[str, Any]:
        seed, truth = derive(run.seed, "model", i), x_test[:, None]
        back, samples = train(x[:, None], truth, arm, setting, seed)
        right = torch.cat([digits.classify(classifier, part)[:, 0] for part in torch.split(back, 1000)]) == y_test
        found = {
            "error": float((back - truth).flatten(1).norm(dim=1).mean()),
            "accuracy": float(right.float().mean()),
            "MS-SSIM": float(ms_ssim((back + 1) / 2, (truth + 1) / 2).mean()),
        }
        run.log(arm=arm, seed=seed, **found)
        return {**found, "back": back[:SHOWN].cpu(), "samples": samples.cpu()}

    found: dict[str, list[dict[str, Any]]] = {
        arm: run.cached_each(arm, range(setting.seeds), partial(compute, arm)) for arm in ARMS
    }

    def gap(name: str, more: str, less: str) -> dict[str, Estimate]:
        pairs = zip(found[more], found[less])
        return {f"{name}, {more} - {less}": Estimate.of([a[name] - b[name] for a, b in pairs])}

    gaps = gap("error", "ALI", "ALI + MINE") | gap("accuracy", "ALI + MINE", "ALI")
    gaps |= gap("error", "ALI + MINE", "ALICE (l2)") | gap("MS-SSIM", "ALI + MINE", "ALI")
    for arm in ("ALICE (l2)", "ALICE (adv.)"):
        gaps |= gap("MS-SSIM", "ALI + MINE", arm) | gap("accuracy", "ALI + MINE", arm)
    numbers = {
        f"{name}, {arm}": Estimate.of([made[name] for made in rows]) for arm, rows in found.items() for name in MEASURES
    }
    best = max(numbers[f"accuracy, {arm}"].value for arm in ARMS)
    table = "; ".join(f"{arm} {numbers[f'accuracy, {arm}']}" for arm in ARMS)
    panels = {"data": x_test[:SHOWN, None].cpu()}
    for arm, rows in found.items():
        panels |= {f"{arm}: reconstructions": rows[0]["back"], f"{arm}: samples": rows[0]["samples"]}
    caption = "Test images, their reconstructions and samples by each model (first seed)."
    digits.show(run, "reconstructions", panels, caption)
    return StudyResult(
        measured=f"Accuracy of reconstructions: {table}."
        f"{'' if best >= RECOGNISED else ' No model reconstructs digits yet.'}{digits.stand_in(setting.dataset)}",
        numbers=numbers | gaps | {"accuracy on the images themselves": Estimate(known)},
        figures=tuple(
            by_model(name.lower(), f"Reconstructions of digits: {name}", name,
                     {arm: numbers[f"{name}, {arm}"] for arm in ARMS}, caption)
            for name, caption in MEASURES.items()
        ),
    )  # fmt: skip


def train(x: Tensor, test: Tensor, arm: Arm, setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """One model on images x [n, 1, 28, 28] in [-1, 1]: reconstructions of `test`, and 25 samples.

    Objectives are those of `ali.play`, with convolutional networks; squares are means over pixels, not sums.
    """
    device, width = x.device, setting.width
    f = Encoder(width, generator(seed, "encoder")).to(device)
    g = decoder(width, generator(seed, "decoder")).to(device)
    d = Discriminator(width, generator(seed, "discriminator")).to(device)
    cycle = Discriminator(width, generator(seed, "cycle"), channels=2).to(device)
    term = SingleMine(statistics_network(width, generator(seed, "statistics")).to(device), setting.lr)
    players = {"model": [*f.parameters(), *g.parameters()], "pairs": [*d.parameters()], "cycle": [*cycle.parameters()]}
    rows, draws = (generator(seed, name, device=device) for name in ("batches", "latent"))

    def normal(n: int) -> Tensor:
        return torch.randn(n, LATENT, generator=draws, device=device)

    def batches() -> tuple[Tensor, Tensor]:
        return x[torch.randint(len(x), (setting.batch,), generator=rows, device=device)], normal(setting.batch)

    play(
        arm, setting, players, batches, lambda x: f(x, normal(len(x))), g, d,
        lambda x, y: cycle(torch.cat([x, y], 1)), term, lambda x, y: (x - y).square().mean(), (rows, draws),
    )  # fmt: skip
    with torch.no_grad():
        back = torch.cat([g(f(part, normal(len(part)))) for part in torch.split(test, 1000)])
        return back, g(normal(100))[:25]


class Encoder(nn.Module):
    """Table C.4: z [n, 128] of images [n, 1, 28, 28] and noise [n, 128], which is tiled as maps; published width 64."""

    def __init__(self, width: int, rng: torch.Generator) -> None:
        super().__init__()
        channels = (1 + LATENT, width, 2 * width, 4 * width)
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for a, b in pairwise(channels):
                layers += [nn.Conv2d(a, b, 5, 2, 2), digits.norm(b), nn.ReLU()]
            top = channels[-1]
            layers += [nn.Conv2d(top, top, 4), nn.ReLU(), nn.Flatten(), nn.Linear(top, LATENT)]
            self.layers = nn.Sequential(*layers)
        digits.drawn(self, rng)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Codes [n, 128]; tiled maps need no convolution per image: what a map gives is its noise times known sums."""
        first = cast(nn.Conv2d, self.layers[0])
        image, tiled = first.weight[:, :1], first.weight[:, 1:]
        ones = torch.ones(1, 1, *x.shape[2:], device=x.device, dtype=x.dtype)
        sums = conv2d(ones, tiled.reshape(-1, 1, 5, 5), None, 2, 2)[0]
        sums = sums.reshape(*tiled.shape[:2], *sums.shape[1:])
        h = conv2d(x, image, first.bias, 2, 2) + torch.einsum("nk,okhw->nohw", noise, sums)
        code: Tensor = self.layers[1:](h)
        return code


def decoder(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.5: z [n, 128] -> images [n, 1, 28, 28]."""
    return digits.upwards(LATENT, (4 * width, 2 * width, width, 1), 4, (0, 1, 1), rng)  # 4 -> 7 -> 14 -> 28


class Discriminator(nn.Module):
    """Table C.6: scores [n] of images [n, 1, 28, 28] with codes [n, 128]; of images of two channels, without codes."""

    def __init__(self, width: int, rng: torch.Generator, channels: int = 1) -> None:
        super().__init__()
        sizes, joined = (channels, width, 2 * width, 4 * width), LATENT if channels == 1 else 0
        with torch.device("meta"):
            self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 5, 2, 2) for a, b in pairwise(sizes))
            hidden = nn.Linear(16 * sizes[-1] + joined, 16 * width)
            self.head = nn.Sequential(hidden, nn.LeakyReLU(0.2), nn.Linear(16 * width, 1))
        digits.drawn(self, rng, small=False)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Scores [n]."""
        for convolution in self.convolutions:
            x = LEAKY(convolution(x))
        scores: Tensor = self.head(x.flatten(1) if z is None else torch.cat([x.flatten(1), z], 1))
        return scores[:, 0]


def statistics_network(width: int, rng: torch.Generator) -> digits.StatisticsNetwork:
    """Table C.7: scores [n] of images [n, 1, 28, 28] and codes [n, 128]."""
    return digits.StatisticsNetwork((1, width, 2 * width, 4 * width), LATENT, (), "leaky", rng)


def ms_ssim(x: Tensor, y: Tensor) -> Tensor:
    """Multi-scale structural similarity (Wang et al.) [n] of images x, y [n, 1, s, s] in [0, 1], on as many scales (of
    five) as the window of 11 fits in. Contrast and structure below 0 count as 0.
    """
    line = torch.exp(-((torch.arange(WINDOW, device=x.device) - WINDOW // 2) ** 2) / (2 * SIGMA**2)).to(x.dtype)
    window = (line[:, None] * line / line.sum() ** 2)[None, None]
    scales = [(x, y)]
    while scales[-1][0].shape[-1] // 2 >= WINDOW and len(scales) < len(WEIGHTS):
        scales.append((avg_pool2d(scales[-1][0], 2), avg_pool2d(scales[-1][1], 2)))
    weights = torch.tensor(WEIGHTS[: len(scales)], device=x.device, dtype=x.dtype)
    weights = weights / weights.sum()
    value = torch.ones(len(x), device=x.device, dtype=x.dtype)
    for i, (a, b) in enumerate(scales):
        mean_a, mean_b = conv2d(a, window), conv2d(b, window)
        var_a = conv2d(a * a, window) - mean_a**2
        var_b = conv2d(b * b, window) - mean_b**2
        covariance = conv2d(a * b, window) - mean_a * mean_b
        structure = (2 * covariance + C2) / (var_a + var_b + C2)
        if i + 1 == len(scales):
            structure = structure * (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
        value = value * structure.mean((1, 2, 3)).clamp_min(0) ** weights[i]
    return value
