"""Fig. 5.6 and C.1: ALI, ALICE and ALI with MINE on 25 Gaussians: samples, reconstructions and codes.

The reconstruction error is at most KL(q(x, z) | p(x, z)) - I_q(x; z) + H_q(x) (the text prints H_q(z)). Widths and
rates are those of Fig. 5.4, where also stands when a mode is found; the dimensions of the code are not given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import through
from biascope.studies.pictures import picture
from biascope.support import derive, generator
from biascope_papers.mine.planar_gans import RADIUS, centres, grid, modes
from biascope_papers.mine.stacks import BETAS, PairCritic, Replayed, Stack, StackedMine, adam, descend, train_by

Arm = Literal["ALI", "ALICE (l2)", "ALICE (adv.)", "ALI + MINE"]
ARMS: tuple[Arm, ...] = ("ALI", "ALICE (l2)", "ALICE (adv.)", "ALI + MINE")
Network = Callable[[Tensor], Tensor]
Scores = Callable[[Tensor, Tensor], Tensor]
HELD_OUT = 2000  # points to reconstruct
DRAWN = 1000  # of them in the picture
WORDS = {"modes": "modes", "near": "samples near a centre", "error": "reconstruction error",
         "kept": "reconstructed in their mode"}  # fmt: skip
SHOWN = {"back": "reconstructions", "samples": "samples", "code": "codes"}


@dataclass(frozen=True)
class Setting:
    """Options of the study; all arms share them."""

    weight: Annotated[float, "of the reconstruction loss (ALICE) and of the information (MINE)"] = 1.0
    points: Annotated[int, "points to train on"] = 100_000
    steps: Annotated[int, "iterations (not given)"] = 5000
    batch: Annotated[int, "points in an iteration"] = 100
    lr: Annotated[float, "of Adam, all networks"] = 1e-4
    generator_width: Annotated[int, "units in the two layers of encoder and decoder"] = 500
    width: Annotated[int, "units in the three layers of discriminators and statistics network"] = 400
    latent: Annotated[int, "dimensions of the code (not given)"] = 2
    samples: Annotated[int, "samples that are measured"] = 2500
    seeds: Annotated[int, "models of each kind"] = 10


PUBLISHED = Setting()


@study(
    "mine/fig5.6",
    sizes={
        "smoke": {"points": 5000, "steps": 40, "generator_width": 32, "width": 32, "lr": 2e-3, "seeds": 2,
                  "samples": 500},
        "laptop": {"steps": 2000, "generator_width": 128, "width": 128, "lr": 5e-4, "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def fig5_6(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Modes and reconstructions of four bi-directional models."""
    data = grid(setting.points, derive(run.seed, "points")).to(run.device)
    test = grid(HELD_OUT, derive(run.seed, "test")).to(run.device)
    members = [derive(run.seed, "member", i) for i in range(setting.seeds)]

    def compute(arm: Arm) -> dict[str, Tensor]:
        made = train(data, test, arm, setting, members, derive(run.seed, "ali"))
        run.log(arm=arm, modes=float(made["modes"].mean()), error=float(made["error"].mean()))
        return made

    found: dict[str, dict[str, Any]] = {arm: run.cached(arm, partial(compute, arm)) for arm in ARMS}
    numbers = {
        f"{words}, {arm}": Estimate.of(made[name]) for arm, made in found.items() for name, words in WORDS.items()
    }
    ours = found["ALI + MINE"]
    more = {arm: Estimate.of(ours["modes"] - found[arm]["modes"]) for arm in ARMS if arm.startswith("ALICE")}
    better = Estimate.of(found["ALI"]["error"] - ours["error"])
    numbers |= {f"modes, ALI + MINE - {arm}": value for arm, value in more.items()}
    numbers["reconstruction error, ALI - ALI + MINE"] = better
    for arm in ARMS[1:3]:
        for other in (ARMS[0], ARMS[3]):
            gap = Estimate.of(found[other]["error"] - found[arm]["error"])
            numbers[f"reconstruction error, {other} - {arm}"] = gap
    _picture(run, test.cpu(), found)
    each = "; ".join(f"{arm} {numbers[f'modes, {arm}']} and {numbers[f'reconstruction error, {arm}']}" for arm in ARMS)
    charts = [
        by_model(name, f"25 Gaussians: {title}", WORDS[name], {a: numbers[f"{WORDS[name]}, {a}"] for a in ARMS}, unit)
        for name, title, unit in (
            ("modes", "modes found in samples", "Of 25."),
            ("error", "distance of points and reconstructions", "Euclidean distance."),
        )
    ]
    return StudyResult(
        measured=f"Modes of 25 and reconstruction error: {each}; with MINE the error is below that of ALI by {better}.",
        numbers=numbers,
        figures=tuple(charts),
    )


