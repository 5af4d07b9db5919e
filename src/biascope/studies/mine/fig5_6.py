"""Fig 5.6 (and C.1): ALI, ALICE and ALI with MINE on 25 Gaussians: samples, reconstructions and codes.

ALI matches the joint of data and code with that of samples and prior; it may still reconstruct badly. ALICE adds a loss
of reconstructions (l2, or adversarial), MINE the information between data and code, as the reconstruction error is at
most KL(q(x, z) | p(x, z)) - I_q(x; z) + H_q(x) (the text prints H_q(z)). The text shows pictures and no number; widths
and rates are those of Fig. 5.4, the dimensions of the code are not given. A mode is found as in Fig. 5.4.

Verdict rule. "Confirmed" if both hold on the same seeds, each by two standard errors over seeds:
1. ALI with MINE finds more modes in its samples than ALICE (l2), and more than ALICE (adv.).
2. Its reconstruction error is below that of ALI.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.mine.ali import ARMS, Arm, Setting, by_model, nearest_centre, train
from biascope.studies.mine.toys import RADIUS, grid
from biascope.studies.pictures import picture
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "ALI with MINE keeps more modes than ALICE and reconstructs better than ALI. (That ALICE reconstructs best is not "
    "judged.)"
)
HELD_OUT = 2000  # points to reconstruct
DRAWN = 1000  # of them in the picture
WORDS = {
    "modes": "modes",
    "near": "samples near a centre",
    "error": "reconstruction error",
    "kept": "reconstructed in their mode",
}
PICTURE = "What each model makes of held-out points, its samples and its codes; a colour is a mode."
SHOWN = {"back": "reconstructions", "samples": "samples", "code": "codes"}


@study(
    "mine/fig5.6",
    paper="alignment",
    figure="5.6, C.1",
    claim=CLAIM,
    sizes={
        "smoke": {"points": 5000, "steps": 40, "generator_width": 32, "width": 32, "lr": 2e-3, "seeds": 2,
                  "samples": 500},
        "laptop": {"steps": 2000, "generator_width": 128, "width": 128, "lr": 5e-4, "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def fig5_6(
    run: Run,
    *,
    weight: Annotated[float, "of the reconstruction loss (ALICE) and of the information (MINE)"] = 1.0,
    points: Annotated[int, "points to train on"] = 100_000,
    steps: Annotated[int, "iterations (not given)"] = 5000,
    batch: Annotated[int, "points in an iteration"] = 100,
    lr: Annotated[float, "of Adam, all networks"] = 1e-4,
    generator_width: Annotated[int, "units in the two layers of encoder and decoder"] = 500,
    width: Annotated[int, "units in the three layers of discriminators and statistics network"] = 400,
    latent: Annotated[int, "dimensions of the code (not given)"] = 2,
    samples: Annotated[int, "samples that are measured"] = 2500,
    seeds: Annotated[int, "models of each kind"] = 10,
) -> StudyResult:
    """Modes and reconstructions of four bi-directional models."""
    setting = Setting(steps, batch, lr, generator_width, width, latent, weight)
    data = grid(points, derive(run.seed, "points")).to(run.device)
    test = grid(HELD_OUT, derive(run.seed, "test")).to(run.device)
    members = [derive(run.seed, "member", i) for i in range(seeds)]

    def compute(arm: Arm) -> dict[str, Tensor]:
        made = train(data, test, arm, setting, members, derive(run.seed, "ali"), samples)
        run.log(arm=arm, modes=float(made["modes"].mean()), error=float(made["error"].mean()))
        return made

    found: dict[str, dict[str, Any]] = {arm: run.cached(arm, partial(compute, arm)) for arm in ARMS}
    numbers = {
        f"{words}, {arm}": Estimate.of(made[name]) for arm, made in found.items() for name, words in WORDS.items()
    }
    ours = found["ALI + MINE"]
    more = {arm: Estimate.of(ours["modes"] - found[arm]["modes"]) for arm in ARMS if arm[:5] == "ALICE"}
    better = Estimate.of(found["ALI"]["error"] - ours["error"])
    numbers |= {f"modes, ALI + MINE - {arm}": value for arm, value in more.items()}
    numbers["reconstruction error, ALI - ALI + MINE"] = better
    _picture(run, test.cpu(), found)
    said = "; ".join(f"{arm} {numbers[f'modes, {arm}']} and {numbers[f'reconstruction error, {arm}']}" for arm in ARMS)
    return StudyResult(
        verdict=decide(all(above(v) for v in more.values()) and above(better), [*more.values(), better]),
        claim=CLAIM,
        measured=f"Modes of 25 and reconstruction error: {said}. More modes with MINE: "
        f"{', '.join(f'{value} than {arm}' for arm, value in more.items())}; error below that of ALI by {better}. "
        f"{steps} iterations, lr {lr:g}, widths {generator_width} and {width} (Fig. 5.4: 5000, 0.0001, 500 and 400), "
        f"code of {latent} dimensions; errors over {seeds} seeds.",
        numbers=numbers,
        figures=tuple(
            by_model(
                name,
                f"25 Gaussians: {title}",
                WORDS[name],
                {arm: numbers[f"{WORDS[name]}, {arm}"] for arm in ARMS},
                caption,
            )
            for name, title, caption in (
                ("modes", "modes found in samples", "Of 25."),
                ("error", "distance of points and reconstructions", "Euclidean distance."),
            )
        ),
    )


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

    picture(run, "models", len(SHOWN), len(found), draw, (2.1, 2.1), caption=PICTURE)
