"""Figs. 6, 20 and 22: test accuracy on D(u_i), u_i the i-th anisotropy direction, beside the eigenvalues.

Half of the chosen indices are among the first ones; the published correlation is over all 1023, most of them at chance.
`whole_range` weights each index by the range it stands for, which can be compared with it. The noise of Fig. 6 is not
printed: the public curves of VGG-11, ResNet-18 and DenseNet-121 are met with sigma = 3, as in Fig. 1, that of LeNet
with sigma = 1.

Fig. 20: gradients are not clipped, of which the text does not speak (the public code: `clip_norm=0.5`). Directions are
measured with sampled last layers, as in the paper: the spectrum of the MLP decays a little by sampling alone
(Marchenko-Pastur). Fig. 22: the number of epochs is fixed, so fewer samples also mean fewer steps.
"""

from typing import Annotated, Any

import numpy as np
import torch

from biascope import InputError
from biascope.linalg import marchenko_pastur
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import jackknife_error, rank_correlation
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d

RANGES = ((0, 16), (16, 64), (64, 128), (128, 256), (256, 512), (512, 1023))
ORDER, WHOLE = "Spearman(index, accuracy), chosen indices", "Spearman(index, accuracy), all indices"


@study(
    "nad/fig6",
    sizes={
        "smoke": {**d.SMOKE, "networks": 16, "count": 16},
        "laptop": {**d.LAPTOP, "networks": 128, "count": 20},
        "paper": {},
    },
)
def fig6(run: Run, *, source: a.Source = a.SOURCE, count: a.Count = 256, protocol: d.Protocol = d.PAPER) -> StudyResult:
    """Accuracy on D(u_i) against the index i, with the normalised eigenvalues."""
    net, image_size = source.net, source.image_size
    indices = a.spread_indices(count, image_size**2)

    def sweep() -> dict[str, Any]:
        U, values = a.directions_of(run, source, protocol.precision)
        found = d.train_directions(run, net, d.architecture(net, image_size, width=source.width), U[indices], protocol)
        made = {"test": torch.as_tensor(found.test), "train": torch.as_tensor(found.train), "eigenvalues": values}
        return {"indices": torch.tensor(indices), **made}

    stored = run.cached("sweep", sweep)  # enough to be judged by, without the directions
    at, test, train, values = (
        torch.as_tensor(stored[key]).double().numpy() for key in ("indices", "test", "train", "eigenvalues")
    )
    numbers = sweep_numbers(net, at, test, values) | {f"training accuracy, mean, {net}": Estimate.of(train)}
    return StudyResult(
        measured=f"{net}, {len(at)} of {len(values)} directions ({protocol}): accuracy {test[0]:.3f} at the first "
        f"direction, {test[-1]:.3f} at the last.",
        numbers=numbers,
        figures=(sweep_chart(net, at, test, train, values, protocol),),
    )


