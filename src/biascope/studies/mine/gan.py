"""GANs in the plane, without and with a term for the information between samples and code (Eq. 17 with log D)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import curve
from biascope.studies.mine.stacks import BETAS, PairCritic, Stack, StackedMine, descend
from biascope.studies.pictures import picture
from biascope.studies.result import Chart, Estimate
from biascope.studies.runs import Run, Value

POINTS = 20  # of a curve
CAPTION = "Mean over seeds; bands: one standard error."
Measure = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """Options of the studies in the plane; both arms share all but `beta`."""

    beta: Annotated[float, "weight of the information"] = 1.0
    points: Annotated[int, "points to train on"] = 100_000
    steps: Annotated[int, "iterations"] = 5000
    batch: Annotated[int, "points in an iteration"] = 100
    lr: Annotated[float, "of Adam, all networks"] = 1e-4
    generator_width: Annotated[int, "units in the generator's two layers"] = 500
    width: Annotated[int, "units in the three layers of discriminator and statistics network"] = 400
    noise: Annotated[int, "Gaussian inputs of the generator without a meaning (not given in the text)"] = 8
    code: Annotated[int, "Gaussian inputs whose information is raised (not given)"] = 8
    samples: Annotated[int, "samples that are measured"] = 2500
    seeds: Annotated[int, "networks of each arm"] = 10

    def about(self, chosen: str) -> str:
        """What deviates from the paper, in a sentence; `chosen`: what the text does not give."""
        return (
            f"{self.steps} iterations, lr {self.lr:g}, widths {self.generator_width} and {self.width} (paper: 5000, "
            f"0.0001, 500 and 400); {chosen} and {self.noise} + {self.code} latent inputs are our choice; errors over "
            f"{self.seeds} seeds."
        )


PUBLISHED = Setting()
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"points": 5000, "steps": 60, "generator_width": 32, "width": 32, "lr": 2e-3, "seeds": 2, "samples": 500},
    "laptop": {"steps": 4000, "generator_width": 128, "width": 128, "lr": 5e-4, "seeds": 4},
    "paper": {},
}


@dataclass(frozen=True)
class Trained:
    """Samples [S, m, 2] at the end; two measures [S, k] of samples and the information [S, k] at `at` [k] steps."""

    samples: Tensor
    first: Tensor
    second: Tensor
    nats: Tensor
    at: Tensor


def train(points: Tensor, beta: float, setting: Setting, seeds: Sequence[int], seed: int, measure: Measure,
          samples: int) -> Trained:  # fmt: skip
    """One GAN for every seed, on points [n, 2]. A step: discriminator, statistics network (if beta), generator.

    The generator descends -log D(G) - beta I(G; code) with adaptive clipping. Data and latent draws do not depend on
    beta, nor do the initial networks.
    """
    device = points.device
    s, latent = len(seeds), setting.noise + setting.code
    g = Stack([latent, *[setting.generator_width] * 2, 2], "leaky", seeds, "generator", batch_norm=True).to(device)
    d = Stack([2, *[setting.width] * 3, 1], "leaky", seeds, "discriminator").to(device)
    t = PairCritic(Stack([2 + setting.code, *[setting.width] * 3, 1], "elu", seeds, "statistics")).to(device)
    mine = StackedMine(t, setting.lr, BETAS)
    g_step, d_step = (torch.optim.Adam(net.parameters(), lr=setting.lr, betas=BETAS) for net in (g, d))
    rows, draws = (generator(seed, name, device=device) for name in ("batches", "latent"))
    final = torch.randn(s, samples, latent, generator=generator(seed, "samples", device=device), device=device)
    every = max(1, setting.steps // POINTS)
    kept: dict[str, list[Tensor]] = {"first": [], "second": [], "nats": []}
    at = []
    nats = torch.zeros(s, device=device)
    for step in progress(range(1, setting.steps + 1), f"beta = {beta:g}", leave=False):
        real = points[torch.randint(len(points), (s, setting.batch), generator=rows, device=device)]
        z = torch.randn(s, setting.batch, latent, generator=draws, device=device)
        fake, code = g(z), z[..., : setting.code]
        loss = (softplus(-d(real)) + softplus(d(fake.detach()))).mean((1, 2))
        descend(d_step, d.parameters(), loss)
        information = None
        if beta:
            nats = mine.fit(fake, code)
            information = mine(fake, code)
        descend(g_step, g.parameters(), softplus(-d(fake)).mean((1, 2)), information, beta)
        if step % every == 0 or step == setting.steps:
            with torch.no_grad():
                first, second = measure(g(final))
            for name, value in (("first", first), ("second", second), ("nats", nats)):
                kept[name].append(value.cpu())
            at.append(step)
    with torch.no_grad():
        made = g(final).cpu()
    curves = {name: torch.stack(values, 1) for name, values in kept.items()}
    return Trained(made, curves["first"], curves["second"], curves["nats"], torch.tensor(at))


def both_arms(run: Run, points: Tensor, setting: Setting, measure: Measure) -> dict[str, Trained]:
    """The GAN and the GAN with MINE, from the run folder where they are there already."""
    members = [derive(run.seed, "member", i) for i in range(setting.seeds)]
    points = points.to(run.device)

    def compute(weight: float) -> dict[str, Value]:
        made = train(points, weight, setting, members, derive(run.seed, "gan"), measure, setting.samples)
        run.log(beta=weight, **{f"measure {i}": float(v) for i, v in enumerate(made.first[:, -1])})
        return dict(vars(made))

    found: dict[str, Any] = {}
    for name, weight in (("GAN", 0.0), ("GAN + MINE", setting.beta)):
        stored = run.cached(name, partial(compute, weight))
        found[name] = Trained(**stored)  # type: ignore[arg-type]
    return found


def last(found: Trained, field: str) -> Estimate:
    """A measure at the end of training, over seeds."""
    return Estimate.of(getattr(found, field)[:, -1])


def gain(found: dict[str, Trained]) -> Estimate:
    """The first measure with MINE less that without, of the same seeds."""
    return Estimate.of(found["GAN + MINE"].first[:, -1] - found["GAN"].first[:, -1])


def chart(found: dict[str, Trained], name: str, title: str, label: str, alt: str) -> Chart:
    """The first measure over training, of both arms."""
    series = tuple(curve(arm, made.at, made.first.double()) for arm, made in found.items())
    return Chart(name, title, "iteration", label, series, alt=alt, caption=CAPTION)


def scatter(run: Run, name: str, points: Tensor, found: dict[str, Trained], limit: float) -> None:
    """Data and samples of both arms, first seed."""
    panels = {"data": points[: found["GAN"].samples.shape[1]], **{arm: made.samples[0] for arm, made in found.items()}}

    def draw(axes: Any) -> None:
        for axis, (title, cloud) in zip(axes.flat, panels.items()):
            axis.scatter(*cloud.cpu().T.numpy(), s=1.5, linewidths=0, alpha=0.6, rasterized=True)
            axis.set_xlim(-limit, limit)
            axis.set_ylim(-limit, limit)
            axis.set_aspect("equal")
            axis.set_title(title)

    picture(run, name, 1, 3, draw, caption="Data, and samples of both GANs (first seed).")
