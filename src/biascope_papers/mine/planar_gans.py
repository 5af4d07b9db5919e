"""Fig. 5.3 and 5.4: GANs on a spiral and on 25 Gaussians, without and with MINE.

The generator maximises log D(G(e, c)) + beta I(G(e, c); c), clipped (Eq. 17, C.1; Eq. 16 as printed lacks the log of
D). Both arms have the same initial networks, data and latent draws. The text shows pictures and no number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.studies.pictures import picture
from biascope.support import derive, generator, progress
from biascope_papers.mine.stacks import BETAS, PairCritic, Replayed, Stack, StackedMine, adam, descend

STD = 0.05  # of the 25 Gaussians (text) and of the spiral's noise (the text says only that there is noise)
TURNS = (0.25, 1.75)  # of the spiral, first and last
RADIUS = 2.0  # of the spiral's end, and of the grid
NEAR = 3.0  # standard deviations within which a sample is near a centre or a point
FINE = 16  # points of the line in a piece of the spiral
POINTS = 20  # of a curve
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


PUBLISHED = Setting()
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"points": 5000, "steps": 60, "generator_width": 32, "width": 32, "lr": 2e-3, "seeds": 2, "samples": 500},
    "laptop": {"steps": 4000, "generator_width": 128, "width": 128, "lr": 5e-4, "seeds": 4},
    "paper": {},
}


@study("mine/fig5.3", sizes=SIZES)
def fig5_3(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Coverage of the spiral over training, without and with MINE."""
    data = spiral(setting.points, derive(run.seed, "points"))
    found, numbers = _both_arms(run, data, setting, coverage, "covered", "samples on the spiral")
    ceiling = float(coverage(spiral(setting.samples, derive(run.seed, "ceiling"))[None])[0])
    numbers["covered by as many true points"] = Estimate(ceiling)
    return StudyResult(
        measured=f"Covered: {numbers['covered, GAN']} without and {numbers['covered, GAN + MINE']} with MINE, "
        f"difference {numbers['covered with MINE - without']}; as many true points cover {ceiling:.2f}. The spiral's "
        "equation and the latent inputs are our choice.",
        numbers=numbers,
        figures=(_chart(found, "coverage", "Spiral: share covered by samples", "share of pieces covered"),),
    )


