"""Fig. 5.7: PSNR over the first ten iterations, and the energy of the images in the atoms of the same networks.

Each image is fitted on a random half of its pixels; the other half is the test. Drawn weights are fitted by Adam,
meta-learned ones by gradient descent with the rate of their inner loop, as in the paper.

Verdict: confirmed if the rank correlation over networks of the area under E (figure 5.5) with the test PSNR after the
last iteration is above 0.5 by two standard errors over seeds, and the network with the largest area has the largest
test PSNR in the mean over seeds. With one seed there is no error, and nothing is tested.
"""

from typing import Annotated

import torch

from biascope.progress import progress
from biascope.studies.estimates import above, curve, decide, over_seeds, spearman
from biascope.studies.function_space.fields_setting import (
    LAPTOP,
    LEGEND,
    META,
    META_LAPTOP,
    META_SMOKE,
    SETTING,
    SMOKE,
    Field,
    Meta,
    Setting,
    areas,
    energies,
    psnrs,
)
from biascope.studies.function_space.fig5_5 import W0S
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "The order of PSNR over the first ten iterations follows the energy concentration."
BAR = 0.5


@study(
    "fields/fig5.7",
    paper="function-space",
    figure="5.7",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | META_SMOKE | {"w0s": (2.0, 15.0, 100.0), "lr": 1e-3},
        # a step of Adam moves the function by lr x width: the narrower network has a larger rate
        "laptop": LAPTOP | META_LAPTOP | {"n": 20, "lr": 4e-4},
        "paper": {},
    },
)
def fig5_7(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0s: Annotated[tuple[float, ...], "first frequencies of the SIRENs"] = W0S,
    meta_w0: Annotated[float, "w0 of the SIREN whose start is meta-learned (MAML)"] = 30.0,
    iterations: Annotated[int, "full-batch steps of the fits"] = 10,
    lr: Annotated[float, "of Adam, for drawn weights"] = 1e-4,
) -> StudyResult:
    """PSNR of the first iterations against the energy in leading atoms."""
    fields = [Field("relu"), *(Field("siren", w0) for w0 in sorted(w0s)), Field("siren", meta_w0, "maml")]
    area, train, test = {}, {}, {}
    for field in progress(fields, "networks"):
        area[field] = areas(energies(run, field, setting, meta))  # [seeds, n]
        train[field], test[field] = psnrs(run, field, setting, iterations, lr, meta)  # [seeds, n, iterations + 1]
    by_area = torch.stack([area[field].mean(1) for field in fields], 1)  # [seeds, networks]
    ends = {
        name: torch.stack([p[f][:, :, -1].mean(1) for f in fields], 1) for name, p in (("test", test), ("train", train))
    }
    ranks = {
        name: Estimate.of([spearman(a, p) for a, p in zip(by_area.tolist(), each.tolist())])
        for name, each in ends.items()
    }
    top, best = fields[int(by_area.mean(0).argmax())], fields[int(ends["test"].mean(0).argmax())]
    numbers = {f"rank correlation of area and {name} PSNR": value for name, value in ranks.items()}
    for field in fields:
        numbers[f"area under E, {field.title}"] = over_seeds(area[field])
        numbers[f"test PSNR, {field.title}"] = over_seeds(test[field][:, :, -1])
        numbers[f"training PSNR, {field.title}"] = over_seeds(train[field][:, :, -1])
    return StudyResult(
        decide(above(ranks["test"], BAR) and top == best, [ranks["test"]]),
        CLAIM,
        f"Over {len(fields)} networks the area under E and the PSNR after {iterations} iterations have rank "
        f"correlations {ranks['test']} (test pixels) and {ranks['train']} (fitted ones). The largest area has "
        f"{top.title}; the highest test PSNR has {best.title}, {numbers[f'test PSNR, {best.title}']} dB. "
        f"{setting.said} Adam {lr:g}; MAML of {meta.meta_steps} steps; errors over seeds.",
        numbers,
        (
            *(
                Chart(
                    f"{name}-psnr",
                    f"PSNR on the {'other' if name == 'test' else 'fitted'} half of the pixels",
                    "iteration",
                    "PSNR (dB)",
                    tuple(curve(f.title, range(iterations + 1), p[f].mean(1)) for f in fields),
                    alt="PSNR over the first iterations, one curve for each network.",
                    caption=LEGEND,
                )
                for name, p in (("test", test), ("train", train))
            ),
            Chart(
                "order",
                "Energy in leading atoms and PSNR",
                "area under E",
                f"test PSNR after {iterations} iterations (dB)",
                tuple(
                    Series.of(f.title, by_area[:, i], ends["test"][:, i], style="points") for i, f in enumerate(fields)
                ),
                alt="One point for each network and seed: PSNR against the area under E.",
                caption="One point for each seed. Area under E: 1 if the first atoms have all energy of the images.",
            ),
        ),
    )
