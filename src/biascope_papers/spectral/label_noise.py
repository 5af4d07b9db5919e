"""Figs 3.4, 3.5, A.2 and A.4: on two classes of MNIST, noise of high frequency in the labels is fitted late.

Fig. 3.4: the target is tau_0 + beta sin(2 pi k |x|) (the text writes sin(k |x|), no wave over the data; the published
code has the 2 pi); validation on the clean tau_0 of held-out images. Fig. 3.5: tau_0 + beta sum_n (n/N)^gamma phi_n
with eigenvectors of a Gaussian kernel, largest eigenvalue first; in a band of them the learned share is <f, tau> /
<tau, tau>.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from biascope import InputError
from biascope import data as sets
from biascope.ensembles import Networks
from biascope.spectral import rbf_eigenbasis
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator
from biascope_papers.spectral.fitting import Training, forward, loss_chart, stacked, tensors

TRAINING = Training(steps=5000)


def two_classes(
    run: Run, name: str, classes: Sequence[int], n: int, seed: int, share: float = 0.8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [n, d] in [0, 1] and y in {0, 1} of two classes, `share` of them for training: x, y, x_val, y_val.

    n = 0 takes all there are.
    """
    if len(classes) != 2:
        raise InputError(f"give two classes, got {tuple(classes)}")
    found = sets.load(name, "train")
    chosen = ((found.y == classes[0]) | (found.y == classes[1])).nonzero()[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=generator(seed, "split"))][: n or None]
    x = found.x[chosen].flatten(1).to(run.device)
    y = (found.y[chosen] == classes[1]).float().to(run.device)
    cut = round(share * len(x))
    return x[:cut], y[:cut], x[cut:], y[cut:]


def stand_in(name: str) -> str:
    """What to add to `measured` when the data are not those of the paper."""
    return {"mnist": "", "digits": " 8x8 digits stand in for MNIST."}.get(name, f" {name} stands in for MNIST.")


