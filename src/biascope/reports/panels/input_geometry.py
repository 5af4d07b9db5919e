"""What the network responds to: along which directions of the input a freshly initialised network varies.

G = E[g g^T], g the derivative of the first output by the input, averaged over random initialisations. Its eigenvectors,
sorted, are the neural anisotropy directions: directions of decreasing preference. The derivative is taken by central
differences of step 100 (Alg. 1 of the NAD paper: for a ReLU network almost an impulse response), or by autograd at
Gaussian inputs where a network is too slow for that. Were the network isotropic, the eigenvalues of the sample would
still spread: between the Marchenko-Pastur edges (1 -+ sqrt(D/T))^2 around their mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.ensembles import Networks, input_gradients, outputs
from biascope.ensembles.engines import Plan
from biascope.geometry.gradients import perturbed
from biascope.linalg import effective_rank
from biascope.reports import figures
from biascope.reports.html import Html, figure, image, join, table, tag
from biascope.reports.panels.adapter import shown_output
from biascope.reports.panels.base import Panel, Subject, card_panel, first_output
from biascope.reports.panels.frames import frame, slider
from biascope.reports.panels.pace import largest_within, timed
from biascope.reports.panels.signals import frames as signal_frames
from biascope.reports.panels.signals import signal
from biascope.reports.panels.stability import found_again
from biascope.reports.study_page import fact_list
from biascope.studies import Estimate
from biascope.support.bars import progress
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import free_memory
from biascope.support.seeds import derive, generator

SHOWN, SIGNALS = 24, 8  # directions on the page: pictures, or curves, which are larger
CORNER = 128  # rows and columns of G in the picture
STEP = 100.0  # of the finite differences, as in the paper
ENOUGH = 64  # networks for which finite differences must be affordable
CPU_OPERATIONS, GPU_OPERATIONS = 500 * 10**9, 10**15  # that many networks may take; else autograd
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
TITLE = "What it responds to"
PICTURES = (
    "Each picture is a direction of the input, in pixels (left) and in frequency (right, slow variation central); "
)
ENTRIES = "Each picture is a direction of the input, entry by entry; "
CURVES = "Each curve is a direction of the input; "
READ = (
    "the network at initialisation responds most to the first ones and hardly to the last. "
    "In the spectrum, what lies in the shaded band is no more than chance gives. Found again: the share of a direction "
    "that other networks have at other inputs, from 0 to 1; it is a property of the architecture where it is near 1."
)


@dataclass(frozen=True)
class InputSpectrum:
    """Eigenvalues [k] of the gradient covariance (divided by their mean over all D), eigenvectors [k, D], sample
    size.
    """

    values: np.ndarray[Any, Any]
    vectors: np.ndarray[Any, Any]
    n: int
    dimension: int

    @property
    def band(self) -> tuple[float, float]:
        """Marchenko-Pastur edges for isotropic gradients of this sample size."""
        ratio = math.sqrt(self.dimension / self.n)
        return (1 - ratio) ** 2, (1 + ratio) ** 2


def plan(subject: Subject) -> tuple[str, int]:
    """Method and number of networks: the method follows from operations, the same on every machine of a kind, the
    number from the seconds that one network takes here.
    """
    operations = GPU_OPERATIONS if subject.on_gpu else CPU_OPERATIONS
    inputs = 2 * math.prod(subject.input_shape)
    differences = ENOUGH * inputs * subject.forward_cost() <= operations
    method = "finite differences" if differences else "autograd"
    if subject.networks is not None:
        return method, subject.networks
    initialiser, device, pace = subject.initialiser(), torch.device(subject.device), subject.pace()
    if subject.on_gpu:  # the first draw pays for loading kernels
        initialiser.draw(subject.seed, 0, 1, device)
    draw = timed(lambda: initialiser.draw(subject.seed, 0, initialiser.block, device), device) / initialiser.block
    each = draw + (inputs * pace.evaluate if differences else pace.gradient)
    return method, largest_within(subject.seconds(TITLE), each, COUNTS)


def gradients(subject: Subject) -> tuple[Tensor, str]:
    """Gradients of the first output by the input for many initialisations, [T, D] in float64, and how they were made.

    Finite differences where enough networks are affordable, since they are what the paper found to work; else autograd.
    """
    x = subject.inputs(1).requires_grad_()
    if torch.autograd.grad(first_output(subject, subject.network, x).sum(), x, allow_unused=True)[0] is None:
        raise InputError("the output does not depend on the input, or rounding or .detach() cuts it off")
    method, total = plan(subject)
    need, free = 3 * 8 * total * x.numel(), free_memory(torch.device("cpu"))  # the sample, its pieces, its factors
    if need > free:
        raise UnsupportedError(
            f"{total} networks need about {need / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free: fewer --networks"
        )
    pieces = by_differences(subject, total) if method == "finite differences" else by_autograd(subject, total)
    return torch.cat([rows.cpu().double() for rows in pieces]), method


def by_differences(subject: Subject, total: int) -> Iterator[Tensor]:
    """Central differences of step `STEP` along every input coordinate, for all networks: pieces [t, D].

    The even networks are looked at from one input, the odd ones from another: what both halves show is not of x.
    """
    points = [
        torch.randn(subject.input_shape, generator=generator(subject.seed, "card gradients", *which)).to(subject.device)
        for which in ((), (1,))
    ]
    at_once = 512 if subject.on_gpu else 128  # coordinates, two inputs each: what the pilot timed
    way = Plan(
        "loop", 2 * at_once
    )  # given, not chosen by trial: for so few networks that would cost more than it saves
    D, shown = math.prod(subject.input_shape), shown_output(subject.network)
    for networks, which in _drawn(subject, total):
        rows = torch.empty(len(networks), D, device=networks.device, dtype=networks.dtype)
        for parity in range(min(2, len(networks))):
            x, share = points[(which.start + parity) % 2], slice(parity, None, 2)
            for start in range(0, D, at_once):
                moved = perturbed(x, start, min(start + at_once, D), STEP)
                ahead, behind = outputs(networks[share], moved, plan=way)[:, :, shown].chunk(2, dim=1)
                rows[share, start : start + at_once] = (ahead - behind) / (2 * STEP)
        yield rows


def by_autograd(subject: Subject, total: int) -> Iterator[Tensor]:
    """Exact gradients, pieces [t, D]; they see only the linear piece around x, so every network gets its own x."""
    shape, shown = (1, *subject.input_shape), shown_output(subject.network)
    for networks, which in _drawn(subject, total):
        x = torch.stack([torch.randn(shape, generator=generator(subject.seed, "x", i)) for i in which])
        first = input_gradients(networks, x, per_network=True, scalarise=lambda out: out[:, shown], engine="loop")
        yield first.flatten(1)


def _drawn(subject: Subject, total: int) -> Iterator[tuple[Networks, range]]:
    """The networks, on the device, a gigabyte at a time and at most 32 so that progress is seen; and their numbers."""
    own = 4 * sum(p.numel() for p in subject.network.parameters())
    size = max(1, min(32, 2**30 // max(1, own)))
    initialiser, seed = subject.initialiser(), derive(subject.seed, "card networks")
    for start in progress(range(0, total, size), "random networks"):
        which = range(start, min(start + size, total))
        yield initialiser.draw(seed, which.start, which.stop, subject.device), which


def input_spectrum(sample: Tensor) -> InputSpectrum:
    """The uncentred covariance of gradients [T, D] by SVD, which keeps small eigenvalues that forming it would lose."""
    n, dimension = sample.shape
    _, singular, vectors = torch.linalg.svd(sample, full_matrices=False)
    values = singular.square() / n
    mean = float(values.sum()) / dimension
    if not (math.isfinite(mean) and mean > 0):
        raise InputError("the gradient by the input is zero or not finite: the output does not depend on the input")
    return InputSpectrum((values / mean).numpy(), vectors.numpy(), n, dimension)


def shared(subject: Subject) -> tuple[Tensor, str, InputSpectrum]:
    """Gradients, how they were made and their spectrum, measured once for all panels."""
    sample, method = subject.once("gradients", lambda: gradients(subject))
    return sample, method, subject.once("input spectrum", lambda: input_spectrum(sample))


def held_out_response(sample: Tensor) -> Estimate:
    """Squared response along the first direction of one half of the networks, measured on the other half, / average.

    The first eigenvalue of a small sample is too large, since its eigenvector also fits the noise; this is not.
    """
    first, second = sample[::2], sample[1::2]
    direction = torch.linalg.svd(first, full_matrices=False).Vh[0]
    responses = (second @ direction).square() / second.square().mean()
    return Estimate.of([round(float(value), 12) for value in responses])


def identity_correlation(sample: Tensor) -> tuple[float, float]:
    """Frobenius correlation of G = mean g g^T with the identity, and what an isotropic network of this sample gives."""
    n, dimension = sample.shape
    gram = sample @ sample.T / n  # the same norm as G, and smaller when D > n
    found = float(sample.square().sum()) / n / (math.sqrt(dimension) * float(gram.norm()))
    return found, 1 / math.sqrt(1 + (dimension + 1) / n)


def geometry_picture(sample: Tensor) -> Html:
    """The average geometry G itself, its first rows and columns."""
    side = min(CORNER, sample.shape[1])
    corner = (sample[:, :side].T @ sample[:, :side] / len(sample)).numpy()
    shown = image(
        figures.picture(corner, symmetric=True), f"average geometry G, first {side} x {side} entries", "pixels"
    )
    note = (
        f"Average geometry G, first {side} x {side} entries: a bare diagonal for an isotropic network; bands and "
        "repeats show which pixels pooling, strides and patches couple."
    )
    return tag("figure", shown, tag("figcaption", note))


@card_panel(order=20)
def panel(subject: Subject) -> Panel:
    """Top directions as pictures, and the spectrum with its noise band."""
    sample, method, spectrum = shared(subject)
    above = int((spectrum.values > spectrum.band[1]).sum())
    rank = effective_rank(torch.from_numpy(spectrum.values))
    facts: list[tuple[str, object]] = [
        ("Networks sampled", spectrum.n),
        ("Derivative", method),
        ("Above the band", above),
        ("Effective rank", f"{rank:.0f} of {min(spectrum.dimension, spectrum.n)}"),
    ]
    found, chance = identity_correlation(sample)
    facts.append(("G against the identity", f"{found:.2f} (chance: {chance:.2f})"))
    again, by_chance = found_again(sample, min(SHOWN, len(spectrum.values)))
    if len(again):
        facts.append(("First direction found again", f"{again[0]:.2f} (chance: {by_chance[0]:.2f})"))
    rows = [
        (i + 1, float(value), float(value) / spectrum.dimension, float(again[i]) if i < len(again) else "")
        for i, value in enumerate(spectrum.values)
    ]
    header = ["index", "eigenvalue / mean", "share of energy", "found again at other inputs (0 to 1)"]
    numbers = table(header, rows, "input-spectrum", fold=True)
    right = tag("div", spectrum_figure(spectrum), numbers)
    geometry = geometry_picture(sample)
    columns = tag("div", directions(subject, spectrum, again.tolist()), right, geometry, class_="columns")
    read = (PICTURES if is_image(subject) else ENTRIES if image_shape(subject)[1] > 1 else CURVES) + READ
    meaning, headline = _meaning(subject, spectrum, above, held_out_response(sample))
    blocks = [fact_list(facts), columns]
    return Panel(TITLE, read, meaning, blocks, headline=headline, picture=first_picture(subject, spectrum))


def first_picture(subject: Subject, spectrum: InputSpectrum) -> Html:
    """The first direction, for the first screen of the card."""
    name, vector = "the direction it responds to most", spectrum.vectors[0]
    if is_signal(subject):
        return signal(vector, name, "first")
    drawn = (pixels_and_fourier if is_image(subject) else entries)(vector.reshape(image_shape(subject)), name)
    where = ", in pixels and in frequency (constant in the middle)" if is_image(subject) else ", entry by entry"
    return tag("figure", drawn, tag("figcaption", f"The direction it responds to most{where}."))


def mean_frequency(subject: Subject, vectors: np.ndarray[Any, Any], weights: Any = 1.0) -> tuple[float, float]:
    """Energy-weighted distance from DC of directions [k, D], and what white noise would give; in cycles per pixel."""
    energy, distance = _energy(subject, vectors, weights)
    return float((energy * distance).sum() / energy.sum()), float(distance.mean())


def _energy(
    subject: Subject, vectors: np.ndarray[Any, Any], weights: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Fourier energy of directions [k, D] summed with weights [k], and distance from DC, both [height, width]."""
    _, height, width = image_shape(subject)
    each = (np.abs(np.fft.fft2(vectors.reshape(len(vectors), -1, height, width))) ** 2).mean(1)
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    return (each * np.reshape(weights, (-1, 1, 1))).sum(0), distance


