"""Adversarially learned inference in the plane: ALI, ALICE with two kinds of reconstruction loss, and ALI with MINE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from biascope.progress import progress
from biascope.seeds import generator
from biascope.studies.estimates import through
from biascope.studies.mine.stacks import BETAS, PairCritic, Stack, StackedMine, descend
from biascope.studies.mine.toys import centres, modes
from biascope.studies.result import Chart, Estimate

Arm = Literal["ALI", "ALICE (l2)", "ALICE (adv.)", "ALI + MINE"]
ARMS: tuple[Arm, ...] = ("ALI", "ALICE (l2)", "ALICE (adv.)", "ALI + MINE")


@dataclass(frozen=True)
class Setting:
    """Everything the arms share; `weight` is that of the reconstruction loss or of the information."""

    steps: int
    batch: int
    lr: float
    generator_width: int
    width: int
    latent: int
    weight: float


def train(points: Tensor, test: Tensor, arm: Arm, setting: Setting, seeds: Sequence[int], seed: int, samples: int
          ) -> dict[str, Tensor]:  # fmt: skip
    """One model of every seed on points [n, 2]: samples, reconstructions and codes of `test` [k, 2], and what they are.

    Encoder z = F(x, e), decoder x = G(z). D tells (x, F(x)) from (G(z), z); F and G turn that round (Eq. 19), with
    - ALICE (l2): the squared distance of x and G(F(x));
    - ALICE (adv.): a second discriminator, which tells (x, x) from (x, G(F(x)));
    - MINE: the information between x and F(x), which the bound on the reconstruction error holds for, clipped.

    Gives "modes" [S] of samples, "near" [S] the share of samples near a centre, "error" [S] the mean distance of test
    points and their reconstructions, "kept" [S] the share whose reconstruction is nearest to the same centre.
    """
    device, s, latent = points.device, len(seeds), setting.latent
    f = Stack([2 + latent, *[setting.generator_width] * 2, latent], "leaky", seeds, "encoder", batch_norm=True)
    g = Stack([latent, *[setting.generator_width] * 2, 2], "leaky", seeds, "decoder", batch_norm=True)
    d = PairCritic(Stack([2 + latent, *[setting.width] * 3, 1], "leaky", seeds, "discriminator"))
    cycle = PairCritic(Stack([4, *[setting.width] * 3, 1], "leaky", seeds, "cycle"))
    t = PairCritic(Stack([2 + latent, *[setting.width] * 3, 1], "elu", seeds, "statistics"))
    for net in (f, g, d, cycle, t):
        net.to(device)
    mine = StackedMine(t, setting.lr, BETAS)
    both = [*f.parameters(), *g.parameters()]
    model_step = torch.optim.Adam(both, lr=setting.lr, betas=BETAS)
    d_step, cycle_step = (torch.optim.Adam(net.parameters(), lr=setting.lr, betas=BETAS) for net in (d, cycle))
    rows, draws = (generator(seed, name, device=device) for name in ("batches", "latent"))

    def encode(x: Tensor, rng: torch.Generator) -> Tensor:
        noise = torch.randn(*x.shape[:2], latent, generator=rng, device=device)
        code: Tensor = f(torch.cat([x, noise], 2))
        return code

    for _ in progress(range(setting.steps), arm, leave=False):
        x = points[torch.randint(len(points), (s, setting.batch), generator=rows, device=device)]
        z = torch.randn(s, setting.batch, latent, generator=draws, device=device)
        code, made = encode(x, draws), g(z)
        told = softplus(-d(x, code.detach())) + softplus(d(made.detach(), z))
        descend(d_step, d.parameters(), told.mean(1))
        information = None
        back = g(code) if arm.startswith("ALICE") else None
        if arm == "ALICE (adv.)" and back is not None:
            descend(
                cycle_step, cycle.parameters(), (softplus(-cycle(x, x)) + softplus(cycle(x, back.detach()))).mean(1)
            )
        if arm == "ALI + MINE":
            mine.fit(x, code)
            information = mine(x, code)
        loss = (softplus(d(x, code)) + softplus(-d(made, z))).mean(1)
        if arm == "ALICE (l2)" and back is not None:
            loss = loss + setting.weight * (x - back).square().sum(2).mean(1)
        if arm == "ALICE (adv.)" and back is not None:
            loss = loss + setting.weight * softplus(-cycle(x, back)).mean(1)
        descend(model_step, both, loss, information, setting.weight)

    with torch.no_grad():
        last = generator(seed, "samples", device=device)
        made = g(torch.randn(s, samples, latent, generator=last, device=device))
        wide = test.expand(s, -1, -1)
        code = encode(wide, last)
        back = g(code)
    found, near = modes(made)
    same = nearest_centre(back) == nearest_centre(wide)
    error = (back - wide).norm(dim=2).mean(1)
    kept = {"samples": made, "back": back, "code": code, "modes": found, "near": near, "error": error}
    return {name: value.cpu() for name, value in (kept | {"kept": same.float().mean(1)}).items()}


def by_model(name: str, title: str, label: str, values: Mapping[str, Estimate], caption: str) -> Chart:
    """One point with its error for each model."""
    return Chart(
        name, title, "model", label,
        (through("mean over seeds", range(1, len(values) + 1), values.values(), "points"),),
        alt="One point with its error for each of four models.",
        caption=f"{caption} Bars: one standard error over seeds.", x_names=tuple(values),
    )  # fmt: skip


def nearest_centre(x: Tensor) -> Tensor:
    """The nearest of the 25 centres [S, n] of points x [S, n, 2].

    Example:
        >>> nearest_centre(centres()[None, 3:5] + 0.1)
        tensor([[3, 4]])
    """
    return torch.cdist(x, centres().to(x).expand(len(x), -1, -1)).argmin(2)
