"""Figs 3.5 and A.4: on MNIST the clean target is fitted before the high-frequency noise (by kernel eigenvectors).

Target tau_0 + beta psi, psi = sum_n (n/N)^gamma phi_n with phi_n the eigenvectors of a Gaussian kernel on the images,
largest eigenvalue first. Validation: the same images with the clean target.

Verdict rule, over runs. In a band of eigenvectors the learned share is <f, tau> / <tau, tau> there. "Confirmed" if by
two standard errors: the validation loss dips (last above best); at the dip the share is larger in the first tenth of
the eigenvectors than in the last half; and in the last half it is larger at the end than at the dip.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.seeds import derive
from biascope.spectral import rbf_eigenbasis
from biascope.studies.estimates import above, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import draw_mlps, fit
from biascope.studies.spectral.images import said, two_classes

CLAIM = (
    "The network fits the true target before the high-frequency noise; the validation score dips exactly when the "
    "higher frequencies of the noise are not learned yet."
)


@study(
    "spectral/fig3.5",
    paper="alignment",
    figure="3.5",
    claim=CLAIM,
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
    depth: Annotated[int, "Linear layers"] = 6,
    width: Annotated[int, "units in a hidden layer"] = 256,
    steps: Annotated[int, "full-batch Adam steps"] = 5000,
    lr: Annotated[float, "of Adam"] = 3e-4,
    every: Annotated[int, "steps between two measurements"] = 20,
    runs: Annotated[int, "initial networks"] = 10,
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32",
) -> StudyResult:
    """The spectrum of a network in a kernel's eigenbasis while it fits noisy labels."""
    x, clean, _, _ = two_classes(run, data, classes, n, run.seed, share=1.0)
    basis = rbf_eigenbasis(x.cpu(), kernel_width * float(torch.pdist(x.cpu().double()[:1000]).median()))
    noisy = clean.cpu().double() + beta * basis.noise(gamma)

    def train() -> dict[str, Value]:
        networks = draw_mlps(runs, x.shape[1], depth, width, derive(run.seed, "init"), run.device)

        def measure(out: Tensor, params: list[Tensor]) -> dict[str, Tensor]:
            return {"validation": (out - clean).square().mean(1), "f": out}

        target = noisy.float().expand(runs, -1)
        done = fit(networks, x, target, steps=steps, lr=lr, every=every, measure=measure, precision=precision)
        return {"steps": done.steps, "train": done.losses, **done.records}

    got = run.cached("trained", train)
    at, training, validation, f = (torch.as_tensor(got[name]) for name in ("steps", "train", "validation", "f"))
    spectra = basis.spectrum(f)  # [r, runs, n]
    tau, tau_0 = basis.spectrum(noisy), basis.spectrum(clean.cpu())
    count = len(noisy)
    low, high = slice(0, max(1, count // 10)), slice(count // 2, None)

    def share(moment: Tensor, band: slice) -> list[float]:
        """Of each run, at its own moment [runs]."""
        own = spectra[moment, torch.arange(runs)]
        return ((own[:, band] * tau[band]).sum(1) / tau[band].square().sum()).tolist()

    best = validation.argmin(0)
    end = torch.full_like(best, len(at) - 1)
    dips = (validation[-1] - validation.amin(0)).tolist()
    early_low, early_high, late_high = share(best, low), share(best, high), share(end, high)
    numbers = {
        "dip of the validation loss": Estimate.of(dips),
        "at the dip, learned share of low over high eigenvectors": Estimate.of(
            [a - b for a, b in zip(early_low, early_high)]
        ),
        "high eigenvectors learned after the dip": Estimate.of([a - b for a, b in zip(late_high, early_high)]),
        "step of the dip": Estimate.of(at[best].double()),
        "learned share of the first tenth at the dip": Estimate.of(early_low),
        "learned share of the last half at the dip": Estimate.of(early_high),
        "learned share of the last half at the end": Estimate.of(late_high),
        "best validation loss": Estimate.of(validation.amin(0)),
        "last validation loss": Estimate.of(validation[-1]),
    }
    decide = list(numbers.values())[:3]
    moments = sorted({0, int(best.double().mean().round()), (len(at) - 1) // 2, len(at) - 1})
    return StudyResult(
        verdict="confirmed" if all(above(number, 0.0) for number in decide) else "not confirmed",
        claim=CLAIM,
        measured=f"The validation loss is least at step {numbers['step of the dip']}, where "
        f"{numbers['learned share of the first tenth at the dip'].value:.0%} of the target is learned in the first "
        f"tenth of the eigenvectors and {numbers['learned share of the last half at the dip'].value:.0%} in the last "
        f"half "
        f"({numbers['learned share of the last half at the end'].value:.0%} at the end). Kernel width "
        f"{basis.width:.3g}, {count} images, {runs} runs of {steps} steps.{said(data)}",
        numbers=numbers,
        figures=(
            _spectra(tau, tau_0, {f"step {int(at[i])}": spectra[i].mean(0) for i in moments}),
            Chart(
                "losses",
                "Training and validation loss",
                "step",
                "mean squared error",
                (
                    curve("training", at, training.T),
                    curve("validation, clean target", at, validation.T),
                ),
                alt="The validation loss dips early and rises again while the training loss falls.",
                log_y=True,
            ),
        ),
    )


def _spectra(noisy: Tensor, clean: Tensor, learned: dict[str, Tensor]) -> Chart:
    count = len(noisy)
    bins = min(50, count)
    middle = [(i + 0.5) * count / bins for i in range(bins)]
    return Chart(
        "spectrum",
        "Spectrum in the kernel's eigenbasis",
        "eigenvector n",
        "mean size of f~[n]",
        (
            Series.of("noisy target", middle, binned(noisy, bins), style="dashed"),
            Series.of("true target", middle, binned(clean, bins), style="dashed"),
            *(Series.of(label, middle, binned(values, bins)) for label, values in learned.items()),
        ),
        alt="The network's spectrum first follows the true target, then the noisy one.",
        log_y=True,
    )


def binned(values: Tensor, bins: int) -> list[float]:
    """Mean of |values| [n] in equal ranges of the index.

    Example:
        >>> binned(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2)
        [2.0, 1.0]
    """
    return [float(part.abs().mean()) for part in torch.tensor_split(values, bins)]