@study(
    "spectral/fig3.4",
    sizes={
        "smoke": {"data": "digits", "n": 200, "width": 64, "depth": 4, "k": (0.1, 2.0), "beta": (0.5, 2.0),
                  "steps": 200, "seeds": 3, "lr": 1e-3, "every": 10},
        "laptop": {"width": 128, "n": 750, "k": (0.05, 0.2, 1.0), "beta": (0.5, 2.0), "steps": 800, "seeds": 3,
                   "every": 20},
        "paper": {"precision": "tf32"},
    },
)  # fmt: skip
def fig3_4(
    run: Run,
    *,
    data: Annotated[str, "image set: mnist, fashion-mnist or digits"] = "mnist",
    classes: Annotated[tuple[int, ...], "the two classes (not given in the text)"] = (3, 8),
    n: Annotated[int, "images in all, 0 for every one"] = 0,
    k: Annotated[tuple[float, ...], "frequencies of the noise, cycles per unit of |x|"] = (0.05, 0.1, 0.2, 0.5, 1.0),
    beta: Annotated[tuple[float, ...], "amplitudes of the noise"] = (0.5, 1.0, 1.5, 2.0),
    cycles: Annotated[bool, "sin(2 pi k |x|); false: sin(k |x|), as the text prints"] = True,
    every: Annotated[int, "steps between two measurements"] = 50,
    seeds: Annotated[int, "splits and initial networks"] = 5,
    training: Training = TRAINING,
) -> StudyResult:
    """Label noise of low and high frequency on two classes of images."""
    pairs = [(kk, b) for kk in k for b in beta]

    def train(seed: int) -> dict[str, Tensor]:
        x, y, x_val, y_val = two_classes(run, data, classes, n, derive(run.seed, seed))
        targets = torch.stack([y + b * radial_wave(x, kk, cycles) for kk, b in pairs])
        one = training.draw(run, 1, x.shape[1], derive(run.seed, "init", seed))
        same = {name: p.expand(len(pairs), *p.shape[1:]) for name, p in one.params.items()}  # under every noise

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"validation": (forward(params, x_val) - y_val).square().mean(1)}

        return training.fit(run, Networks(one.template, same, {}), x, targets, every, measure).arrays("train")

    parts = run.cached_each("seed", range(seeds), train)
    at = torch.as_tensor(parts[0]["steps"])
    shape = (seeds, len(at), len(k), len(beta))
    validation, fitted = (stacked(parts, name).reshape(shape) for name in ("validation", "train"))
    best, last = validation.amin(1), validation[:, -1]  # [seeds, k, beta]
    low, high = k.index(min(k)), k.index(max(k))
    weak, strong = beta.index(min(beta)), beta.index(max(beta))
    rise = best[:, :, strong] - best[:, :, weak]
    dip = (last - best)[:, :, strong]
    more, deep, deeper = (
        Estimate.of(v) for v in (rise[:, low] - rise[:, high], dip[:, high], dip[:, high] - dip[:, low])
    )
    numbers = {
        f"rise of the best validation loss with beta, k = {k[low]:g} over k = {k[high]:g}": more,
        f"dip at k = {k[high]:g}, beta = {beta[strong]:g}": deep,
        f"dip at k = {k[high]:g} over that at k = {k[low]:g}": deeper,
    }
    for i, kk in enumerate(k):
        numbers[f"rise of the best validation loss with beta, k = {kk:g}"] = Estimate.of(rise[:, i])
        if i != low:
            share = Estimate.of(rise[:, i] / rise[:, low])
            numbers[f"share of the rise at k = {k[low]:g} that is there at k = {kk:g}"] = share
        for j, b in enumerate(beta):
            numbers[f"best validation loss, k = {kk:g}, beta = {b:g}"] = Estimate.of(best[:, i, j])
            numbers[f"last validation loss, k = {kk:g}, beta = {b:g}"] = Estimate.of(last[:, i, j])
    return StudyResult(
        measured=f"From beta = {beta[weak]:g} to {beta[strong]:g} the best validation loss rises more at low than at "
        f"high k by {more}; the dip at high k is {deep}, larger than at low k by {deeper}.{stand_in(data)}",
        numbers=numbers,
        figures=(
            *(_panel("validation", validation[:, :, i], at, f"k = {k[i]:g}", beta, "beta") for i in (low, high)),
            *(_panel("validation", validation[..., j], at, f"beta = {beta[j]:g}", k, "k") for j in (weak, strong)),
            *(_panel("training", fitted[:, :, i], at, f"k = {k[i]:g}", beta, "beta") for i in (low, high)),
        ),
    )


def radial_wave(x: Tensor, k: float, cycles: bool = True) -> Tensor:
    """sin(2 pi k |x|) of inputs [n, d], or sin(k |x|)."""
    wave: Tensor = ((2 * math.pi if cycles else 1.0) * k * x.norm(dim=1)).sin()
    return wave


def _panel(what: str, losses: Tensor, at: Tensor, fixed: str, values: tuple[float, ...], name: str) -> Chart:
    """Loss curves [seeds, r, values] of one panel."""
    file = f"{what} {fixed}".replace(" ", "-").replace("=", "").replace("--", "-")
    series = [curve(f"{name} = {v:g}", at, losses[:, :, i]) for i, v in enumerate(values)]
    return loss_chart(file, f"{what.capitalize()} loss, {fixed}", series, f"One {what} curve for each {name}.")


