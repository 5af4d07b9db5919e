"""Fig. 5.4: a tone of 23 Hz fitted on 128 samples by SIRENs with a low and a high first frequency w0.

On the samples 23 Hz and its alias, 128 - 23 = 105 Hz, are the same; on twice as many points they are not. Phases of the
tone are random. An exact fit with nothing but these two has amplitudes that add up to 1.
"""

from functools import partial
from typing import Annotated, Any

import torch

from biascope import nets
from biascope.fields import alias_test
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.fields.setting import stacked


@study(
    "fields/fig5.4",
    sizes={
        "smoke": {"w0s": (30.0, 300.0), "width": 64, "steps": 150, "lr": 1e-3, "seeds": 3}, "laptop": {}, "paper": {},
    },
)  # fmt: skip
def fig5_4(
    run: Run,
    *,
    frequency: Annotated[int, "of the tone"] = 23,
    samples: Annotated[int, "of the tone on [0, 1)"] = 128,
    w0s: Annotated[tuple[float, ...], "frequencies of the first layer"] = (30.0, 100.0, 300.0),
    width: Annotated[int, "units of the two hidden layers"] = 128,
    steps: Annotated[int, "full-batch steps of Adam"] = 2000,
    lr: Annotated[float, "learning rate"] = 1e-4,
    seeds: Annotated[int, "initial weights and phases of the tone"] = 10,
) -> StudyResult:
    """Spectra between the samples, for low and high first frequencies."""
    w0s, alias = tuple(sorted(w0s)), samples - frequency

    def one(w0: float, seed: int) -> dict[str, Any]:
        phase = 2 * torch.pi * float(torch.rand((), generator=generator(run.seed, "phase", seed)))
        hidden = (width, width)
        net = nets.build("siren", seed=derive(run.seed, "init", seed), in_features=1, hidden=hidden, w0=w0)
        found = alias_test(net.to(run.device), frequency, samples, phase=phase, steps=steps, lr=lr)
        return {"amplitudes": found.amplitudes, "train": found.train_mse, "test": found.test_mse}

    made: dict[float, list[dict[str, Any]]] = {
        w0: run.cached_each(f"w0 {w0:g}", range(seeds), partial(one, w0)) for w0 in progress(w0s, "fits")
    }
    spectra = {w0: stacked(fits, "amplitudes") for w0, fits in made.items()}
    ratios = {w0: Estimate.of(s[:, alias] / s[:, frequency]) for w0, s in spectra.items()}
    numbers = {f"alias ratio, w0 = {w0:g}": ratio for w0, ratio in ratios.items()}
    errors = {
        which: {w0: Estimate.of([fit[which] for fit in fits]) for w0, fits in made.items()}
        for which in ("train", "test")
    }
    for w0, s in spectra.items():
        numbers[f"sum of both amplitudes, w0 = {w0:g}"] = Estimate.of(s[:, alias] + s[:, frequency])
        numbers[f"error on the samples, w0 = {w0:g}"] = errors["train"][w0]
        numbers[f"error between them, w0 = {w0:g}"] = errors["test"][w0]
    found = ", ".join(f"{ratio} at w0 = {w0:g}" for w0, ratio in ratios.items())
    return StudyResult(
        measured=f"|F[{alias}]| / |F[{frequency}]| is {found}.",
        numbers=numbers,
        figures=tuple(
            Chart(
                f"spectrum-{w0:g}", f"Spectrum on {2 * samples} points, w0 = {w0:g}", "frequency (Hz)", "amplitude",
                (curve("fitted", range(s.shape[1]), s),),
                alt=f"Amplitudes over frequency: a peak at {frequency} Hz; one at {alias} Hz shows aliasing.",
                caption=f"Fitted on {samples} samples of a tone of {frequency} Hz, shown on twice as many: what lies "
                f"above {samples // 2} Hz the samples cannot tell from a lower frequency. Mean over seeds; band: one "
                "standard error.",
            )
            for w0, s in spectra.items()
        ),
    )  # fmt: skip
