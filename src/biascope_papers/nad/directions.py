"""Figs. 5 and 13 to 16: the anisotropy directions of a network, in pixels and in Fourier space, and their spectrum.

The second moment of the gradient is measured in independent groups of networks, and every number's error comes from
leaving one group out at a time. By default the last layer is averaged out in closed form (`head="marginal"`); a smaller
number of networks is also measured as the paper does it, to compare the spectrum with the Marchenko-Pastur band.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from biascope import nads
from biascope.ensembles import Initialiser, record
from biascope.geometry import NADs
from biascope.linalg import marchenko_pastur, principal_angles, psd_eigh, subspace_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import jackknife_error, rank_correlation
from biascope.studies.pictures import direction_picture, keep_picture
from biascope.support import derive, generator, progress
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d

CAPTION = "The first directions in pixels and in Fourier space (zero frequency in the centre), and the eigenvalues."
Pairs = tuple[Tensor, Tensor]
PLACES: dict[str, dict[str, Callable[[Tensor], float]]] = {  # where the paper's figure shows the energy [k, n, n]
    "resnet18": {"energy of u_1 to u_3 on multiples of 4": lambda e: float(e[:3, ::4, ::4].sum((1, 2)).mean())},
    "densenet121": {
        "energy of u_1 at (0, 0)": lambda e: float(e[0, 0, 0]),
        "energy of u_2 and u_3 at (0, n/2) and (n/2, 0)": lambda e: float(highest(e[1:3]).mean()),
    },
}
FIRST, EVERY = 20, 50  # of Figs. 13 to 16
RANDOM = 0.05 * (1 + np.log(20))  # expected energy of noise in its strongest 5 % of frequencies


@study(
    "nad/fig5",
    sizes={
        "smoke": {"image_size": 16, "networks": 64, "sampled": 256, "groups": 4},
        "laptop": {},
        "paper": {"networks": 10_000, "sampled": 10_000, "groups": 10},
    },
)
def fig5(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    networks: Annotated[int, "networks with the last layer averaged out"] = 256,
    sampled: Annotated[int, "networks with a sampled last layer, as in the paper"] = 96,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 8,
    step: a.Step = 100.0,
    precision: Annotated[Literal["auto", "float32", "tf32", "fp16"], "of the networks; auto: tf32 on CUDA"] = "auto",
    reference: a.Reference = "",
) -> StudyResult:
    """First directions of an architecture in pixels and Fourier space, with the spectrum."""
    D, far = image_size**2, min(100, image_size**2)
    kind = ("tf32" if run.device.startswith("cuda") else "float32") if precision == "auto" else precision
    factory = record(d.architecture(net, image_size, outputs=1))
    found = Groups.of(*_moments(run, factory, image_size, "marginal", networks, groups, step, kind))
    plain, plain_count = _moments(run, factory, image_size, "sampled", sampled, groups, step, kind)
    plain_values = psd_eigh(plain.mean(0)).values
    band = marchenko_pastur(plain_count, D, float(plain_values.sum()) / D)
    outside = int(band.outliers(plain_values).sum())
    strong = "energy of u_1 to u_3 in their strongest 5 % of frequencies"
    numbers = {
        strong: found.estimate(lambda _, u: a.concentration(u[:3])),
        "energy of u_1 at DC": found.estimate(lambda _, u: float(a.energy(u[:1])[0, 0, 0])),
        **{f"lambda_{k} / lambda_1": found.estimate(lambda v, _, k=k: float(v[k - 1] / v[0])) for k in (10, far)},  # type: ignore[misc]
        "eigenvalues above the Marchenko-Pastur band, sampled heads": Estimate(float(outside), None, plain_count),
    }
    findings = ""
    for name, share in PLACES.get(net, {}).items():
        numbers[name] = found.estimate(lambda _, u, share=share: share(a.energy(u[:3])))  # type: ignore[misc]
        findings += f" {name[0].upper()}{name[1:]}: {numbers[name]}."
    directions = found.whole[1]
    charts = [
        spectrum_chart(net, found.whole[0], plain_values, band.upper, found.count, plain_count),
        frequency_chart(directions[:3]),
    ]
    published = a.published_directions(net, reference, D)
    if published is not None:
        for k in (1, 10, 50):
            numbers[f"overlap with the published first {k}"] = found.estimate(
                lambda _, u, k=k: subspace_overlap(u[:k].flatten(1).T, published[:k].T)  # type: ignore[misc]
            )
        angles = principal_angles(directions[:10].flatten(1).T, published[:10].T).rad2deg()
        numbers["largest principal angle of the first 10, degrees"] = Estimate(float(angles[-1]), None, found.count)
        overlap = numbers["overlap with the published first 10"]
        findings = (
            f" The span of the first ten overlaps the published one by {overlap} (random: {10 / D:.2f}).{findings}"
        )
        charts.append(overlap_chart(directions, published))
        run.log(**{f"principal_angle_{i + 1}": float(angle) for i, angle in enumerate(angles)})
    _keep(run, found, step, plain_values)
    return StudyResult(
        measured=f"The strongest 5 % of frequencies hold {numbers[strong]} of the energy of u_1 to u_3 (about 0.2 for "
        f"random directions).{findings}",
        numbers=numbers,
        figures=tuple(charts),
    )


def _moments(
    run: Run, factory: Initialiser, side: int, head: Any, total: int, groups: int, step: float, precision: Any
) -> tuple[Tensor, int]:
    """Second moments [groups, D, D] of independent groups of networks, and the number of networks in all."""
    shape, size = (1, side, side), max(1, total // groups)
    # one evaluation point for everything, as in the paper: it belongs to the question, not to the sample
    x = torch.randn(shape, generator=generator(run.seed, "x"))

    def one(i: int) -> dict[str, Any]:
        found = nads(factory, shape, size, step=step, device=run.device, seed=derive(run.seed, head, i), x=x,
                     head=head, precision=precision)  # fmt: skip
        U = found.directions.flatten(1)
        return {"moment": ((U.T * found.eigenvalues) @ U).float()}

    made = run.cached_each(head, progress(range(groups), f"{head} heads"), one)
    return torch.stack([torch.as_tensor(each["moment"]).double() for each in made]), size * groups


@dataclass(frozen=True)
class Groups:
    """Eigenvalues [D] and directions [D, side, side] of `count` networks, and those with one group of them left out.

    With fewer than three groups none is left out, and nothing has an error.
    """

    count: int
    whole: Pairs
    left_out: tuple[Pairs, ...]

    @classmethod
    def of(cls, moments: Tensor, count: int) -> "Groups":
        """From second moments [groups, D, D]."""
        n, side = len(moments), math.isqrt(moments.shape[1])

        def pairs(matrix: Tensor) -> Pairs:
            values, vectors = psd_eigh(matrix)
            return values, vectors.T.reshape(-1, side, side)

        left_out = [pairs(torch.cat([moments[:i], moments[i + 1 :]]).mean(0)) for i in range(n)] if n > 2 else []
        return cls(count, pairs(moments.mean(0)), tuple(left_out))

    def estimate(self, number: Callable[[Tensor, Tensor], float]) -> Estimate:
        """A function of (eigenvalues, directions) with its error."""
        left = [number(*pairs) for pairs in self.left_out]
        return Estimate(number(*self.whole), jackknife_error(left) if left else None, self.count)


def _keep(run: Run, found: Groups, step: float, plain_values: Tensor) -> None:
    """Store the directions and draw the first ones, where matplotlib is there."""
    values, errors, n = found.whole[0], torch.full_like(found.whole[0], float("nan")), len(found.left_out)
    if n:
        left = torch.stack([pairs[0] for pairs in found.left_out])
        errors = ((n - 1) / n * (left - left.mean(0)).square().sum(0)).sqrt()
    directions = found.whole[1][:64, None].float().contiguous()
    method, trace = "finite-difference", float(values.sum())
    result = NADs(directions, values[:64], errors[:64], trace, found.count, run.seed, method, step, "marginal")
    run.save_arrays(
        "nads", directions=directions, eigenvalues=values, standard_errors=errors, sampled_eigenvalues=plain_values
    )
    try:
        figure = result.plot()
    except ImportError:
        return
    import matplotlib.pyplot as plt

    keep_picture(run, "directions", figure, CAPTION)
    plt.close(figure)


def highest(shares: Tensor) -> Tensor:
    """Energy [k] of shares [k, n, n] at the highest frequencies of the two axes, (0, n/2) and (n/2, 0)."""
    half = shares.shape[-1] // 2
    return shares[:, 0, half] + shares[:, half, 0]


def spectrum_chart(net: str, values: Tensor, plain: Tensor, edge: float, count: int, plain_count: int) -> Chart:
    """Eigenvalues of both estimates and the upper edge of the band."""
    shown = np.unique(np.geomspace(1, len(values), 80).round().astype(int))
    plain_shown = [i for i in shown if plain[i - 1] > 1e-9 * plain[0]]
    return Chart(
        "spectrum",
        f"Eigenvalues of the gradient's second moment, {net}",
        "index",
        "eigenvalue",
        (
            Series.of(f"last layer averaged out, {count} networks", shown, values[shown - 1]),
            Series.of(
                f"sampled, {plain_count} networks", plain_shown, [plain[i - 1] for i in plain_shown], None, "dashed"
            ),
            Series.of("upper edge for an isotropic network, sampled", [1, len(values)], [edge, edge], style="dashed"),
        ),
        alt="Both spectra fall steeply over the index; the first sampled eigenvalues lie above the isotropic edge.",
        log_x=True,
        log_y=True,
    )


def frequency_chart(directions: Tensor) -> Chart:
    """Energy of directions [k, side, side] over the distance from DC."""
    return Chart(
        "frequencies",
        "Where the first directions live in Fourier space",
        "distance from DC, cycles per image",
        "share of energy",
        tuple(Series.of(f"u_{i + 1}", range(len(row)), row) for i, row in enumerate(a.radial(directions))),
        alt="The energy of the first three directions sits at few distances from DC.",
    )


def overlap_chart(directions: Tensor, published: Tensor) -> Chart:
    """Overlap with the published span, for each number of directions."""
    vectors, D = directions.flatten(1).T, published.shape[1]
    ks = range(1, len(published) + 1)
    return Chart(
        "overlap",
        "Overlap with the published directions",
        "number of leading directions k",
        "mean squared cosine of the principal angles",
        (
            Series.of("measured", ks, [subspace_overlap(vectors[:, :k], published[:k].T) for k in ks]),
            Series.of("random subspaces", ks, [k / D for k in ks], style="dashed"),
        ),
        alt="The overlap stays far above that of random subspaces for every number of directions.",
    )


@study("nad/fig13", sizes={"smoke": {"image_size": 16, "networks": 32}, "laptop": {"networks": 256}, "paper": {}})
def fig13(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    precision: d.Arithmetic = "auto",
    columns: Annotated[int, "directions side by side in the picture"] = 10,
    reference: a.Reference = "",
) -> StudyResult:
    """More anisotropy directions of an architecture, in pixels and in Fourier space."""
    net, image_size = source.net, source.image_size
    U, _ = a.directions_of(run, source, precision)
    indices = [*range(min(FIRST, len(U))), *range(EVERY, len(U), EVERY)]
    titles = [f"$u_{{{i + 1}}}$" for i in indices]
    direction_picture(run, "directions", f"Anisotropy directions of {net}", U[indices], titles, columns)
    shares = np.array([a.concentration(u[None]) for u in U])
    frequency = a.mean_frequency(U)
    first = Estimate.of(shares[:FIRST])
    order = rank_correlation(np.arange(100.0)[: len(U)], frequency[:100])
    numbers = {
        "energy of the first 20 in their strongest 5 % of frequencies": first,
        "the same for random directions": Estimate(float(RANDOM)),
        "lowest energy of a direction in its strongest 5 % of frequencies": Estimate(float(shares.min())),
        "Spearman(index, mean frequency), first 100": order,
        "energy of u_1 at DC": Estimate(float(a.energy(U[:1])[0, 0, 0])),
    }
    if image_size == 32:
        comb = a.energy(U)[:, ::4, ::4].sum((1, 2)).numpy()
        for low, high in ((0, 4), (0, 64), (64, 128)):
            numbers[f"energy at multiples of 4, index {low} to {high - 1}, {net}"] = Estimate.of(comb[low:high])
    published = a.published_directions(net, reference, image_size**2)
    if published is not None:
        for k in (1, 10, 50):
            overlap = subspace_overlap(U[:k].flatten(1).double().T, published[:k].T)
            numbers[f"overlap with the published first {k}"] = Estimate(overlap)
    shown = np.unique(np.geomspace(1, len(U), 80).round().astype(int)) - 1
    relative = frequency[shown] / frequency.max()
    chart = Chart(
        "structure",
        f"Structure of the directions of {net}",
        "index",
        "share of energy; mean frequency over the largest",
        (
            Series.of("energy in the strongest 5 % of frequencies", shown + 1, shares[shown]),
            Series.of("the same for random directions", [1, len(U)], [RANDOM, RANDOM], style="dashed"),
            Series.of("mean frequency / largest frequency", shown + 1, relative, style="points"),
        ),
        alt=f"The share of energy goes from {shares[0]:.2f} at the first to {shares[-1]:.2f} at the last direction.",
        log_x=True,
    )
    return StudyResult(
        measured=f"{net}, {source.networks} networks: the first twenty directions have {first} of their energy in "
        f"their strongest 5 % of frequencies ({RANDOM:.2f} for random ones).",
        numbers=numbers,
        figures=(chart,),
    )