def frequencies(subject: Subject, spectrum: InputSpectrum, above: int) -> tuple[str, str]:
    """What the first direction is, in a few words, and a sentence on it and on all that stand out.

    The first is the one that the page shows; the others count by how far their eigenvalue is above the band, since of
    many weak directions the mean frequency is near that of white noise whatever the first ones hold.
    """
    first = spectrum.vectors[:1]
    mine, white = mean_frequency(subject, first)
    energy, _ = _energy(subject, first, 1.0)
    constant = float(energy[0, 0] / energy.sum())
    if constant > 0.5:
        words = "the mean brightness" if subject.input_shape[0] == 1 else "a constant colour"
        text = f" The first is {words} ({constant:.0%} of its energy is constant over the picture)"
    else:
        words = f"{_kind(mine, white)} frequencies"
        text = f" The first holds {words} ({mine:.2f} cycles per pixel; white noise has {white:.2f})"
    if above > 1:
        weights = spectrum.values[:above] - spectrum.band[1]
        mean, _ = mean_frequency(subject, spectrum.vectors[:above], weights)
        text += f"; all {above}, weighted by how far they stand out, hold {_kind(mean, white)} ones ({mean:.2f})"
    return words, f"{text}."


def _kind(mine: float, white: float) -> str:
    return "low" if mine < 0.75 * white else "high" if mine > 1.15 * white else "mixed"


