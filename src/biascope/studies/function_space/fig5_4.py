"""Fig. 5.4: a tone of 23 Hz fitted on 128 samples by SIRENs with a low and a high first frequency w0.

On the samples 23 Hz and its alias, 128 - 23 = 105 Hz, are the same; on twice as many points they are not. Phases of the
tone are random. An exact fit with nothing but these two has amplitudes that add up to 1.

Verdict: confirmed if the alias ratio |F[105]| / |F[23]| lies above 0.05 at the largest w0, and below 0.05 at the
smallest, by two standard errors over seeds. A w0 whose mean squared error on the samples stays above 1e-2 has not
fitted the tone: then nothing is tested. w0 between them are numbers, not part of the rule.
"""

from functools import partial
from typing import Annotated

import torch

from biascope import nets
from biascope.fields import alias_test
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, below, curve, decide
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "Fitting a 23 Hz tone on 128 samples aliases to 105 Hz only with w0 = 300."
BAR, FITTED = 0.05, 1e-2


@study(
    "fields/fig5.4",
    paper="function-space",
    figure="5.4",
    claim=CLAIM,
    sizes={
        "smoke": {"w0s": (30.0, 300.0), "width": 64, "steps": 150, "lr": 1e-3, "seeds": 3},
        "laptop": {},
        "paper": {},
    },
)
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
    w0s = tuple(sorted(w0s))

    def one(w0: float, seed: int) -> dict[str, Value]:
        phase = 2 * torch.pi * float(torch.rand((), generator=generator(run.seed, "phase", seed)))
        hidden = (width, width)
        net = nets.build("siren", seed=derive(run.seed, "init", seed), in_features=1, hidden=hidden, w0=w0)
        found = alias_test(net.to(run.device), frequency, samples, phase=phase, steps=steps, lr=lr)
        return {"amplitudes": found.amplitudes, "train": found.train_mse, "test": found.test_mse}

    jobs = [(w0, seed) for w0 in w0s for seed in range(seeds)]
    made = {job: run.cached(f"w0 {job[0]:g} {job[1]}", partial(one, *job)) for job in progress(jobs, "fits")}
    alias = samples - frequency
    spectra = {w0: torch.stack([torch.as_tensor(made[w0, seed]["amplitudes"]) for seed in range(seeds)]) for w0 in w0s}
    ratios = {w0: Estimate.of(s[:, alias] / s[:, frequency]) for w0, s in spectra.items()}
    numbers = {f"alias ratio, w0 = {w0:g}": ratio for w0, ratio in ratios.items()}
    errors: dict[tuple[str, float], Estimate] = {}
    for w0 in w0s:
        for which in ("train", "test"):
            errors[which, w0] = Estimate.of([float(made[w0, seed][which]) for seed in range(seeds)])  # type: ignore[arg-type]
        sums = (spectra[w0][:, alias] + spectra[w0][:, frequency]).tolist()
        numbers[f"sum of both amplitudes, w0 = {w0:g}"] = Estimate.of(sums)
        numbers[f"error on the samples, w0 = {w0:g}"] = errors["train", w0]
        numbers[f"error between them, w0 = {w0:g}"] = errors["test", w0]
    low, high = ratios[w0s[0]], ratios[w0s[-1]]
    fitted = all(errors["train", w0].value < FITTED for w0 in w0s)
    said = ", ".join(f"{ratio} at w0 = {w0:g}" for w0, ratio in ratios.items())
    listed = {which: ", ".join(f"{errors[which, w0].value:.1e}" for w0 in w0s) for which in ("train", "test")}
    return StudyResult(
        decide(below(low, BAR) and above(high, BAR), [low, high]) if fitted and len(w0s) > 1 else "not tested",
        CLAIM,
        f"|F[{alias}]| / |F[{frequency}]| is {said}. {'All fit the samples' if fitted else 'Not all fit the samples'}: "
        f"mean squared errors {listed['train']} there and {listed['test']} on twice as many points; {steps} steps, "
        f"errors over {seeds} seeds.",
        numbers,
        tuple(
            Chart(
                f"spectrum-{w0:g}",
                f"Spectrum on {2 * samples} points, w0 = {w0:g}",
                "frequency (Hz)",
                "amplitude",
                (curve("fitted", range(spectra[w0].shape[1]), spectra[w0]),),
                alt=f"Amplitudes over frequency: a peak at {frequency} Hz; one at {alias} Hz shows aliasing.",
                caption=f"Fitted on {samples} samples of a tone of {frequency} Hz, shown on twice as many: what lies "
                f"above {samples // 2} Hz the samples cannot tell from a lower frequency. Mean over seeds; band: one "
                "standard error.",
            )
            for w0 in w0s
        ),
    )
