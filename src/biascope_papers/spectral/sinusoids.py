"""Figs 3.1, 3.2, 3.3 and A.1: which frequencies of a sum of sinusoids are learned first, and which survive noise.

A frequency that is learned early has a large amplitude when averaged over training (normalised by its target, capped at
1). In Fig. 3.3 parameters of trained networks are moved by delta in a uniformly random direction; the amplitude at each
k, averaged over directions, is divided by that before the move.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from biascope.spectral import amplitude_spectrum
from biascope.spectral.perturb import perturbation_robustness
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, jackknife_error, mean_of_ranks
from biascope.support import derive, generator, progress
from biascope_papers.spectral.fitting import (
    Fit,
    Measure,
    Training,
    loss_chart,
    norms_of,
    rank_correlation,
    spectrum_map,
    stacked,
    tensors,
    thinned,
)

LEARNED = 0.5  # of the target amplitude: a frequency below it does not count in Fig. 3.3


def wave_targets(
    frequencies: Sequence[int], amplitudes: Sequence[float], n: int, runs: int, seed: int
) -> tuple[Tensor, Tensor]:
    """z = j/n [n] and targets [runs, n]: sum_i A_i sin(2 pi k_i z + phi_i), the phases uniform for each run."""
    z = torch.arange(n, dtype=torch.float64) / n
    draws = torch.rand(runs, len(frequencies), 1, generator=generator(seed, "phases"), dtype=torch.float64)
    k = torch.tensor(list(frequencies), dtype=torch.float64)[:, None]
    a = torch.tensor(list(amplitudes), dtype=torch.float64)[:, None]
    return z, (a * (2 * math.pi * k * z + 2 * math.pi * draws).sin()).sum(1)


@dataclass(frozen=True)
class Waves(Training):
    """Options of the studies in which networks learn a sum of sinusoids."""

    frequencies: Annotated[tuple[int, ...], "k_i, cycles on [0, 1]"] = tuple(range(5, 55, 5))
    samples: Annotated[int, "points of the grid z = j/n"] = 200
    runs: Annotated[int, "networks, each with its own phases"] = 10

    def __str__(self) -> str:
        return f"{self.runs} runs of {super().__str__()}"

    def amplitudes(self, setting: str) -> list[float]:
        """Those of the sinusoids: all 1 if "equal", else growing to 1."""
        m = len(self.frequencies)
        return [1.0] * m if setting == "equal" else [(i + 1) / m for i in range(m)]

    def learn(
        self, run: Run, setting: str = "equal", every: int = 0, measure: Measure | None = None
    ) -> tuple[Fit, Tensor]:
        """Trained networks and their targets [runs, samples]; phases and first networks come from the run's seed."""
        z, y = wave_targets(self.frequencies, self.amplitudes(setting), self.samples, self.runs, run.seed)
        what = f"{setting} amplitudes"
        return self.fit(run, derive(run.seed, "init"), z[:, None], y, every, measure, what=what), y


WAVES = Waves()
HIGHER = Waves(frequencies=tuple(range(10, 55, 5)))
SIZES: dict[str, dict[str, object]] = {
    "smoke": {"frequencies": (2, 4, 6, 8, 10), "width": 64, "depth": 4, "samples": 64, "steps": 400, "runs": 3}
    | {"lr": 1e-3, "every": 20},
    "laptop": {"runs": 3, "steps": 4000},
    "paper": {},
}