def is_signal(subject: Subject) -> bool:
    """Whether inputs have one axis that is longer than 1, as sound and rows of a table have."""
    return image_shape(subject)[:2] == (1, 1)


def is_image(subject: Subject) -> bool:
    """Whether inputs are [channels, height, width]; of [time, features] neighbours mean little, so no frequencies."""
    return len(subject.input_shape) == 3


def image_shape(subject: Subject) -> tuple[int, int, int]:
    """(channels, height, width) of the input seen as a picture; vectors become one row."""
    shape = subject.input_shape
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, shape[0], shape[1]) if len(shape) == 2 else (1, 1, math.prod(shape))


def _meaning(subject: Subject, spectrum: InputSpectrum, above: int, first: Estimate) -> tuple[str, str]:
    """What this means, and its headline."""
    high, times = spectrum.band[1], f"{first.value:.3g} ± {first.standard_error or 0.0:.2g}"
    none = f"At initialisation no direction of the input stands out over {spectrum.n} networks."
    if above == 0:
        return (
            f"No direction stands out: every eigenvalue is below {high:.2f} times the mean, "
            f"where {spectrum.n} samples of an isotropic network would lie."
        ), none
    if first.value - 2 * (first.standard_error or 0.0) <= 1:
        more = f" Try --networks {4 * spectrum.n}." if spectrum.n < spectrum.dimension else ""
        return (
            f"No preferred direction can be told from {spectrum.n} networks: {above} eigenvalues lie above the band, "
            f"but what one half of the networks prefers, the other half does not (squared response along its first "
            f"direction {times} times the average).{more}"
        ), none
    text = (
        f"{above} of {spectrum.dimension} directions stand above chance. Along the first one, found on half of the "
        f"networks, the other half responds {times} times as strongly (squared) as on average."
    )
    headline = f"At initialisation its squared response to one direction is {first.value:.3g} times the average"
    if not is_image(subject):
        return text, f"{headline} over all directions of the input."
    words, more = frequencies(subject, spectrum, above)
    return text + more, f"{headline}: {words}."


