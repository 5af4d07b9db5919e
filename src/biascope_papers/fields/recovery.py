"""Fig. 5.3 and C.1: images recovered by networks with a fixed first layer of sines, and what they cannot represent.

With one frequency f0 per coordinate, a network on [-1, 1)^2 repeats itself after 1 / f0. For f0 = 1 all DFT bins with
an odd index are empty whatever the weights, and the mean of the four half-shifted images bounds every training. Grids
leave the end point out. As published: one photograph in colour (scikit-image's astronaut), errors over weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import nets
from biascope.fields import coordinates, fit, frozen_siren, recovery_bound, single_frequency
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import through
from biascope.studies.pictures import picture
from biascope.support import derive, generator, progress
from biascope_papers.fields.setting import colour_images, grey_images, title_of
from biascope_papers.ntk.initial import Init, redraw


@dataclass(frozen=True)
class Recovering:
    """Images and how they are fitted."""

    images: Annotated[str, "ellipses (drawn), or a set of `biascope data get`; astronaut: in colour"] = "chest-xray"
    side: Annotated[int, "pixels along each axis (512 in the paper)"] = 224
    n: Annotated[int, "images (one in the paper)"] = 5
    starts: Annotated[int, "initial weights for each image"] = 1
    init: Init = "torch"
    width: Annotated[int, "units of the three hidden layers"] = 256
    features: Annotated[int, "sines of the network with many frequencies"] = 256
    steps: Annotated[int, "full-batch steps of Adam"] = 2000
    lr: Annotated[float, "learning rate"] = 1e-4


RECOVERING = Recovering()
CAPTION = (
    "An image, the best that f0 = 1 allows, and the three fits; below each, its Fourier amplitudes at low frequencies "
    "(logarithmic, frequency 0 in the middle)."
)
SMOKE: dict[str, Any] = {"images": "ellipses", "side": 16, "n": 3, "width": 32, "features": 32, "init": "lecun"}
SMOKE |= {"steps": 100, "lr": 3e-3}
LAPTOP = {"side": 56, "n": 3, "width": 96, "features": 128, "steps": 400, "lr": 1e-3, "init": "lecun"}
PAPER = {"images": "astronaut", "side": 512, "n": 1, "starts": 3, "init": "lecun"}

Build = Callable[[int, int], nn.Module]  # seed, outputs -> network


@study("fields/fig5.3", sizes={"smoke": SMOKE, "laptop": LAPTOP, "paper": PAPER})
def fig5_3(run: Run, *, options: Recovering = RECOVERING) -> StudyResult:
    """Ghosts, blur and a sharp image from Fourier feature networks with one frequency, f0 = 1 or 0.5, and with many."""
    hidden = (options.width,) * 3

    def many(seed: int, outputs: int) -> nn.Module:
        seed = derive(seed, "field")
        return nets.build("ffn", seed=seed, hidden=hidden, mapping_size=options.features, sigma=10.0, outputs=outputs)

    def single(f0: float, seed: int, outputs: int) -> nn.Module:
        return single_frequency(f0, hidden=hidden, outputs=outputs, seed=seed)

    return recover(run, options, single, "sigma = 10", many)


@study(
    "fields/figC.1",
    sizes={"smoke": SMOKE | {"steps": 60, "lr": 1e-3}, "laptop": LAPTOP | {"steps": 250, "lr": 3e-4}, "paper": PAPER},
)
def figC_1(
    run: Run,
    *,
    options: Recovering = RECOVERING,
    phases: Annotated[int, "sines per coordinate where there is one frequency"] = 8,
    w0: Annotated[float, "of the SIREN whose frequencies are the many"] = 30.0,
) -> StudyResult:
    """Ghosts, blur and a sharp image from SIRENs whose first layer is not trained.

    The paper's w0 = 1 with W0 = I or I / 2 has period 2 pi or 4 pi, not 1 or 2; here the first layer has f0 = 1 and 0.5
    cycles per unit, each with `phases` phases, as one sine cannot tell a point from its mirror image.
    """
    frozen = partial(frozen_siren, hidden=(options.width,) * 3, output_offset=0.5)

    def many(seed: int, outputs: int) -> nn.Module:
        weights = torch.rand(options.features, 2, generator=generator(seed, "W0")) - 0.5  # U(-1/d, 1/d), d = 2
        return frozen(w0 / (2 * math.pi) * weights, seed=seed, outputs=outputs)

    def single(f0: float, seed: int, outputs: int) -> nn.Module:
        return frozen(f0 * torch.eye(2).repeat(phases, 1), seed=seed, outputs=outputs)

    return recover(run, options, single, f"w0 = {w0:g}", many)


def recover(
    run: Run, options: Recovering, single: Callable[[float, int, int], nn.Module], sharp: str, many: Build
) -> StudyResult:
    """Fit every image by networks with one frequency, f0 = 1 and f0 = 0.5, and by one with many, called `sharp`."""
    ghost, blur = "f0 = 1", "f0 = 0.5"
    builds: dict[str, Build] = {ghost: partial(single, 1.0), blur: partial(single, 0.5), sharp: many}
    seed = derive(run.seed, "images")
    if options.images == "astronaut":
        signals = colour_images(options.images, "test", options.n, options.side, seed)
    else:
        signals = grey_images(options.images, "test", options.n, options.side, seed)[:, None]
    signals = signals.repeat_interleave(options.starts, 0).movedim(1, -1)  # [fits, side, side, channels]
    r = coordinates((options.side, options.side))

    def one(name: str, i: int) -> dict[str, Any]:
        seed = derive(run.seed, "init", i)
        model = redraw(builds[name](seed, signals.shape[-1]), options.init, seed)
        model = model.to(run.device)
        found = fit(model, r, signals[i].to(run.device), steps=options.steps, lr=options.lr)
        with torch.no_grad():
            image = found.model(r.to(run.device)).double().cpu()
        run.log(network=name, image=i, psnr=found.psnr)
        kept = {"odd": odd_share(image[None])[0], "fine": fine_share(image[None], signals[i : i + 1])[0]}
        if options.images == "astronaut" and i:  # too large to be kept; the first is for the picture
            return {"psnr": found.psnr, **kept}
        return {"psnr": found.psnr, **kept, "image": image.float()}

    jobs = [(name, i) for name in builds for i in range(len(signals))]
    made: dict[Any, dict[str, Any]] = {
        job: run.cached(f"{job[0]} {job[1]}", partial(one, *job)) for job in progress(jobs, "fits")
    }

    def measured(name: str, what: str) -> Tensor:
        rows = [made[name, i] for i in range(len(signals))]
        if what != "psnr" and what not in rows[0]:  # an older run, in grey
            each = torch.stack([row["image"] for row in rows])[..., None]
            return odd_share(each) if what == "odd" else fine_share(each, signals)
        return torch.tensor([float(row[what]) for row in rows], dtype=torch.float64)

    psnr, odd, kept = ({name: measured(name, what) for name in builds} for what in ("psnr", "odd", "fine"))
    images = {name: made[name, 0]["image"] for name in builds}
    bounds = [recovery_bound(image, 1.0) for image in signals]
    bound = torch.tensor([each.psnr for each in bounds])

    numbers = {f"PSNR, {name}": Estimate.of(values) for name, values in psnr.items()}
    numbers["bound of PSNR, f0 = 1"] = Estimate.of(bound)
    numbers |= {f"energy at odd bins, {name}": Estimate.of(values) for name, values in odd.items()}
    numbers |= {f"fine detail kept, {name}": Estimate.of(values) for name, values in kept.items()}
    numbers["difference, over the bound, f0 = 1"] = Estimate.of(psnr[ghost] - bound)
    numbers[f"difference, {blur} - {ghost}"] = Estimate.of(psnr[blur] - psnr[ghost])
    numbers[f"difference, fine detail, {blur} - {sharp}"] = Estimate.of(kept[blur] - kept[sharp])
    numbers["largest energy at odd bins, f0 = 1"] = Estimate(float(odd[ghost].max()))
    numbers["largest PSNR over the bound, f0 = 1"] = Estimate(float((psnr[ghost] - bound).max()))
    _draw(run, signals[0], bounds[0].best, images)
    reached = ", ".join(f"{numbers[f'PSNR, {name}']} dB ({name})" for name in builds)
    return StudyResult(
        measured=f"PSNR {reached}; with f0 = 1 at most {numbers['bound of PSNR, f0 = 1']} dB is possible. "
        f"{title_of(options.images)}; errors over {'images' if options.n > 1 else 'initial weights'}.",
        numbers=numbers,
        figures=(_chart(psnr, bound),),
    )


def odd_share(images: Tensor) -> Tensor:
    """Share [n] of the energy of images [n, h, w, ...] at DFT bins with an odd index along any axis."""
    power = torch.fft.fft2(images.double(), dim=(1, 2)).abs().square()
    odd = torch.zeros(power.shape[1:3], dtype=torch.bool)
    odd[1::2], odd[:, 1::2] = True, True
    share: Tensor = power[:, odd].flatten(1).sum(1) / power.flatten(1).sum(1)
    return share


def fine_share(images: Tensor, targets: Tensor) -> Tensor:
    """How much [n] of the targets' fine detail is recovered: 1 - error / energy, over frequencies beyond side / 8."""
    side = targets.shape[1]
    f = torch.fft.fftfreq(side, 1 / side)
    fine = (f[:, None].square() + f.square()).sqrt() > side / 8
    error, energy = (
        torch.fft.fft2(x.double(), dim=(1, 2)).abs().square()[:, fine].flatten(1).sum(1)
        for x in (images - targets, targets)
    )
    share: Tensor = 1 - error / energy
    return share