@study(
    "nad/fig20",
    sizes={
        "smoke": {**d.SMOKE, "nets": ("mlp", "lenet"), "networks": 300, "count": 10, "epochs": 12, "clip_norm": 0.0},
        "laptop": {**d.LAPTOP, "nets": ("mlp",), "networks": 2000, "count": 12, "clip_norm": 0.0},
        "paper": {"clip_norm": 0.0},
    },
)
def fig20(
    run: Run,
    *,
    nets: d.Nets = ("mlp", "vgg11"),
    image_size: d.Side = 32,
    networks: a.Networks = 10_000,
    head: a.Head = "sampled",
    step: a.Step = 100.0,
    count: a.Count = 64,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy on D(u_i) against the index for the MLP and VGG-11, with the eigenvalues."""
    numbers: dict[str, Estimate] = {}
    charts, findings = list[Chart](), list[str]()
    for net in nets:
        U, spectrum = a.directions_of(run, a.Source(net, image_size, 0, networks, head, step), protocol.precision)
        indices, values = a.spread_indices(count, len(U)), spectrum.numpy()
        found = d.train_directions(run, net, d.architecture(net, image_size), U[indices], protocol)
        at = np.array(indices, dtype=float)
        numbers |= sweep_numbers(net, at, found.test, values)
        numbers[f"lowest accuracy, {net}"] = Estimate(float(found.test.min()))
        numbers[f"accuracy, mean over indices, {net}"] = Estimate.of(found.test)
        numbers[f"training accuracy, mean over indices, {net}"] = Estimate.of(found.train)
        if head == "sampled" and networks > len(U):
            band = marchenko_pastur(networks, len(U))
            numbers[f"largest over smallest eigenvalue, {net}"] = Estimate(float(values[0] / values[-1]))
            numbers[f"the same by sampling alone (Marchenko-Pastur), {net}"] = Estimate(band.upper / band.lower)
        findings.append(f"{net} {found.test[0]:.3f} at the first index and {found.test[-1]:.3f} at the last")
        charts.append(sweep_chart(net, at, found.test, found.train, values, protocol))
    return StudyResult(
        measured=f"Accuracy on D(u_i), {protocol}: {'; '.join(findings)}.", numbers=numbers, figures=tuple(charts)
    )


def sweep_numbers(net: str, at: d.Array, accuracy: d.Array, values: d.Array) -> dict[str, Estimate]:
    """Order of the accuracies, their means in ranges of the index, and the decay of the spectrum.

    The decay is given as in the paper's files: square roots of eigenvalue ratios.
    """
    found = {ORDER: rank_correlation(at, accuracy), WHOLE: whole_range(at, accuracy, len(values))}
    for low, high in RANGES:
        inside = (at >= low) & (at < high)
        if inside.any():
            found[f"accuracy, index {low} to {high - 1}"] = Estimate.of(accuracy[inside])
    for i in (10, 100, 500):
        if i < len(values):
            found[f"sqrt(lambda_{i} / lambda_0)"] = Estimate(float(np.sqrt(max(values[i], 0.0) / values[0])))
    return {f"{name}, {net}": number for name, number in found.items()}


def whole_range(at: d.Array, accuracy: d.Array, total: int) -> Estimate:
    """Rank correlation of index and accuracy over all `total` indices, estimated from those trained on.

    Each index of `at` [k], rising, weighs as much as the range that lies nearest to it. Errors from leaving out one
    index at a time, the ranges drawn anew.
    """
    whole, n = weighted_spearman(at, accuracy, total), len(at)
    left = [weighted_spearman(np.delete(at, i), np.delete(accuracy, i), total) for i in range(n)] if n > 3 else []
    return Estimate(whole, jackknife_error(left) if left else None, n)


def weighted_spearman(at: d.Array, accuracy: d.Array, total: int) -> float:
    """Weighted correlation of weighted mid-ranks; 0 where all accuracies are equal."""
    weight = np.diff([-0.5, *(at[1:] + at[:-1]) / 2, total - 0.5])
    if len(at) < 2 or np.ptp(accuracy) == 0:
        return 0.0
    ranks = []
    for values in (at, accuracy):
        _, place = np.unique(values, return_inverse=True)
        mass = np.bincount(place, weight)
        ranks.append((np.cumsum(mass) - mass / 2)[place] - total / 2)  # the weighted mean of mid-ranks is total / 2
    x, y = ranks
    return round(float(weight @ (x * y) / np.sqrt((weight @ x**2) * (weight @ y**2))), 12)


def sweep_chart(net: str, at: d.Array, test: d.Array, train: d.Array, values: d.Array, protocol: d.Protocol) -> Chart:
    """Accuracies and normalised eigenvalues (their square roots, as published) against the index."""
    shown = np.unique(np.geomspace(1, len(values), 100).round().astype(int)) - 1
    roots = np.sqrt(np.maximum(values, 0) / values[0])
    return Chart(
        f"sweep-{net}",
        f"Accuracy of {net} on D(u_i) and the spectrum",
        "index i of the direction",
        "accuracy; normalised singular value",
        (
            Series.of("test accuracy", at + 1, test),
            Series.of("training accuracy", at + 1, train, style="points"),
            Series.of("sqrt(lambda_i / lambda_1)", shown + 1, roots[shown], style="dashed"),
        ),
        alt=f"Test accuracy goes from {test[0]:.2f} at the first index to {test[-1]:.2f} at the last, "
        f"the singular values from 1 to {roots[-1]:.2g}.",
        caption=f"{protocol}. One network per index.",
        log_x=True,
    )


@study(
    "nad/fig22",
    sizes={
        "smoke": {k: v for k, v in d.SMOKE.items() if k != "n"} | {"networks": 16, "count": 8, "ns": (64, 256)},
        "laptop": {"networks": 128, "count": 10, "ns": (500, 1500, 5000), "n_test": 2000},
        "paper": {},
    },
)
def fig22(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    count: a.Count = 24,
    ns: Annotated[tuple[int, ...], "numbers of training samples, rising"] = (300, 1000, 3000, 10_000, 30_000, 100_000),
    n_test: d.TestSamples = 10_000,
    sigma: d.Sigma = 3.0,
    eps: d.Eps = 1.0,
    gap: d.Offset = "full",
    epochs: d.Epochs = 20,
    precision: d.Arithmetic = "auto",
    chunk: d.Chunk = 0,
) -> StudyResult:
    """Accuracy against the number of training samples on D(u_i)."""
    if list(ns) != sorted(set(ns)) or len(ns) < 2:
        raise InputError(f"ns must be at least two rising numbers of samples, got {ns}")
    net, few, many = source.net, ns[0], ns[-1]
    indices = a.spread_indices(count, source.image_size**2)

    def sweep() -> dict[str, Any]:
        U, _ = a.directions_of(run, source, precision)
        factory, rows = d.architecture(net, source.image_size, width=source.width), []
        for n in ns:
            protocol = d.Protocol(n, n_test, sigma, eps, gap, epochs, precision=precision, chunk=chunk)
            rows.append(d.train_directions(run, f"{net} n={n}", factory, U[indices], protocol).test)
        made = {"accuracy": torch.as_tensor(np.stack(rows)), "ns": torch.tensor(ns)}
        return {"indices": torch.tensor(indices), **made}

    stored = run.cached("accuracy", sweep)  # enough to be judged by, without the directions
    accuracy = torch.as_tensor(stored["accuracy"]).double().numpy()  # [numbers of samples, indices]
    order = rank_correlation(np.array(indices, dtype=float), accuracy.mean(0))
    worst = float(accuracy[-1].min())
    needed = samples_needed(np.array(ns), accuracy)
    need = rank_correlation(np.array(indices, dtype=float), needed)
    shown = sorted({round(q * (len(indices) - 1)) for q in np.linspace(0, 1, 6)})
    chart = Chart(
        "samples",
        f"Accuracy of {net} on D(u_i) against the number of training samples",
        "training samples",
        "test accuracy",
        tuple(Series.of(f"i = {indices[i] + 1}", ns, accuracy[:, i]) for i in shown),
        alt=f"With {many} samples the accuracy is {accuracy[-1, 0]:.2f} at the first and {accuracy[-1, -1]:.2f} at the "
        "last direction.",
        caption=f"sigma = {sigma:g}, eps = {eps:g}, {epochs} epochs. One network per point.",
        log_x=True,
    )
    return StudyResult(
        measured=f"{net}, {len(indices)} directions, {few} to {many} samples: the worst direction has {worst:.3f} with "
        f"{many} samples.",
        numbers={
            "Spearman(index, accuracy averaged over numbers of samples)": order,
            f"worst direction with {many} samples": Estimate(worst),
            f"Spearman(index, samples needed), {net}": need,
            f"indices that need more than {few} samples and no more than {many}, {net}": Estimate(
                float(((needed > few) & (needed <= many)).sum())
            ),
        },
        figures=(chart,),
    )


def samples_needed(ns: d.Array, accuracy: d.Array, bar: float = 0.75) -> d.Array:
    """For each index the number of samples from which on the accuracy [ns, indices] stays above `bar`.

    Half way from chance to perfect. Between two numbers of samples the accuracy is taken to rise linearly in their
    logarithm; an index that never gets there counts as needing ten times the most.
    """
    found = np.full(accuracy.shape[1], 10.0 * ns[-1])
    for i, row in enumerate(accuracy.T):
        low = np.flatnonzero(row < bar)  # the last one decides: what comes before it has not stayed
        if len(low) == 0:
            found[i] = ns[0]
        elif low[-1] < len(ns) - 1:
            k = low[-1]
            part = (bar - row[k]) / (row[k + 1] - row[k])
            found[i] = float(np.exp(np.interp(part, [0, 1], np.log(ns[k : k + 2]))))
    return found
