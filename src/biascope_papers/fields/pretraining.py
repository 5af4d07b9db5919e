"""Fig. 5.8: a SIREN pre-trained on one image for longer and longer, as a dictionary of other images.

Pre-training is full-batch Adam on all pixels of one image. After each number of iterations, E of other images (figure
5.5), and their test PSNR after a few more iterations (figure 5.7). Each seed has its own weights and its own image.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.fields import fit
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, mean_error, mean_of_ranks, spearman
from biascope.support import derive, progress
from biascope_papers.fields.setting import (
    LAPTOP,
    PAPER,
    SETTING,
    SMOKE,
    THRESHOLDS,
    Field,
    Setting,
    areas,
    atoms_of,
    first_steps,
    half,
    stacked,
    start,
)

COUNTS = (0, 100, 1000, 10_000)


@study(
    "fields/fig5.8",
    sizes={
        "smoke": SMOKE | {"pretraining": (0, 30, 200), "pretraining_lr": 1e-3, "lr": 1e-3, "seeds": 3},
        "laptop": LAPTOP | {"n": 20, "pretraining": COUNTS, "pretraining_lr": 4e-4, "lr": 4e-4},
        "paper": PAPER,
    },
)
def fig5_8(
    run: Run,
    *,
    setting: Setting = SETTING,
    w0: Annotated[float, "first frequency of the SIREN"] = 30.0,
    pretraining: Annotated[tuple[int, ...], "iterations on the one image (not given in the text)"] = COUNTS,
    pretraining_lr: Annotated[float, "of Adam, on the one image"] = 1e-4,
    iterations: Annotated[int, "of the fits to other images"] = 10,
    lr: Annotated[float, "of Adam, in the fits to other images"] = 1e-4,
) -> StudyResult:
    """Energy and PSNR of other images after pre-training on one."""
    counts = tuple(sorted({0, *pretraining}))

    def measure(seed: int) -> dict[str, Tensor]:
        """Mean E [counts, q] and mean test PSNR [counts] of one seed."""
        if setting.images == "faces":  # which has no more than n in its test split
            first, others = (setting.signals(derive(run.seed, "images", seed), *of) for of in ((1, "meta"), ()))
        else:
            signals = setting.signals(derive(run.seed, "images", seed), setting.n + 1)
            first, others = signals[:1], signals[1:]
        one = first[0].to(run.device)
        mask = half(setting.side, derive(run.seed, "pixels", seed))
        drawn, r = start(run, Field("siren", w0), setting, seed), setting.grid.to(run.device)
        shares, test = [], []
        for count in counts:  # each from the beginning: the last one is the most of the work
            model = fit(drawn, r, one, steps=count, lr=pretraining_lr).model if count else drawn
            shares.append(atoms_of(model, setting).energy(others, THRESHOLDS).mean)
            after = first_steps(model, setting.grid, others, mask, steps=iterations, lr=lr, optimiser="adam")[1]
            test.append(after[:, -1].mean())
            run.log(seed=seed, iterations=count, test_psnr=float(test[-1]))
        return {"shares": torch.stack(shares), "test": torch.stack(test)}

    made = run.cached_each("seed", progress(range(setting.seeds), "seeds"), measure)
    shares, test = stacked(made, "shares"), stacked(made, "test")  # [seeds, counts, q], [seeds, counts]
    area = areas(shares)
    fall, lower = (Estimate.of(each[:, -1] - each[:, 0]) for each in (area, test))
    ranks = mean_of_ranks([spearman(counts, row) for row in area.tolist()], len(counts))
    numbers = {"change of the area under E": fall, "change of the test PSNR": lower}
    numbers["rank correlation of iterations and area"] = ranks
    for i, count in enumerate(counts):
        numbers[f"area under E after {count}"] = Estimate.of(area[:, i])
        numbers[f"test PSNR after {count}"] = Estimate.of(test[:, i])
    charts = (
        Chart(
            "energy", "Energy of other images after pre-training on one",
            "eigenvalue relative to the largest, at least", "share of energy E",
            tuple(Series.of(f"{c} iterations", THRESHOLDS, *mean_error(shares[:, i])) for i, c in enumerate(counts)),
            alt="E of other images over the eigenvalue, one curve for each length of pre-training.",
            caption="E: share of the energy of other images in atoms (eigenfunctions of the tangent kernel) with such "
            "eigenvalues. Bands: one standard error over seeds.",
            log_x=True, falling_x=True,
        ),
        Chart(
            "psnr", "PSNR of other images after pre-training on one", "iterations of pre-training, plus 1",
            f"test PSNR after {iterations} iterations (dB)",
            (curve("other images", [count + 1 for count in counts], test),),
            alt="Test PSNR on other images against the length of pre-training on one image.",
            caption="On the pixels that were not fitted. 1: no pre-training. Band: one standard error over seeds.",
            log_x=True,
        ),
    )  # fmt: skip
    return StudyResult(
        measured=f"{counts[-1]} iterations on one image change the area under E of others by {fall} and their test "
        f"PSNR by {lower} dB. {setting} Errors over seeds.",
        numbers=numbers,
        figures=charts,
    )