@study(
    "spectral/fig3.5",
    sizes={
        "smoke": {"data": "digits", "n": 200, "width": 128, "depth": 4, "steps": 200, "every": 10, "runs": 3,
                  "lr": 1e-3},
        "laptop": {"n": 500, "steps": 1000, "every": 20, "runs": 3},
        "paper": {"precision": "tf32"},
    },
)  # fmt: skip
def fig3_5(
    run: Run,
    *,
    data: Annotated[str, "image set: mnist, fashion-mnist or digits"] = "mnist",
    classes: Annotated[tuple[int, ...], "the two classes (not given in the text)"] = (3, 8),
    n: Annotated[int, "images"] = 2000,
    gamma: Annotated[float, "exponent of the noise"] = 2.0,
    beta: Annotated[float, "amplitude of the noise (not given in the text)"] = 1.0,
    kernel_width: Annotated[float, "sigma of the kernel over the median distance (not given)"] = 0.5,
    every: Annotated[int, "steps between two measurements"] = 20,
    runs: Annotated[int, "initial networks"] = 10,
    training: Training = TRAINING,
) -> StudyResult:
    """The spectrum of a network in a kernel's eigenbasis while it fits noisy labels."""
    x, clean, _, _ = two_classes(run, data, classes, n, run.seed, share=1.0)
    basis = rbf_eigenbasis(x.cpu(), kernel_width * float(torch.pdist(x.cpu().double()[:1000]).median()))
    noisy = clean.cpu().double() + beta * basis.noise(gamma)

    def train() -> dict[str, Tensor]:
        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"validation": (out - clean).square().mean(1), "f": out}

        target = noisy.float().expand(runs, -1)
        return training.fit(run, derive(run.seed, "init"), x, target, every, measure).arrays("train")

    got = tensors(run.cached("trained", train))
    at, fitted, validation = got["steps"], got["train"], got["validation"]
    spectra = basis.spectrum(got["f"])  # [r, runs, n]
    tau, tau_0 = basis.spectrum(noisy), basis.spectrum(clean.cpu())
    count = len(noisy)
    low, high = slice(0, max(1, count // 10)), slice(count // 2, None)

    def share(moment: Tensor, band: slice) -> Tensor:
        """Of each run, at its own moment [runs]."""
        own = spectra[moment, torch.arange(runs)]
        return (own[:, band] * tau[band]).sum(1) / tau[band].square().sum()

    best = validation.argmin(0)
    end = torch.full_like(best, len(at) - 1)
    early_low, early_high, late_high = share(best, low), share(best, high), share(end, high)
    numbers = {
        "dip of the validation loss": Estimate.of(validation[-1] - validation.amin(0)),
        "at the dip, learned share of low over high eigenvectors": Estimate.of(early_low - early_high),
        "high eigenvectors learned after the dip": Estimate.of(late_high - early_high),
        "step of the dip": Estimate.of(at[best].double()),
        "learned share of the first tenth at the dip": Estimate.of(early_low),
        "learned share of the last half at the dip": Estimate.of(early_high),
        "learned share of the last half at the end": Estimate.of(late_high),
        "best validation loss": Estimate.of(validation.amin(0)),
        "last validation loss": Estimate.of(validation[-1]),
    }
    moments = sorted({0, int(best.double().mean().round()), (len(at) - 1) // 2, len(at) - 1})
    return StudyResult(
        measured=f"The validation loss is least at step {numbers['step of the dip']}, where {early_low.mean():.0%} of "
        f"the target is learned in the first tenth of the eigenvectors and {early_high.mean():.0%} in the last half "
        f"({late_high.mean():.0%} at the end).{stand_in(data)}",
        numbers=numbers,
        figures=(
            _spectra(tau, tau_0, {f"step {int(at[i])}": spectra[i].mean(0) for i in moments}),
            loss_chart("losses", "Training and validation loss",
                       [curve("training", at, fitted.T), curve("validation, clean target", at, validation.T)],
                       "The validation loss dips early and rises again while the training loss falls."),
        ),
    )  # fmt: skip


def _spectra(noisy: Tensor, clean: Tensor, learned: dict[str, Tensor]) -> Chart:
    count = len(noisy)
    bins = min(50, count)
    middle = [(i + 0.5) * count / bins for i in range(bins)]
    targets = {"noisy target": noisy, "true target": clean}
    dashed = (Series.of(name, middle, binned(values, bins), style="dashed") for name, values in targets.items())
    series = (*dashed, *(Series.of(name, middle, binned(values, bins)) for name, values in learned.items()))
    return Chart("spectrum", "Spectrum in the kernel's eigenbasis", "eigenvector n", "mean size of f~[n]", series,
                 log_y=True, alt="The network's spectrum first follows the true target, then the noisy.")  # fmt: skip


def binned(values: Tensor, bins: int) -> list[float]:
    """Mean of |values| [n] in equal ranges of the index."""
    return [float(part.abs().mean()) for part in torch.tensor_split(values, bins)]
