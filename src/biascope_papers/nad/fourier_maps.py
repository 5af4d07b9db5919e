"""Figs. 1, 3, 10, 11, 12: test accuracy of networks on D(v) as v runs over the two-dimensional Fourier basis.

Fig. 1 is the map over cosine-like (Re) vectors, Fig. 10 that over sine-like (Im) ones, Fig. 3 the map without pooling,
Fig. 11 at several noise levels; Fig. 12 has a random orthonormal basis. Logistic regression and the MLP are controls of
Fig. 1. "Without pooling" does not say whether strided convolutions also go: `strides` does one, the other, or both
(only ResNet-18 has any).
"""

import math
from typing import Annotated, Any, Literal

import numpy as np
import torch

from biascope import InputError
from biascope.data import random_orthogonal
from biascope.data.fourier import FourierBasis, fourier_vectors
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import correlation, difference, spread
from biascope.support import derive
from biascope_papers.nad import directional as d
from biascope_papers.nad import frequencies as f

STRIDED = ("resnet18",)


@study("nad/fig1", sizes={"smoke": {**d.SMOKE, "window": 10}, "laptop": {**d.LAPTOP, "stride": 4}, "paper": {}})
def fig1(
    run: Run,
    *,
    net: d.Net = "lenet",
    width: d.Width = 0,
    grid: f.Grid = f.GRID,
    first: Annotated[int, "train only the first so many of these bins, a map cut short; 0: all"] = 0,
    control: Annotated[bool, "also train logistic regression on every bin"] = True,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy map of an architecture over the cosine-like (Re) Fourier directions."""
    basis, side = grid.basis(run.seed), grid.image_size
    cut = 0 < first < len(basis)
    if cut:
        basis = basis.select(torch.arange(first))
    found = d.train_directions(run, net, d.architecture(net, side, width=width), basis.vectors, protocol)
    numbers, findings = summary(net, found, basis), ""
    if control and net != "logreg":
        logreg = d.train_directions(run, "logreg", d.architecture("logreg", side), basis.vectors, protocol)
        numbers["worst bin of logistic regression"] = Estimate(float(logreg.test.min()))
        findings += f" Logistic regression reaches {logreg.test.min():.4f} on its worst bin."
    if net == "resnet18":
        findings += _combs(found.test, basis, numbers)
    apart = f.replicated_gap(found.test, f.partners(basis))
    if apart is not None:
        numbers[f"{'control: ' if net in d.ISOTROPIC else ''}best minus worst quarter of bins"] = apart
        findings += f" The best quarter of bins beats the worst by {apart}."
        ends = f.extremes(found.test, f.partners(basis))
        if ends is not None and net not in d.ISOTROPIC:
            numbers[f"best minus worst tenth of bins, chosen by their twins, {net}"] = ends
            findings += f" The best tenth, chosen by their twins, beat the worst tenth by {ends}."
    else:
        findings += " There are too few bins to tell good from bad ones."
    if net in d.ISOTROPIC:
        worst = float(found.test.min())
        fate = "holds" if worst >= 0.99 else "fails"
        findings += f" As a control, which needs 0.99 on every bin, it {fate}: {worst:.4f} on its worst one."
        findings += f" What is claimed of convolutional networks is not tested by {net}."
    twins = numbers["correlation of transposed bins"]
    if math.isfinite(twins.value):  # it is not where all bins are learnt alike
        findings += f" Transposed bins correlate by {twins}."
    run.save_arrays("map", frequencies=basis.frequencies, test=found.test, train=found.train)
    caption = f"{protocol}. One network per bin; the value is copied to the conjugate bin."
    caption += " Grey: not trained." if grid.sample or cut else ""
    title = f"Test accuracy of {net} on D(v), v in the Fourier basis"
    return StudyResult(
        measured=f"{net}, {len(basis)} bins of a {side} x {side} spectrum ({protocol}): mean accuracy "
        f"{numbers[f'mean test accuracy, {net}']}, mean training accuracy {found.train.mean():.3f}.{findings}",
        numbers=numbers,
        figures=(f.heat_map("accuracy", title, found.test, basis, caption=caption),),
    )


def summary(net: str, found: d.Trained, basis: FourierBasis) -> dict[str, Estimate]:
    """Mean over the map (a bin and its conjugate are one network but two cells), shares of good and bad cells."""
    conjugate = (basis.bins == (-basis.bins) % basis.shape[0]).all(1).numpy()
    weight = np.where(conjugate, 1.0, 2.0) / np.where(conjugate, 1.0, 2.0).sum()
    error = float(np.sqrt(np.sum(weight**2) * np.var(found.test, ddof=1))) if len(weight) > 1 else None
    partner = f.partners(basis)
    return {
        f"mean test accuracy, {net}": Estimate(float(weight @ found.test), error, len(weight)),
        f"share of bins at or above 0.95, {net}": Estimate(float(weight @ (found.test >= 0.95))),
        f"share of bins below 0.60, {net}": Estimate(float(weight @ (found.test < 0.60))),
        f"mean training accuracy, {net}": Estimate.of(found.train),
        "correlation of transposed bins": Estimate(f.reliability(found.test, partner), None, int((partner >= 0).sum())),
    }


def _combs(test: d.Array, basis: FourierBasis, numbers: dict[str, Estimate]) -> str:
    """ResNet-18 on 32 pixels: strides of 8 in all alias the multiples of 4 to DC; published 94 to 100 % there."""
    comb = (basis.frequencies % 4 == 0).any(1).numpy()
    if comb.all() or not comb.any():
        return ""
    on, off = Estimate.of(test[comb]), Estimate.of(test[~comb])
    numbers |= {"accuracy where a frequency is a multiple of 4": on, "accuracy at all other bins": off}
    return f" Bins with a frequency that is a multiple of 4 reach {on}, the others {off}."


@study(
    "nad/fig10",
    sizes={"smoke": {**d.SMOKE, "sample": 10}, "laptop": {**d.LAPTOP, "stride": 4, "sample": 16}, "paper": {}},
)
def fig10(
    run: Run,
    *,
    net: d.Net = "lenet",
    width: d.Width = 0,
    grid: f.Grid = f.GRID,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy map over the sine-like (Im) Fourier directions, compared with the cosine-like ones.

    The four bins that are their own conjugates have no Im vector: they stay empty on the map.
    """
    im, parts = grid.basis(run.seed, "im"), list[f.Part]()
    parts += ["re"] * len(im)
    re = FourierBasis(fourier_vectors(im.shape, im.bins, "re"), im.bins, tuple(parts), im.shape)
    factory = d.architecture(net, grid.image_size, width=width)
    sine = d.train_directions(run, f"{net} im", factory, im.vectors, protocol)
    cosine = d.train_directions(run, f"{net} re", factory, re.vectors, protocol)
    numbers = {
        "correlation of the Im and the Re map": correlation(sine.test, cosine.test),
        "accuracy on Im minus accuracy on Re": Estimate.of(sine.test - cosine.test),
        "mean accuracy, Im": Estimate.of(sine.test),
        "mean accuracy, Re": Estimate.of(cosine.test),
    }
    same, more = list(numbers.values())[:2]
    run.save_arrays("map", frequencies=im.frequencies, im=sine.test, re=cosine.test)
    return StudyResult(
        measured=f"{net}, {len(im)} bins ({protocol}): the accuracies of Im and Re vectors correlate by {same}; Im "
        f"minus Re is {more} on average.",
        numbers=numbers,
        figures=(
            f.heat_map("im", f"{net}, sine-like (Im) directions", sine.test, im, "im", caption=str(protocol)),
            f.heat_map("re", f"{net}, cosine-like (Re) directions", cosine.test, re, "re", caption=str(protocol)),
        ),
    )


@study(
    "nad/fig3",
    sizes={
        "smoke": {**d.SMOKE, "sample": 12, "n_test": 128, "epochs": 12},
        "laptop": {**d.LAPTOP, "stride": 4, "sample": 12, "n": 3000},
        "paper": {},
    },
)
def fig3(
    run: Run,
    *,
    net: d.Net = "lenet",
    strides: Annotated[Literal["keep", "remove", "both"], "what becomes of strided convolutions"] = "both",
    width: d.Width = 0,
    grid: f.Grid = f.GRID,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy maps with and without pooling."""
    basis, side = grid.basis(run.seed), grid.image_size
    pooled = d.train_directions(run, net, d.architecture(net, side, width=width), basis.vectors, protocol)
    spread_before = spread(pooled.test)
    numbers = {"spread over bins, with pooling": spread_before, "mean, with pooling": Estimate.of(pooled.test)}
    by_chance = float(np.sqrt((pooled.test * (1 - pooled.test)).mean() / protocol.n_test))
    numbers["spread by the finite test set alone"] = Estimate(by_chance, 0.0)
    maps = [f.heat_map("with-pooling", f"{net}, as it is", pooled.test, basis, caption=str(protocol))]
    bad, findings = f.worst_by_partner(pooled.test, f.partners(basis)), []
    for label, options in variants(net, strides).items():
        factory = d.architecture(f"{net}-nopool", side, width=width, **options)
        found = d.train_directions(run, label, factory, basis.vectors, protocol)
        numbers |= {f"spread over bins, {label}": spread(found.test), f"mean, {label}": Estimate.of(found.test)}
        numbers[f"gain over all bins, {label}"] = Estimate.of(found.test - pooled.test)
        numbers[f"spread lost, {label}"] = flatter = difference(spread_before, spread(found.test))
        maps.append(f.heat_map(label.replace(" ", "-"), f"{net}, {label}", found.test, basis, caption=str(protocol)))
        if len(bad) >= 4:
            numbers[f"gain at the bad bins, {label}"] = better = Estimate.of((found.test - pooled.test)[bad])
            findings.append(f"{label}: spread smaller by {flatter}, bad bins better by {better}")
    return StudyResult(
        measured=f"{net}, {len(basis)} bins ({protocol}): spread of the accuracy over bins {spread_before} with "
        f"pooling. {'; '.join(findings) or 'Too few bins to compare'}.",
        numbers=numbers,
        figures=tuple(maps),
    )


def variants(net: str, strides: Literal["keep", "remove", "both"]) -> dict[str, dict[str, int]]:
    """The networks without pooling, by name, and the options that make them."""
    found: dict[str, dict[str, int]] = {"no pooling": {}, "no pooling, no strides": {"stride": 1}}
    if net not in STRIDED or strides == "keep":
        del found["no pooling, no strides"]
    elif strides == "remove":
        del found["no pooling"]
    return found


@study(
    "nad/fig11",
    sizes={
        "smoke": {key: value for key, value in d.SMOKE.items() if key != "sigma"}
        | {"nets": ("logreg", "lenet"), "sigmas": (0.0, 2.0), "sample": 8},
        "laptop": {**d.LAPTOP, "nets": ("logreg", "lenet"), "stride": 4, "sample": 12, "n": 3000},
        "paper": {},
    },
)
def fig11(
    run: Run,
    *,
    nets: d.Nets = ("logreg", "lenet", "resnet18"),
    sigmas: Annotated[tuple[float, ...], "noise levels, rising"] = (0.0, 1.0, 3.0),
    grid: f.Grid = f.GRID,
    n: d.Samples = 10_000,
    n_test: d.TestSamples = 10_000,
    eps: d.Eps = 1.0,
    gap: d.Offset = "full",
    epochs: d.Epochs = 20,
    precision: d.Arithmetic = "auto",
    chunk: d.Chunk = 0,
) -> StudyResult:
    """Accuracy maps at several noise levels."""
    if list(sigmas) != sorted(set(sigmas)) or len(sigmas) < 2:
        raise InputError(f"sigmas must be at least two rising noise levels, got {sigmas}")
    basis = grid.basis(run.seed)
    accuracy: dict[tuple[str, float], d.Array] = {}
    maps, numbers = [], dict[str, Estimate]()
    for net in nets:
        factory = d.architecture(net, grid.image_size)
        for sigma in sigmas:
            protocol = d.Protocol(n, n_test, sigma, eps, gap, epochs, precision=precision, chunk=chunk)
            found = d.train_directions(run, f"{net} sigma={sigma:g}", factory, basis.vectors, protocol)
            accuracy[net, sigma] = found.test
            numbers[f"mean accuracy, {net}, sigma {sigma:g}"] = Estimate.of(found.test)
            numbers[f"worst bin, {net}, sigma {sigma:g}"] = Estimate(float(found.test.min()))
            title = f"{net}, sigma = {sigma:g}"
            maps.append(f.heat_map(f"{net}-{sigma:g}", title, found.test, basis, caption=str(protocol)))
    numbers |= noise_numbers(accuracy, nets, sigmas)
    means = "; ".join(f"{net} {', '.join(f'{accuracy[net, s].mean():.3f}' for s in sigmas)}" for net in nets)
    return StudyResult(
        measured=f"{len(basis)} bins, {n} training samples, eps = {eps:g}; mean accuracy at sigma = "
        f"{', '.join(f'{s:g}' for s in sigmas)}: {means}.",
        numbers=numbers,
        figures=tuple(maps),
    )


def noise_numbers(
    accuracy: dict[tuple[str, float], d.Array], nets: tuple[str, ...], sigmas: tuple[float, ...]
) -> dict[str, Estimate]:
    """What noise costs each convolutional network, and how much less it costs ResNet-18: paired over bins."""
    found, middle = dict[str, Estimate](), sigmas[len(sigmas) // 2]
    for net in nets:
        if net not in d.ISOTROPIC:
            lost = Estimate.of(accuracy[net, sigmas[0]] - accuracy[net, sigmas[-1]])
            found[f"accuracy lost from the lowest to the highest noise, {net}"] = lost
        if net not in (*d.ISOTROPIC, "resnet18") and "resnet18" in nets and len(sigmas) > 2:
            more = Estimate.of(accuracy["resnet18", middle] - accuracy[net, middle])
            found[f"accuracy of resnet18 minus {net} at the middle noise level"] = more
    return found


@study(
    "nad/fig12",
    sizes={
        "smoke": {**d.SMOKE, "nets": ("lenet",), "count": 10},
        "laptop": {**d.LAPTOP, "nets": ("lenet",), "count": 16},
        "paper": {},
    },
)
def fig12(
    run: Run,
    *,
    nets: d.Nets = ("lenet", "resnet18"),
    image_size: d.Side = 32,
    width: d.Width = 0,
    count: Annotated[int, "random directions, and about as many Fourier bins"] = 130,
    stride: f.Stride = 2,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy over random orthonormal directions, beside that over Fourier directions."""
    if count < 2:
        raise InputError(f"count must be at least 2, not {count}")
    random = random_orthogonal(image_size**2, seed=derive(run.seed, "basis")).T[:count]
    basis = f.Grid(image_size, stride, sample=count).basis(run.seed)
    sets = {"random": random.reshape(-1, image_size, image_size), "Fourier": basis.vectors}
    numbers: dict[str, Estimate] = {}
    series, findings = list[Series](), list[str]()
    for net in nets:
        factory = d.architecture(net, image_size, width=width)
        test = {
            kind: d.train_directions(run, f"{net} {kind.lower()}", factory, vectors, protocol).test
            for kind, vectors in sets.items()
        }
        flat, uneven = spread(test["random"]), spread(test["Fourier"])
        numbers |= {
            f"spread over random directions, {net}": flat,
            f"spread over Fourier directions, {net}": uneven,
            f"difference of the spreads, {net}": difference(uneven, flat),
        }
        findings.append(f"{net} {flat} over random, {uneven} over Fourier directions")
        styles: dict[str, Any] = {"random": "line", "Fourier": "dashed"}
        for kind, values in test.items():
            numbers[f"mean accuracy on {kind} directions, {net}"] = Estimate.of(values)
            share = np.linspace(0, 1, len(values))
            series.append(Series.of(f"{net}, {kind}", share, np.sort(values), None, styles[kind]))
    chart = Chart(
        "sorted-accuracy",
        "Accuracy on random and on Fourier directions, sorted",
        "share of directions with a lower accuracy",
        "test accuracy",
        tuple(series),
        alt="; ".join(f"{s.label} from {s.y[0]:.2f} to {s.y[-1]:.2f}" for s in series) + ".",
        caption=str(protocol),
    )
    return StudyResult(
        measured=f"Standard deviation of the accuracy, {len(random)} random and {len(basis)} Fourier directions "
        f"({protocol}): {'; '.join(findings)}.",
        numbers=numbers,
        figures=(chart,),
    )