@study("spectral/fig3.1", sizes=SIZES)
def fig3_1(
    run: Run, *, waves: Waves = WAVES, every: Annotated[int, "steps between two measurements"] = 100
) -> StudyResult:
    """Which frequencies a ReLU network learns first, with equal and with growing amplitudes."""
    k = torch.tensor(waves.frequencies)
    numbers: dict[str, Estimate] = {}
    figures: list[Chart | HeatMap] = []
    order = []

    def train(setting: str) -> dict[str, Tensor]:
        targets = torch.tensor(waves.amplitudes(setting), device=run.device)

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            spectrum = amplitude_spectrum(out)[:, list(waves.frequencies)] / targets
            return {"spectrum": spectrum, "norms": norms_of(params), "first": out[:1]}

        done, y = waves.learn(run, setting, every, measure)
        return {**done.arrays(), "target": y[:1]}

    for setting in ("equal", "growing"):
        got = tensors(run.cached(setting, partial(train, setting)))
        at, losses, spectrum, norms = (got[name] for name in ("steps", "losses", "spectrum", "norms"))
        early = mean_of_ranks(rank_correlation(k, spectrum.clamp(max=1.0).mean(0)), len(k))
        numbers[f"rank correlation of k with early learning, {setting}"] = early
        order.append(early)
        larger = Estimate.of((norms[-1, :, 1:-1] / norms[0, :, 1:-1]).mean(1))
        numbers[f"growth of hidden spectral norms, {setting}"] = larger
        numbers[f"mean squared error at the end, {setting}"] = Estimate.of(losses[-1])
        numbers |= of_mean_loss(at, losses, setting)
        for i, f in enumerate(waves.frequencies):
            numbers[f"amplitude at k = {f} at the end, {setting}"] = Estimate.of(spectrum[-1, :, i])
        figures += _over_training(setting, waves.frequencies, at, losses, spectrum, norms)
        if setting == "equal":
            figures.append(learned_chart(at, got["first"][:, 0], got["target"][0]))
    return StudyResult(
        measured=f"Rank correlation of frequency with early learning: {order[0]} with equal amplitudes, {order[1]} "
        "with growing ones (-1 = strictly low first).",
        numbers=numbers,
        figures=tuple(figures),
    )


def _over_training(
    setting: str, frequencies: tuple[int, ...], at: Tensor, losses: Tensor, spectrum: Tensor, norms: Tensor
) -> list[Chart | HeatMap]:
    """The heat map of the spectrum over training, the norms beside it, and the loss."""
    rows, of = thinned(len(at), 60), f"{setting} amplitudes"
    layers = tuple(curve(f"layer {i + 1}", at[rows], layer.T) for i, layer in enumerate(norms[rows].unbind(2)))
    return [
        spectrum_map(f"spectrum-{setting}", f"Normalised spectrum over training, {of}", frequencies, at,
                     spectrum.mean(1), "Columns of low frequency fill up before columns of high frequency.", most=60),
        Chart(f"norms-{setting}", f"Spectral norm of each layer, {of}", "step", "spectral norm", layers,
              alt="The norms of the hidden layers grow during training."),
        loss_chart(f"loss-{setting}", f"Mean squared error, {of}", [curve("mean of runs", at[rows], losses[rows].T)],
                   "The loss falls during training."),
    ]  # fmt: skip


def learned_chart(at: Tensor, first: Tensor, target: Tensor, shown: int = 4) -> Chart:
    """Fig. 3.2: the function of the first run at a few moments, over its target."""
    last, z = len(at) - 1, torch.arange(len(target)) / len(target)
    moments = dict.fromkeys(min(last, round(last * 4.0 ** -(shown - 1 - i))) for i in range(shown))
    learned = [Series.of(f"step {int(at[i])}", z, first[i]) for i in moments]
    title = "The learned function and its target (first run, equal amplitudes)"
    return Chart("learned", title, "z", "f(z)", (Series.of("target", z, target, style="dashed"), *learned),
                 alt="Early functions follow only the slow parts of the target, later ones all of it.")  # fmt: skip


def _curves(run: Run, setting: str, waves: Waves, every: int) -> dict[str, Tensor]:
    """The trainings of spectral/fig3.1 (same networks and phases), with the whole curves kept."""

    def train() -> dict[str, Tensor]:
        done, y = waves.learn(run, setting, every, lambda out, _: {"out": out})
        return {**done.arrays(), "target": y.float()}

    return tensors(run.cached(setting, train))


