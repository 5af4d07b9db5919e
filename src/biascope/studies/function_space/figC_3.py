"""Fig. C.3: starts learned by Reptile in place of MAML.

Verdict: confirmed if, for MAML and for Reptile, the area under E of held-out images (figure 5.5) and their test PSNR
after a few iterations (figure 5.7) are above those of the same SIREN with drawn weights; paired differences, by two
standard errors over seeds (over images, if there is one seed). How Reptile compares with MAML is a number, not part of
the rule.
"""

from typing import Annotated

from biascope.progress import progress
from biascope.studies.estimates import above, decide, errors_over, over_seeds
from biascope.studies.function_space.fields_setting import (
    LAPTOP,
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
from biascope.studies.function_space.fig5_5 import energy_chart
from biascope.studies.function_space.figC_2 import psnr_chart
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "Reptile shows the same as MAML."


@study(
    "fields/figC.3",
    paper="function-space",
    figure="C.3",
    claim=CLAIM,
    sizes={
        "smoke": SMOKE | META_SMOKE | {"lr": 1e-3},
        "laptop": LAPTOP | META_LAPTOP | {"n": 20, "lr": 4e-4},
        "paper": {},
    },
)
def figC_3(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0: Annotated[float, "first frequency of the SIREN"] = 30.0,
    iterations: Annotated[int, "full-batch steps of the fits"] = 10,
    lr: Annotated[float, "of Adam, for drawn weights"] = 1e-4,
) -> StudyResult:
    """Energy and PSNR from starts learned by Reptile and by MAML."""
    plain, maml, reptile = Field("siren", w0), Field("siren", w0, "maml"), Field("siren", w0, "reptile")
    fields = [plain, maml, reptile]
    shares = {field: energies(run, field, setting, meta) for field in progress(fields, "atoms")}
    test = {field: psnrs(run, field, setting, iterations, lr, meta)[1] for field in progress(fields, "fits")}
    area = {field: areas(each) for field, each in shares.items()}
    end = {field: each[:, :, -1] for field, each in test.items()}
    numbers: dict[str, Estimate] = {}
    gains: list[Estimate] = []
    for field in (maml, reptile):
        more, higher = over_seeds(area[field] - area[plain]), over_seeds(end[field] - end[plain])
        numbers |= {f"area gained, {field.title}": more, f"test PSNR gained, {field.title}": higher}
        gains += [more, higher]
    for field in fields:
        numbers[f"area under E, {field.title}"] = over_seeds(area[field])
        numbers[f"test PSNR, {field.title}"] = over_seeds(end[field])
    numbers["area, Reptile minus MAML"] = over_seeds(area[reptile] - area[maml])
    numbers["test PSNR, Reptile minus MAML"] = over_seeds(end[reptile] - end[maml])
    return StudyResult(
        decide(all(map(above, gains)), gains),
        CLAIM,
        f"Against drawn weights the area under E grows by {gains[0]} (MAML) and {gains[2]} (Reptile), the test PSNR "
        f"after {iterations} iterations by {gains[1]} and {gains[3]} dB; Reptile minus MAML: "
        f"{numbers['area, Reptile minus MAML']} and {numbers['test PSNR, Reptile minus MAML']} dB. SIREN with w0 = "
        f"{w0:g}. {setting.said} {meta.meta_steps} outer steps; {errors_over(setting.seeds, setting.n, 'images')}.",
        numbers,
        (
            energy_chart(shares),
            psnr_chart("PSNR on the other half of the pixels", test),
        ),
    )
