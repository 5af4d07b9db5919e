"""Figs A.5 to A.9: which networks fit a delta, whose spectrum is flat: ablations of depth, width and weight clip."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.ensembles import Networks
from biascope.spectral import amplitude_spectrum
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import mean_of_ranks
from biascope.support import derive
from biascope_papers.spectral.fitting import draw_mlps, fit, rank_correlation, spectrum_map, tensors


@study(
    "spectral/figA.6",
    sizes={
        "smoke": {"depths": (3, 5), "widths": (16, 32), "clips": (0.1, 2.0), "samples": 40, "steps": 300, "seeds": 3,
                  "lr": 3e-3, "clip_width": 32, "clip_depth": 4},
        "laptop": {"steps": 10_000, "seeds": 4, "every": 250},
        "paper": {},
    },
)  # fmt: skip
def fig_a_6(
    run: Run,
    *,
    depths: Annotated[tuple[int, ...], "Linear layers, at the first of `widths`"] = (3, 4, 5, 6),
    widths: Annotated[tuple[int, ...], "units in a hidden layer, at the first of `depths`"] = (16, 32, 64, 128),
    clips: Annotated[tuple[float, ...], "bounds on every parameter"] = (0.1, 0.15, 0.2, 2.0),
    clip: Annotated[float, "the bound while depth and width vary"] = 10.0,
    clip_depth: Annotated[int, "depth while the clip varies"] = 6,
    clip_width: Annotated[int, "width while the clip varies"] = 64,
    samples: Annotated[int, "points of the grid x = j/n"] = 200,
    steps: Annotated[int, "full-batch Adam steps"] = 60_000,
    seeds: Annotated[int, "initial networks"] = 10,
    lr: Annotated[float, "of Adam"] = 3e-4,
    every: Annotated[int, "steps between two measurements"] = 500,
    precision: Annotated[Literal["float32", "tf32"], "of products on a GPU"] = "float32",
) -> StudyResult:
    """Fitting a delta with networks of different depth, width and weight clip.

    What counts is learned of the target at the upper half of the frequencies (|f~| over 1/n, capped at 1) at the end.
    """
    x = torch.arange(samples, dtype=torch.float64)[:, None] / samples
    delta = (torch.arange(samples) == samples // 2).double()
    half = samples // 2

    def train(depth: int, width: int, bounds: tuple[float, ...]) -> dict[str, Tensor]:
        """One initial network per seed, trained under every bound: [r, bounds, seeds, ...]."""
        drawn = draw_mlps(seeds, 1, depth, width, derive(run.seed, "init", depth, width), run.device)
        params = {name: p.repeat(len(bounds), *[1] * (p.dim() - 1)) for name, p in drawn.params.items()}
        limit = torch.tensor(bounds).repeat_interleave(seeds)

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"spectrum": amplitude_spectrum(out, "raw")[:, 1 : half + 1] * samples, "f": out[::seeds]}

        done = fit(Networks(drawn.template, params, {}), x, delta.expand(len(limit), -1), steps=steps, lr=lr,
                   every=every, measure=measure, clip=limit, precision=precision,
                   what=f"depth {depth}, width {width}")  # fmt: skip
        shape = (len(done.steps), len(bounds), seeds)
        return {"steps": done.steps, "spectrum": done.records["spectrum"].reshape(*shape, half),
                "losses": done.losses.reshape(shape), "f": done.records["f"]}  # fmt: skip

    def trained(depth: int, width: int, bounds: tuple[float, ...] = (clip,)) -> dict[str, Tensor]:
        key = f"depth {depth} width {width}" + ("" if bounds == (clip,) else " clips")
        return tensors(run.cached(key, lambda: train(depth, width, bounds)))

    clipped = trained(clip_depth, clip_width, tuple(clips))
    spectra = {
        "depth": torch.stack([trained(d, widths[0])["spectrum"][:, 0] for d in depths], 1),
        "width": torch.stack([trained(depths[0], w)["spectrum"][:, 0] for w in widths], 1),
        "clip": clipped["spectrum"],
    }  # [r, values, seeds, frequencies]
    values = {"depth": depths, "width": widths, "clip": clips}
    learned = {name: s[-1, :, :, half // 2 :].clamp(max=1).mean(-1) for name, s in spectra.items()}  # [values, seeds]
    numbers = {
        f"rank correlation of {name} with high frequencies learned": mean_of_ranks(
            rank_correlation(torch.tensor(values[name], dtype=torch.float64), learned[name].T), len(values[name])
        )
        for name in ("depth", "clip", "width")
    }
    gain = {name: learned[name][-1] - learned[name][0] for name in ("depth", "width")}
    numbers["gain by depth over gain by width"] = Estimate.of(gain["depth"] - gain["width"])
    by_depth, by_clip, _, over = numbers.values()
    figures = []
    for name, options in values.items():
        for i, v in enumerate(options):
            at = f"{name} {v:g}"
            numbers[f"high frequencies learned, {at}"] = Estimate.of(learned[name][i])
            spectrum, alt = spectra[name][:, i].mean(1) / samples, f"How far the flat spectrum is filled at {at}."
            title, file = f"Spectrum over training, {at}", at.replace(" ", "-")
            k = range(1, half + 1)
            figures.append(spectrum_map(file, title, k, clipped["steps"], spectrum, alt, high=1 / samples, most=40))
    predictions = tuple(Series.of(f"clip {c:g}", x[:, 0], clipped["f"][-1, i]) for i, c in enumerate(clips))
    title = "Prediction at the end for each weight clip (first seed)"
    alt = "A peak in the middle for a large clip, flat lines for small ones."
    return StudyResult(
        measured=f"Rank correlation with the high frequencies learned: depth {by_depth}, clip {by_clip}; the gain by "
        f"depth exceeds that by width by {over}. {seeds} seeds of {steps} steps.",
        numbers=numbers,
        figures=(*figures, Chart("prediction", title, "x", "f(x)", predictions, alt=alt)),
    )