@study("spectral/fig3.2", sizes=SIZES)
def fig3_2(
    run: Run, *, waves: Waves = WAVES, every: Annotated[int, "steps between two measurements"] = 100
) -> StudyResult:
    """Smoothness of the learned curve on the way, and which part of the target it is.

    A moment is intermediate when between a tenth and nine tenths of the loss have gone. The curve is compared with the
    nearest low-pass and high-pass that keep 1, ..., m - 1 sinusoids.
    """
    got = _curves(run, "equal", waves, every)
    at, losses, out, y = (got[name] for name in ("steps", "losses", "out", "target"))
    end = {"mean squared error at the end": Estimate.of(losses[-1])}
    gone = 1 - losses / losses[0]
    between = (gone > 0.1) & (gone < 0.9)  # [r, runs]
    if not bool(between.any(0).all()):
        return StudyResult(
            measured="A run has no intermediate moment: train longer or measure more often.", numbers=end
        )
    rough = roughness(out) / roughness(y)
    low, high = nearest_parts(out, y, waves.frequencies)

    def mean(v: Tensor) -> Estimate:
        return Estimate.of([float(v[between[:, i], i].double().mean()) for i in range(v.shape[1])])

    ratio, near, far = mean(rough), mean(low), mean(high)
    title, ratios = "Mean squared frequency of the learned curve over the target's", curve("mean of runs", at, rough.T)
    alt = "The ratio grows towards 1 during training."
    return StudyResult(
        measured=f"While a tenth to nine tenths of the loss go, the mean squared frequency of the curve is {ratio} of "
        f"the target's; its distance to the best low-pass of the target is {near}, to the best high-pass {far}.",
        numbers={
            "mean squared frequency over the target's, intermediate": ratio,
            "distance to the best low-pass, intermediate": near,
            "distance to the best high-pass, intermediate": far,
            "low-pass minus high-pass, intermediate": mean(low - high),
            **end,
        },
        figures=(learned_chart(at, out[:, 0], y[0]), Chart("smoothness", title, "step", "ratio", (ratios,), alt=alt)),
    )


def roughness(values: Tensor) -> Tensor:
    """Mean squared frequency of curves [..., n], weighted by power; the mean of a curve does not count."""
    power = torch.fft.rfft(values.double()).abs().square()[..., 1:]
    k = torch.arange(1, power.shape[-1] + 1, dtype=torch.float64)
    found: Tensor = (power * k.square()).sum(-1) / power.sum(-1).clamp_min(1e-300)
    return found