def play(
    arm: Arm, setting: Any, players: Mapping[str, Sequence[Tensor]], batches: Callable[[], tuple[Tensor, Tensor]],
    encode: Network, decode: Network, pairs: Scores, cycle: Scores, mine: Any, distance: Scores,
    generators: Sequence[torch.Generator],
) -> None:  # fmt: skip
    """The game of encoder z = F(x, e), decoder x = G(z) and discriminator D, which tells (x, F(x)) from (G(z), z).

    F and G turn that round (Eq. 19), with
    - ALICE (l2): the squared distance of x and G(F(x));
    - ALICE (adv.): a second discriminator, which tells (x, x) from (x, G(F(x)));
    - MINE: the information between x and F(x), which the bound on the reconstruction error holds for, clipped.

    players: parameters of the "model", and of the discriminators "pairs" (x, z) and "cycle" (x, y), whose scores are
    [..., n]; batches() gives x and z; generators: what is drawn from.
    """
    steps = {name: adam(own, setting.lr) for name, own in players.items()}

    def down(which: str, loss: Tensor, information: Tensor | None = None) -> None:
        descend(steps[which], players[which], loss, information, setting.weight)

    def turn() -> Tensor:
        x, z = batches()
        code, made = encode(x), decode(z)
        down("pairs", (softplus(-pairs(x, code.detach())) + softplus(pairs(made.detach(), z))).mean(-1))
        loss = (softplus(pairs(x, code)) + softplus(-pairs(made, z))).mean(-1)
        information = None
        if arm == "ALI + MINE":
            mine.fit(x, code)
            information = mine(x, code)
        elif arm != "ALI":
            back = decode(code)
            if arm == "ALICE (adv.)":
                down("cycle", (softplus(-cycle(x, x)) + softplus(cycle(x, back.detach()))).mean(-1))
                extra = softplus(-cycle(x, back)).mean(-1)
            else:
                extra = distance(x, back)
            loss = loss + setting.weight * extra
        down("model", loss, information)
        return loss.detach()

    others = [mine.optimizer] if arm == "ALI + MINE" else []
    used = [each for name, each in steps.items() if name != "cycle" or arm == "ALICE (adv.)"]
    train_by(Replayed(turn, [*used, *others], generators, mine.state), setting.steps, arm)


def train(points: Tensor, test: Tensor, arm: Arm, setting: Setting, seeds: Sequence[int], seed: int
          ) -> dict[str, Tensor]:  # fmt: skip
    """One model of every seed on points [n, 2]: samples, reconstructions and codes of `test` [k, 2], and what they are.

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
    players = {"model": [*f.parameters(), *g.parameters()], "pairs": [*d.parameters()], "cycle": [*cycle.parameters()]}
    rows, draws, last = (generator(seed, name, device=device) for name in ("batches", "latent", "samples"))

    def batches() -> tuple[Tensor, Tensor]:
        x = points[torch.randint(len(points), (s, setting.batch), generator=rows, device=device)]
        return x, torch.randn(s, setting.batch, latent, generator=draws, device=device)

    def encode(x: Tensor, rng: torch.Generator = draws) -> Tensor:
        noise = torch.randn(*x.shape[:2], latent, generator=rng, device=device)
        code: Tensor = f(torch.cat([x, noise], 2))
        return code

    mine = StackedMine(t, setting.lr, BETAS)
    play(
        arm, setting, players, batches, encode, g, d, cycle, mine, lambda x, y: (x - y).square().sum(2).mean(1),
        (rows, draws),
    )  # fmt: skip
    with torch.no_grad():
        made = g(torch.randn(s, setting.samples, latent, generator=last, device=device))
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
    """The nearest of the 25 centres [S, n] of points x [S, n, 2]."""
    return torch.cdist(x, centres().to(x).expand(len(x), -1, -1)).argmin(2)


def _picture(run: Run, test: Tensor, found: dict[str, dict[str, Any]]) -> None:
    """Reconstructions, samples and codes of the first seed; reconstructions and codes in the colour of their mode."""
    colour = nearest_centre(test[None])[0]
    colour = torch.randperm(25, generator=torch.Generator().manual_seed(0))[colour]  # neighbours differ

    def draw(axes: Any) -> None:
        for column, (arm, made) in enumerate(found.items()):
            for row, name in enumerate(SHOWN):
                axis, cloud = axes[row][column], made[name][0]
                shade = {"color": "C0"} if name == "samples" else {"c": colour[:DRAWN].numpy(), "cmap": "nipy_spectral"}
                axis.scatter(*cloud[:DRAWN, :2].T.numpy(), s=1.5, linewidths=0, alpha=0.6, rasterized=True, **shade)
                limit = 1.25 * RADIUS if name != "code" else 4.0
                axis.set_xlim(-limit, limit)
                axis.set_ylim(-limit, limit)
                axis.set_aspect("equal")
            axes[0][column].set_title(arm, fontsize=13)
        for row, what in enumerate(SHOWN.values()):
            axes[row][0].set_ylabel(what, fontsize=13)

    caption = "What each model makes of held-out points, its samples and its codes; a colour is a mode."
    picture(run, "models", len(SHOWN), len(found), draw, (2.1, 2.1), caption=caption)