def _chart(psnr: Mapping[str, Tensor], bound: Tensor) -> Chart:
    places = range(1, len(psnr) + 1)
    return Chart(
        "psnr", "Recovery of images", "network", "PSNR (dB)",
        (
            through("fitted", places, map(Estimate.of, psnr.values()), "points"),
            Series.of("bound for f0 = 1", places, [float(bound.mean())] * len(places), style="dashed"),
        ),
        alt="PSNR of three networks as points with error bars, and the bound for f0 = 1 as a dashed line.",
        caption="f0: the network's only frequency, in cycles over half the image; the third has many. Bars: one "
        "standard error over images.",
        x_names=tuple(psnr),
    )  # fmt: skip


def _draw(run: Run, signal: Tensor, best: Tensor, images: Mapping[str, Tensor]) -> None:
    """The first image, the best possible one with f0 = 1 and the three fits, spectra below."""
    shown = {"image": signal, "bound, f0 = 1": best, **images}

    def draw(axes: Any) -> None:
        for column, (name, image) in enumerate(shown.items()):
            for axis in axes[:, column]:
                axis.set_xticks([])
                axis.set_yticks([])
            pixels, image = image.squeeze(-1).clamp(0, 1), image.reshape(*image.shape[:2], -1).mean(2)
            axes[0][column].imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1)
            axes[0][column].set_title(name, fontsize=11)
            spectrum = torch.fft.fftshift(torch.fft.fft2(image.double() - image.double().mean()).abs())
            middle = len(image) // 2
            near = spectrum[middle - 8 : middle + 8, middle - 8 : middle + 8]  # single bins can be seen
            axes[1][column].imshow((near + 1e-6).log10().numpy(), cmap="magma", vmin=-1, vmax=3)

    picture(run, "recoveries", 2, len(shown), draw, (1.5, 1.6), caption=CAPTION)
