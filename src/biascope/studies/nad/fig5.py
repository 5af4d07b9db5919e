"""Fig. 5: the first anisotropy directions of a network, in pixels and in Fourier space, and their spectrum.

The second moment of the gradient is measured in independent groups of networks (each kept on disk, so a killed run goes
on), and every number's error comes from leaving one group out at a time. By default the last layer is averaged out in
closed form (`head="marginal"`), which needs far fewer networks; a smaller number of networks is also measured as the
paper does it, to hold the spectrum against the Marchenko-Pastur band of an isotropic network.

Rule for the verdict: the strongest 5 % of frequencies hold more than half of the energy of u_1 to u_3 even two standard
errors down, and at least three eigenvalues of sampled heads lie above the band. Added after the paper-size runs were
seen (`PLACES`): of ResNet-18 the comb of multiples of 4 holds more than half of the energy of u_1 to u_3, of
DenseNet-121 (0, 0) that of u_1 and the bins (0, n/2) and (n/2, 0) that of u_2 and u_3, not ordered from low to high
frequencies; again two standard errors down. Later runs of both are judged by it.

That the frequencies are those of high accuracy in Fig. 1 is judged by `nad/fig5-support`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from biascope.ensembles import Initialiser, record
from biascope.geometry import NADs, nads
from biascope.linalg import marchenko_pastur, principal_angles, psd_eigh, subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, decide, jackknife_error
from biascope.studies.nad.anisotropy import Reference, published_directions
from biascope.studies.nad.directional import Net, architecture
from biascope.studies.pictures import keep_picture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CAPTION = "The first directions in pixels and in Fourier space (zero frequency in the centre), and the eigenvalues."
CLAIM = (
    "The first anisotropy directions of a convolutional network are concentrated on a few Fourier frequencies (of "
    "ResNet-18 on a comb, of DenseNet-121 on zero and then on the highest ones), and its eigenvalues decay far faster "
    "than sampling alone would make them. (That these are the frequencies of high accuracy in Fig. 1 is not judged.)"
)
Pairs = tuple[Tensor, Tensor]
STRONGEST = 0.05  # share of frequencies; a random direction has about 20 % of its energy there
PLACES: dict[str, dict[str, Callable[[Tensor], float]]] = {  # where the paper's figure shows the energy [k, n, n]
    "resnet18": {"energy of u_1 to u_3 on multiples of 4": lambda e: float(e[:3, ::4, ::4].sum((1, 2)).mean())},
    "densenet121": {
        "energy of u_1 at (0, 0)": lambda e: float(e[0, 0, 0]),
        "energy of u_2 and u_3 at (0, n/2) and (n/2, 0)": lambda e: float(highest(e[1:3]).mean()),
    },
}


@study(
    "nad/fig5",
    paper="nad",
    figure="5",
    claim=CLAIM,
    sizes={
        "smoke": {"image_size": 16, "networks": 64, "sampled": 256, "groups": 4},
        "laptop": {},
        "paper": {"networks": 10_000, "sampled": 10_000, "groups": 10},
    },
)
def fig5(
    run: Run,
    *,
    net: Net = "lenet",
    image_size: Annotated[int, "side of the grey input image"] = 32,
    networks: Annotated[int, "networks with the last layer averaged out"] = 256,
    sampled: Annotated[int, "networks with a sampled last layer, as in the paper"] = 96,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 8,
    step: Annotated[float, "finite-difference step h"] = 100.0,
    precision: Annotated[Literal["auto", "float32", "tf32", "fp16"], "of the networks; auto: tf32 on CUDA"] = "auto",
    reference: Reference = "",
) -> StudyResult:
    """First directions of an architecture in pixels and Fourier space, with the spectrum."""
    D = image_size**2
    kind = ("tf32" if run.device.startswith("cuda") else "float32") if precision == "auto" else precision
    factory = record(architecture(net, image_size, outputs=1))
    found = Groups.of(*_moments(run, factory, image_size, "marginal", networks, groups, step, kind))
    plain, plain_count = _moments(run, factory, image_size, "sampled", sampled, groups, step, kind)
    values, directions = found.whole
    plain_values = psd_eigh(plain.mean(0)).values
    band = marchenko_pastur(plain_count, D, float(plain_values.sum()) / D)
    outside = int(band.outliers(plain_values).sum())
    far = min(100, D)
    numbers = {
        "energy of u_1 to u_3 in their strongest 5 % of frequencies": found.estimate(lambda _, u: concentration(u[:3])),
        "energy of u_1 at DC": found.estimate(lambda _, u: float(energy(u[:1])[0, 0, 0])),
        **{f"lambda_{k} / lambda_1": found.estimate(lambda v, _, k=k: float(v[k - 1] / v[0])) for k in (10, far)},  # type: ignore[misc]
        "eigenvalues above the Marchenko-Pastur band, sampled heads": Estimate(float(outside), None, plain_count),
    }
    placed = {
        name: found.estimate(lambda _, u, share=share: share(energy(u[:3])))  # type: ignore[misc]
        for name, share in PLACES.get(net, {}).items()
    }
    numbers |= placed
    charts = [
        spectrum_chart(net, values, plain_values, band.upper, found.count, plain_count),
        frequency_chart(directions[:3]),
    ]
    said = ""
    published = published_directions(net, reference, D)
    if published is not None:
        for k in (1, 10, 50):
            numbers[f"overlap with the published first {k}"] = found.estimate(
                lambda _, u, k=k: subspace_overlap(u[:k].flatten(1).T, published[:k].T)  # type: ignore[misc]
            )
        angles = principal_angles(directions[:10].flatten(1).T, published[:10].T).rad2deg()
        numbers["largest principal angle of the first 10, degrees"] = Estimate(float(angles[-1]), None, found.count)
        overlap = numbers["overlap with the published first 10"]
        said = f" The span of the first ten overlaps the published one by {overlap} (random: {10 / D:.2f})."
        charts.append(overlap_chart(directions, published))
        run.log(**{f"principal_angle_{i + 1}": float(angle) for i, angle in enumerate(angles)})
    _keep(run, found, step, plain_values)
    concentrated, decay = next(iter(numbers.values())), numbers[f"lambda_{far} / lambda_1"]
    judged = (concentrated, *placed.values())
    said += "".join(f" {name[0].upper()}{name[1:]}: {share}." for name, share in placed.items())
    return StudyResult(
        verdict=decide(all(above(share, 0.5) for share in judged) and outside >= 3, judged),
        claim=CLAIM,
        measured=f"The strongest 5 % of frequencies hold {concentrated} of the energy of u_1 to u_3 "
        f"(about 0.2 for random directions); lambda_{far} / lambda_1 is {decay}; {outside} eigenvalues of "
        f"{plain_count} networks with sampled heads lie above the band of an isotropic one.{said} Not judged: "
        "whether these are the frequencies of high accuracy in Fig. 1.",
        numbers=numbers,
        figures=tuple(charts),
    )


def _moments(
    run: Run, factory: Initialiser, side: int, head: str, total: int, groups: int, step: float, precision: str
) -> tuple[Tensor, int]:
    """Second moments [groups, D, D] of independent groups of networks, and the number of networks in all."""
    shape, size = (1, side, side), max(1, total // groups)
    # one evaluation point for everything, as in the paper: it belongs to the question, not to the sample
    x = torch.randn(shape, generator=generator(run.seed, "x"))

    def one(i: int) -> dict[str, Value]:
        found = nads(factory, shape, size, step=step, device=run.device, seed=derive(run.seed, head, i), x=x,
                     head=head, precision=precision)  # type: ignore[arg-type]  # fmt: skip
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


def energy(directions: Tensor) -> Tensor:
    """|FFT|^2 of images [k, side, side], each adding up to 1, DC at [0, 0]."""
    power = torch.fft.fft2(directions.double()).abs().square()
    shares: Tensor = power / power.sum((-2, -1), keepdim=True)
    return shares


def highest(shares: Tensor) -> Tensor:
    """Energy [k] of shares [k, n, n] at the highest frequencies of the two axes, (0, n/2) and (n/2, 0).

    Example:
        >>> highest(energy(torch.tensor([1.0, -1.0]).repeat(8).view(1, 4, 4)))
        tensor([1.], dtype=torch.float64)
    """
    half = shares.shape[-1] // 2
    return shares[:, 0, half] + shares[:, half, 0]


def concentration(directions: Tensor) -> float:
    """Mean over directions of the energy in the strongest 5 % of frequencies."""
    flat = energy(directions).flatten(1)
    strongest = max(1, round(STRONGEST * flat.shape[1]))
    return float(flat.topk(strongest, dim=1).values.sum(1).mean())


def spectrum_chart(net: str, values: Tensor, plain: Tensor, edge: float, count: int, plain_count: int) -> Chart:
    """Eigenvalues of both estimates and the upper edge of the band."""
    shown = sorted({int(i) for i in np.geomspace(1, len(values), 80).round()})
    plain_shown = [i for i in shown if plain[i - 1] > 1e-9 * plain[0]]
    return Chart(
        name="spectrum",
        title=f"Eigenvalues of the gradient's second moment, {net}",
        x_label="index",
        y_label="eigenvalue",
        series=(
            Series.of(f"last layer averaged out, {count} networks", shown, values[[i - 1 for i in shown]]),
            Series.of(
                f"sampled, {plain_count} networks", plain_shown, plain[[i - 1 for i in plain_shown]], style="dashed"
            ),
            Series.of("upper edge for an isotropic network, sampled", [1, len(values)], [edge, edge], style="dashed"),
        ),
        alt="Both spectra fall steeply over the index; the first sampled eigenvalues lie above the isotropic edge.",
        log_x=True,
        log_y=True,
    )


def frequency_chart(directions: Tensor) -> Chart:
    """Energy of directions [k, side, side] over the distance from DC."""
    side = directions.shape[-1]
    k = torch.fft.fftfreq(side, 1 / side)
    radius = (k[:, None] ** 2 + k[None, :] ** 2).sqrt().round().long()
    power = energy(directions)
    radii = list(range(int(radius.max()) + 1))
    return Chart(
        name="frequencies",
        title="Where the first directions live in Fourier space",
        x_label="distance from DC, cycles per image",
        y_label="share of energy",
        series=tuple(
            Series.of(f"u_{i + 1}", radii, [float(power[i][radius == r].sum()) for r in radii])
            for i in range(len(power))
        ),
        alt="The energy of the first three directions sits at few distances from DC.",
    )


def overlap_chart(directions: Tensor, published: Tensor) -> Chart:
    """Overlap with the published span, for each number of directions."""
    vectors, D = directions.flatten(1).T, published.shape[1]
    ks = list(range(1, len(published) + 1))
    return Chart(
        name="overlap",
        title="Overlap with the published directions",
        x_label="number of leading directions k",
        y_label="mean squared cosine of the principal angles",
        series=(
            Series.of("measured", ks, [subspace_overlap(vectors[:, :k], published[:k].T) for k in ks]),
            Series.of("random subspaces", ks, [k / D for k in ks], style="dashed"),
        ),
        alt="The overlap stays far above that of random subspaces for every number of directions.",
    )