def directions(subject: Subject, spectrum: InputSpectrum, again: Sequence[float] = ()) -> Html:
    """A slider over the first directions: pixels beside Fourier energy, or the entries of a matrix."""
    channels, height, width = image_shape(subject)
    count = min(SHOWN, len(spectrum.values))
    if is_signal(subject):
        count = min(SIGNALS, count)
    notes = [f"Direction {i + 1}: eigenvalue {spectrum.values[i]:.3g} times the mean" for i in range(count)]
    notes = [
        note + (f"; found again at other inputs: {again[i]:.2f}" if i < len(again) else "")
        for i, note in enumerate(notes)
    ]
    if is_signal(subject):
        drawn = signal_frames(spectrum.vectors, notes, lambda i: frame("nad", i))
        return tag("div", drawn, slider("nad", count), class_="wide")
    frames = []
    for i in range(count):
        vector = spectrum.vectors[i].reshape(channels, height, width)
        drawn = (pixels_and_fourier if is_image(subject) else entries)(vector, f"direction {i + 1}")
        frames.append(tag("div", drawn, tag("p", notes[i], class_="note"), **frame("nad", i)))
    note = "Mean over channels." if channels > 1 else ""
    return tag("div", join(frames), slider("nad", count), tag("p", note, class_="note") if note else "")