def nearest_parts(values: Tensor, target: Tensor, frequencies: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Distances [r, T] (over the norm of the target) of curves [r, T, n] to the nearest low-pass and high-pass of
    the targets [T, n], those that keep 1, ..., m - 1 of the m sinusoids.
    """
    coefficients = torch.fft.rfft(target.double())
    parts = []
    for k in sorted(frequencies):
        kept = torch.zeros_like(coefficients)
        kept[..., k] = coefficients[..., k]
        parts.append(torch.fft.irfft(kept, n=target.shape[-1]))
    sums = torch.stack(parts).cumsum(0)  # [m, T, n]
    norm = target.double().norm(dim=-1)

    def nearest(candidates: Tensor) -> Tensor:
        every = torch.stack([(values.double() - candidate).norm(dim=-1) for candidate in candidates])
        out: Tensor = every.amin(0) / norm
        return out

    return nearest(sums[:-1]), nearest(sums[-1] - sums[:-1])


@study("spectral/figA.1", sizes=SIZES)
def fig_a_1(
    run: Run, *, waves: Waves = WAVES, every: Annotated[int, "steps between two measurements"] = 100
) -> StudyResult:
    """How monotone the loss of the sum of sinusoids is: of the mean over runs, which is published, and of each run."""
    numbers: dict[str, Estimate] = {}
    curves, texts = [], []
    for setting in ("equal", "growing"):
        got = _curves(run, setting, waves, every)
        at, losses = got["steps"], got["losses"]
        numbers |= of_mean_loss(at, losses, setting)
        order, climb = list(numbers.values())[-2:]
        numbers[f"rank correlation of loss and step, {setting}"] = Estimate.of(rank_correlation(at, losses.T))
        curves.append(curve(f"{setting} amplitudes", at, losses.T))
        texts.append(f"{setting} amplitudes: mean loss against step {order} in ranks, largest climb {climb}")
    figure = loss_chart("loss", "Training loss of the sum of sinusoids", curves, "Both losses fall, with small bumps.")
    return StudyResult(measured=f"{'; '.join(texts)}.", numbers=numbers, figures=(figure,))


def of_mean(curves: Tensor, of: Callable[[Tensor], Tensor]) -> Estimate:
    """A property of the mean of curves [r, T], its error by leaving one curve out at a time."""
    n, total = curves.shape[1], curves.sum(1, keepdim=True)
    whole = float(of(total / n))
    if n < 2:
        return Estimate(whole, None, n)
    left_out = [float(of((total - curves[:, i : i + 1]) / (n - 1))) for i in range(n)]
    return Estimate(whole, jackknife_error(left_out), n)


def of_mean_loss(at: Tensor, losses: Tensor, setting: str) -> dict[str, Estimate]:
    """How monotone the mean of losses [r, T] over the runs is, which Fig. A.1 shows."""
    return {
        f"rank correlation of the mean loss and step, {setting}": of_mean(losses, lambda v: rank_correlation(at, v.T)),
        f"largest climb of the mean loss over the first, {setting}": of_mean(losses, climbs),
    }


def climbs(losses: Tensor) -> Tensor:
    """The largest rise of losses [r, T] above an earlier value, over the first value, for each run [T]."""
    return (losses - losses.cummin(0).values).amax(0) / losses[0]


@study(
    "spectral/fig3.3",
    sizes={
        "smoke": {"frequencies": (1, 2, 3, 4, 5), "width": 64, "depth": 4, "samples": 64, "steps": 700, "runs": 3,
                  "lr": 2e-3, "draws": 10, "deltas": 6, "largest": 3.0},
        "laptop": {"frequencies": (2, 4, 6, 8, 10, 12, 14, 16), "samples": 100, "runs": 4, "steps": 2500, "draws": 40,
                   "deltas": 13, "lr": 1e-3},
        "paper": {},
    },
)  # fmt: skip
def fig3_3(
    run: Run,
    *,
    waves: Waves = HIGHER,
    draws: Annotated[int, "random directions for each network"] = 100,
    deltas: Annotated[int, "lengths of the step, from 0 to `largest`"] = 51,
    largest: Annotated[float, "longest step (not given in the text)"] = 5.0,
) -> StudyResult:
    """Which frequencies survive noise in the parameters.

    Frequencies of which a network holds at least half the target amplitude count, in networks with three of them.
    """
    frequencies, runs = waves.frequencies, waves.runs

    def train() -> dict[str, Tensor]:
        done, _ = waves.learn(run)
        return {"loss": done.losses[-1], **done.networks.params}

    trained = tensors(run.cached("trained", train))
    loss = trained.pop("loss")
    template = waves.draw(run, 1, 1, 0)
    grid = [largest * i / (deltas - 1) for i in range(deltas)]

    def robustness(i: int) -> dict[str, Tensor]:
        net = template.module(0)
        net.load_state_dict({name: value[i] for name, value in trained.items()})
        x = (torch.arange(waves.samples) / waves.samples)[:, None].to(run.device)
        with torch.no_grad():
            held = amplitude_spectrum(net(x)[:, 0])[list(frequencies)]
        found = perturbation_robustness(net, x, frequencies, grid, draws, seed=derive(run.seed, "noise", i))
        return {"held": held, "left": found.mean, "error": found.standard_error}

    parts = run.cached_each("network", progress(range(runs), "perturbing"), robustness)
    held, left = stacked(parts, "held") >= LEARNED, stacked(parts, "left")  # [runs, m], [runs, deltas, m]
    middle = deltas // 2
    numbers = {"mean squared error after training": Estimate.of(loss)} | {
        f"amplitude left at k = {f}, delta = {grid[middle]:.3g}": Estimate.of(left[:, middle, i])
        for i, f in enumerate(frequencies)
    }
    k, mean_left = torch.tensor(frequencies), left[:, 1:].mean(1)
    found = [rank_correlation(k[held[i]], mean_left[i, held[i]]) for i in range(runs) if int(held[i].sum()) >= 3]
    if not found:
        return StudyResult(measured="No network learned three frequencies; train longer.", numbers=numbers)
    correlation = Estimate.of(found)
    ratio = "amplitude over that before"
    return StudyResult(
        measured=f"Rank correlation of frequency with the amplitude left after noise: {correlation}; "
        f"{float(held.double().mean()):.0%} of the frequencies were learned.",
        numbers={"rank correlation of k with the amplitude left": correlation, **numbers},
        figures=(
            HeatMap.of("robustness", "Amplitude left after a random step in parameter space", x=frequencies, y=grid,
                       z=left.mean(0).clamp(0, 1).tolist(), x_label="frequency", y_label="length of the step",
                       z_label=ratio, low=0.0, high=1.0,
                       alt="The amplitude falls with the step, and sooner at high frequencies."),
            Chart("curves", "Amplitude left, by frequency", "length of the step", ratio,
                  tuple(curve(f"k = {f}", grid, left[:, :, i]) for i, f in enumerate(frequencies)),
                  alt="Curves of higher frequency fall faster."),
        ),
    )  # fmt: skip
