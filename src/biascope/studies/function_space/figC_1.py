"""Fig. C.1: the imperfect recoveries of figure 5.3 by SIRENs whose first layer is not trained.

Erratum: the paper's w0 = 1 with W0 = I or I / 2 has period 2 pi or 4 pi, not 1 or 2; here the first layer has
frequencies f0 = 1 and 0.5 cycles per unit. One sine per coordinate cannot tell a point from its mirror image, so each
is taken with `phases` phases. The network with many frequencies has those of a SIREN with w0 = 30.

Verdict: the rule of figure 5.3 (`fig5_3.py`).
"""

import math
from typing import Annotated

import torch

from biascope.fields import frozen_siren
from biascope.seeds import generator
from biascope.studies.function_space.recovering import LAPTOP, RECOVERING, SMOKE, Recovering, recover
from biascope.studies.registry import study
from biascope.studies.result import StudyResult
from biascope.studies.runs import Run

CLAIM = "A SIREN with a frozen first layer shows the same imperfect recoveries."


@study(
    "fields/figC.1",
    paper="function-space",
    figure="C.1",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | {"steps": 60, "lr": 1e-3},
        "laptop": LAPTOP | {"steps": 250, "lr": 3e-4},
        "paper": {},
    },
)
def figC_1(
    run: Run,
    *,
    options: Recovering = RECOVERING,
    phases: Annotated[int, "sines per coordinate where there is one frequency"] = 8,
    w0: Annotated[float, "of the SIREN whose frequencies are the many"] = 30.0,
) -> StudyResult:
    """Ghosts, blur and a sharp image from SIRENs with a fixed first layer."""
    hidden = (options.width,) * 3

    def single(f0: float, seed: int) -> torch.nn.Module:
        return frozen_siren(f0 * torch.eye(2).repeat(phases, 1), hidden=hidden, outputs=1, output_offset=0.5, seed=seed)

    def many(seed: int) -> torch.nn.Module:
        weights = torch.rand(options.features, 2, generator=generator(seed, "W0")) - 0.5  # U(-1/d, 1/d), d = 2
        return frozen_siren(w0 / (2 * math.pi) * weights, hidden=hidden, outputs=1, output_offset=0.5, seed=seed)

    builds = {
        "f0 = 1": lambda seed: single(1.0, seed),
        "f0 = 0.5": lambda seed: single(0.5, seed),
        f"w0 = {w0:g}": many,
    }
    return recover(run, options, builds, CLAIM)