def pixels_and_fourier(vector: np.ndarray[Any, Any], name: str) -> Html:
    """A direction [channels, height, width] as two pictures side by side."""
    energy = np.fft.fftshift((np.abs(np.fft.fft2(vector)) ** 2).sum(0))
    pixels = image(figures.picture(vector.mean(0), symmetric=True), f"{name} in pixel space", "pixels")
    fourier = image(figures.picture(np.sqrt(energy)), f"{name}, Fourier magnitude, DC centred", "pixels")
    return tag("div", tag("div", pixels), tag("div", fourier), class_="pair")


def entries(vector: np.ndarray[Any, Any], name: str) -> Html:
    """A direction [1, rows, columns] of an input that is a matrix, as one picture."""
    return image(figures.picture(vector[0], symmetric=True), f"{name}, entry by entry", "pixels")


def spectrum_figure(spectrum: InputSpectrum) -> Html:
    """Eigenvalues in order, on a logarithmic scale, with the Marchenko-Pastur band."""
    low, high = spectrum.band
    keep = spectrum.values > spectrum.values[0] * 1e-9
    values = spectrum.values[keep]
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.plot(np.arange(1, len(values) + 1), values, color="C0", label="this network")
        floor = max(low, float(values.min())) if low > 0 else float(values.min())
        axes.axhspan(floor, high, color="C4", alpha=0.25, linewidth=0, label="isotropic network (chance)")
        axes.set(xlabel="index of the direction", ylabel="eigenvalue / mean")
        figures.log_scale(axes)
        axes.legend()
    alt = (
        f"Eigenvalues fall from {values[0]:.3g} to {values[-1]:.2g} times the mean; the chance band ends at {high:.2f}."
    )
    caption = f"Marchenko-Pastur band for D = {spectrum.dimension}, T = {spectrum.n}: {low:.2f} to {high:.2f}."
    svg = figures.inline_svg(drawing, "spectrum")
    return figure(svg, alt, caption, figures.hover(axes, [("", range(1, len(values) + 1), values)]))