@study("mine/fig5.4", sizes=SIZES)
def fig5_4(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Modes found over training, without and with MINE."""
    data = grid(setting.points, derive(run.seed, "points"))
    found, numbers = _both_arms(run, data, setting, modes, "modes", "samples near a centre")
    numbers |= {f"modes with a sample, {arm}": Estimate.of(touched(made["samples"])) for arm, made in found.items()}
    return StudyResult(
        measured=f"Modes found of 25: {numbers['modes, GAN']} without and {numbers['modes, GAN + MINE']} with MINE, "
        f"difference {numbers['modes with MINE - without']}. The grid's spacing and the latent inputs are our choice.",
        numbers=numbers,
        figures=(_chart(found, "modes", "25 Gaussians: modes found in samples", "modes found"),),
    )


def train(points: Tensor, beta: float, setting: Setting, seeds: Sequence[int], seed: int, measure: Measure
          ) -> dict[str, Tensor]:  # fmt: skip
    """One GAN for every seed, on points [n, 2]. A step: discriminator, statistics network (if beta), generator.

    Gives "samples" [S, m, 2] at the end; two measures of samples, "first" and "second", and the information "nats" [S,
    k] at the steps "at" [k].
    """
    device = points.device
    s, latent = len(seeds), setting.noise + setting.code
    g = Stack([latent, *[setting.generator_width] * 2, 2], "leaky", seeds, "generator", batch_norm=True).to(device)
    d = Stack([2, *[setting.width] * 3, 1], "leaky", seeds, "discriminator").to(device)
    t = PairCritic(Stack([2 + setting.code, *[setting.width] * 3, 1], "elu", seeds, "statistics")).to(device)
    mine = StackedMine(t, setting.lr, BETAS)
    g_step, d_step = (adam(net.parameters(), setting.lr) for net in (g, d))
    rows, draws, last = (generator(seed, name, device=device) for name in ("batches", "latent", "samples"))
    final = torch.randn(s, setting.samples, latent, generator=last, device=device)
    every = max(1, setting.steps // POINTS)
    kept, at = [], []

    def play() -> Tensor:
        real = points[torch.randint(len(points), (s, setting.batch), generator=rows, device=device)]
        z = torch.randn(s, setting.batch, latent, generator=draws, device=device)
        fake, code = g(z), z[..., : setting.code]
        descend(d_step, d.parameters(), (softplus(-d(real)) + softplus(d(fake.detach()))).mean((1, 2)))
        nats, information = torch.zeros(s, device=device), None
        if beta:
            nats = mine.fit(fake, code)
            information = mine(fake, code)
        descend(g_step, g.parameters(), softplus(-d(fake)).mean((1, 2)), information, beta)
        return nats

    players = [g_step, d_step, *([mine.optimizer] if beta else [])]
    advance = Replayed(play, players, (rows, draws), mine.state)
    for step in progress(range(1, setting.steps + 1), f"beta = {beta:g}", leave=False):
        nats = advance()
        if step % every == 0 or step == setting.steps:
            with torch.no_grad():
                made = g(final)
            kept.append(torch.stack([*measure(made), nats]).cpu())
            at.append(step)
    first, second, nats = (rows.clone() for rows in torch.stack(kept, -1))
    return {"samples": made.cpu(), "first": first, "second": second, "nats": nats, "at": torch.tensor(at)}


def _both_arms(
    run: Run, points: Tensor, setting: Setting, measure: Measure, first: str, second: str
) -> tuple[dict[str, Any], dict[str, Estimate]]:
    """The GAN and the GAN with MINE, and what both measures, `first` and `second`, are at the end."""
    members = [derive(run.seed, "member", i) for i in range(setting.seeds)]

    def compute(weight: float) -> dict[str, Tensor]:
        made = train(points.to(run.device), weight, setting, members, derive(run.seed, "gan"), measure)
        run.log(beta=weight, **{f"measure {i}": float(v) for i, v in enumerate(made["first"][:, -1])})
        return made

    arms = (("GAN", 0.0), ("GAN + MINE", setting.beta))
    found: dict[str, dict[str, Any]] = {name: run.cached(name, partial(compute, weight)) for name, weight in arms}
    plain, mine = found.values()
    numbers = {f"{first} with MINE - without": Estimate.of(mine["first"][:, -1] - plain["first"][:, -1])}
    for arm, made in found.items():
        numbers[f"{first}, {arm}"] = Estimate.of(made["first"][:, -1])
        numbers[f"{second}, {arm}"] = Estimate.of(made["second"][:, -1])
    numbers["estimate of the information (nats)"] = Estimate.of(mine["nats"][:, -1])
    _scatter(run, points, found)
    return found, numbers


def _chart(found: dict[str, Any], name: str, title: str, label: str) -> Chart:
    """The first measure over training, of both arms."""
    series = tuple(curve(arm, made["at"], made["first"].double()) for arm, made in found.items())
    alt = f"{label.capitalize()} over training, one curve for each arm."
    caption = "Mean over seeds; bands: one standard error."
    return Chart(name, title, "iteration", label, series, alt=alt, caption=caption)


def _scatter(run: Run, points: Tensor, found: dict[str, Any]) -> None:
    """Data and samples of both arms, first seed."""
    panels = {arm: made["samples"][0] for arm, made in found.items()}
    panels = {"data": points[: len(panels["GAN"])], **panels}

    def draw(axes: Any) -> None:
        for axis, (title, cloud) in zip(axes.flat, panels.items()):
            axis.scatter(*cloud.T.numpy(), s=1.5, linewidths=0, alpha=0.6, rasterized=True)
            axis.set_xlim(-1.25 * RADIUS, 1.25 * RADIUS)
            axis.set_ylim(-1.25 * RADIUS, 1.25 * RADIUS)
            axis.set_aspect("equal")
            axis.set_title(title)

    picture(run, "samples", 1, 3, draw, caption="Data, and samples of both GANs (first seed).")


def centres() -> Tensor:
    """The 25 centres [25, 2]: a grid of -2, -1, 0, 1, 2 (the text gives no spacing)."""
    line = torch.linspace(-RADIUS, RADIUS, 5)
    return torch.cartesian_prod(line, line)


def grid(n: int, seed: int) -> Tensor:
    """n points [n, 2] of the 25 Gaussians."""
    rng = generator(seed, "grid")
    return centres()[torch.randint(25, (n,), generator=rng)] + STD * torch.randn(n, 2, generator=rng)


def on_spiral(length: Tensor) -> Tensor:
    """Points [n, 2] of an Archimedean spiral (the text gives no equation) at shares [n] of its length, about."""
    first, last = (2 * math.pi * turn for turn in TURNS)
    angle = (first**2 + (last**2 - first**2) * length).sqrt()  # length grows as angle^2
    return angle[:, None] / last * RADIUS * torch.stack([angle.cos(), angle.sin()], 1)


def spiral(n: int, seed: int) -> Tensor:
    """n points [n, 2] of the spiral, plus noise."""
    rng = generator(seed, "spiral")
    return on_spiral(torch.rand(n, generator=rng)) + STD * torch.randn(n, 2, generator=rng)


def modes(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Centres found [S], and the share of samples [S, m, 2] within 3 standard deviations of some centre [S].

    A centre is found when a fifth of its share (m / 25) is so near: samples strewn evenly would put 7 % there.
    """
    near = _near(samples)
    return (near.sum(1) >= 0.2 * samples.shape[1] / 25).sum(1).float(), near.any(2).float().mean(1)


def touched(samples: Tensor) -> Tensor:
    """Centres with a sample of [S, m, 2] within 3 standard deviations [S]: the usual, lenient count."""
    return _near(samples).any(1).sum(1).float()


def _near(samples: Tensor) -> Tensor:
    """[S, m, 25]: whether a sample lies within 3 standard deviations of a centre."""
    return torch.cdist(samples, centres().to(samples).expand(len(samples), -1, -1)) < NEAR * STD


def coverage(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the spiral covered [S], and of samples [S, m, 2] within 3 standard deviations of its noise [S].

    One of 25 pieces is covered when half of its share (m / 25) of the samples is so near to it.
    """
    line = on_spiral((torch.arange(25 * FINE) + 0.5) / (25 * FINE)).to(samples)
    distance, nearest = torch.cdist(samples, line.expand(len(samples), -1, -1)).min(2)
    near = distance < NEAR * STD
    counts = torch.zeros(len(samples), 25, device=samples.device).scatter_add_(1, nearest // FINE, near.float())
    return (counts >= 0.5 * samples.shape[1] / 25).float().mean(1), near.float().mean(1)
