"""Fig. 5: the first anisotropy directions of a network, in pixels and in Fourier space, and their spectrum.

The second moment of the gradient is measured in independent groups of networks (each kept on disk, so a killed run goes
on), and every number's error comes from leaving one group out at a time. By default the last layer is averaged out in
closed form (`head="marginal"`), which needs far fewer networks; a smaller number of networks is also measured as the
paper does it, to hold the spectrum against the Marchenko-Pastur band of an isotropic network.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from biascope.ensembles import record
from biascope.geometry import NADs, nads
from biascope.linalg import marchenko_pastur, principal_angles, psd_eigh, subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.drawing import save
from biascope.studies.estimates import jackknife_error
from biascope.studies.nad.anisotropy import Reference, published_directions
from biascope.studies.nad.directional import architecture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "The first anisotropy directions of a convolutional network are concentrated on a few Fourier frequencies, "
    "and its eigenvalues decay far faster than sampling alone would make them."
)
STRONGEST = 0.05  # share of frequencies; a random direction has about 20 % of its energy there


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
    net: Annotated[str, "architecture, a name of the registry"] = "lenet",
    image_size: Annotated[int, "side of the grey input image"] = 32,
    networks: Annotated[int, "networks with the last layer averaged out"] = 256,
    sampled: Annotated[int, "networks with a sampled last layer, as in the paper"] = 96,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 8,
    step: Annotated[float, "finite-difference step h"] = 100.0,
    precision: Annotated[Literal["auto", "float32", "tf32", "fp16"], "of the networks; auto: tf32 on CUDA"] = "auto",
    reference: Reference = "",
) -> StudyResult:
    """First directions of an architecture in pixels and Fourier space, with the spectrum."""
    shape, D = (1, image_size, image_size), image_size**2
    kind = ("tf32" if run.device.startswith("cuda") else "float32") if precision == "auto" else precision
    factory = record(architecture(net, image_size, outputs=1))

    def measure(head: str, total: int) -> tuple[list[Tensor], int]:
        """Second moments [D, D] of the groups and the number of networks in all."""
        size = max(1, total // groups)

        def one(i: int) -> dict[str, Value]:
            seed = derive(run.seed, head, i)
            # one evaluation point for everything, as in the paper: it belongs to the question, not to the sample
            x = torch.randn(shape, generator=torch.Generator().manual_seed(derive(run.seed, "x")))
            found = nads(
                factory,
                shape,
                size,
                step=step,
                device=run.device,
                seed=seed,
                x=x,
                head=head,  # type: ignore[arg-type]
                precision=kind,
            )
            U = found.directions.flatten(1)
            return {"moment": ((U.T * found.eigenvalues) @ U).float()}

        made = [run.cached(f"{head} {i}", lambda i=i: one(i)) for i in progress(range(groups), f"{head} heads")]  # type: ignore[misc]
        return [torch.as_tensor(each["moment"]).double() for each in made], size * groups

    moments, count = measure("marginal", networks)
    plain, plain_count = measure("sampled", sampled)
    values, vectors = psd_eigh(torch.stack(moments).mean(0))
    plain_values = psd_eigh(torch.stack(plain).mean(0)).values
    band = marchenko_pastur(plain_count, D, float(plain_values.sum()) / D)
    outside = int(band.outliers(plain_values).sum())

    def jackknife(number: Callable[[Tensor, Tensor], float]) -> Estimate:
        """A function of (eigenvalues, directions [k, side, side]), its error from leaving out one group at a time."""
        whole = number(values, vectors.T.reshape(-1, image_size, image_size))
        if groups < 3:
            return Estimate(whole, None, count)
        return Estimate(whole, jackknife_error([number(*kept) for kept in halves]), count)

    halves = []
    if groups >= 3:
        for i in range(groups):
            found = psd_eigh(torch.stack([m for j, m in enumerate(moments) if j != i]).mean(0))
            halves.append((found.values, found.vectors.T.reshape(-1, image_size, image_size)))
    far = min(100, D)
    numbers = {
        "energy of u_1 to u_3 in their strongest 5 % of frequencies": jackknife(lambda _, u: concentration(u[:3])),
        "energy of u_1 at DC": jackknife(lambda _, u: float(energy(u[:1])[0, 0, 0])),
        **{f"lambda_{k} / lambda_1": jackknife(lambda v, _, k=k: float(v[k - 1] / v[0])) for k in (10, far)},  # type: ignore[misc]
        "eigenvalues above the Marchenko-Pastur band, sampled heads": Estimate(float(outside), None, plain_count),
    }
    charts = [
        spectrum_chart(net, values, plain_values, band.upper, count, plain_count),
        frequency_chart(vectors, image_size),
    ]
    said = ""
    published = published_directions(net, reference, D)
    if published is not None:
        for k in (1, 10, 50):
            numbers[f"overlap with the published first {k}"] = jackknife(
                lambda _, u, k=k: subspace_overlap(u[:k].flatten(1).T, published[:k].T)  # type: ignore[misc]
            )
        angles = principal_angles(vectors[:, :10], published[:10].T).rad2deg()
        numbers["largest principal angle of the first 10, degrees"] = Estimate(float(angles[-1]), None, count)
        overlap = numbers["overlap with the published first 10"]
        said = f" The span of the first ten overlaps the published one by {overlap} (random: {10 / D:.2f})."
        charts.append(overlap_chart(vectors, published, D))
        run.log(**{f"principal_angle_{i + 1}": float(angle) for i, angle in enumerate(angles)})
    errors = torch.full_like(values, float("nan"))
    if groups >= 3:
        left = torch.stack([kept for kept, _ in halves])
        errors = ((groups - 1) / groups * (left - left.mean(0)).square().sum(0)).sqrt()
    directions = vectors.T[:64].reshape(-1, *shape).float().contiguous()
    method = "finite-difference"
    result = NADs(directions, values[:64], errors[:64], float(values.sum()), count, run.seed, method, step, "marginal")
    run.save_arrays(
        "nads",
        directions=directions,
        eigenvalues=values,
        standard_errors=errors,
        sampled_eigenvalues=plain_values,
    )
    _picture(run, result)

    concentrated, decay = next(iter(numbers.values())), numbers[f"lambda_{far} / lambda_1"]
    confirmed = concentrated.value - 2 * (concentrated.standard_error or 0.0) > 0.5 and outside >= 3
    return StudyResult(
        verdict="confirmed" if confirmed else "not confirmed",
        claim=CLAIM,
        measured=f"The strongest 5 % of frequencies hold {concentrated} of the energy of u_1 to u_3 "
        f"(about 0.2 for random directions); lambda_{far} / lambda_1 is {decay}; {outside} eigenvalues of "
        f"{plain_count} networks with sampled heads lie above the band of an isotropic one.{said}",
        numbers=numbers,
        figures=tuple(charts),
    )


def energy(directions: Tensor) -> Tensor:
    """|FFT|^2 of images [k, side, side], each adding up to 1, DC at [0, 0]."""
    power = torch.fft.fft2(directions.double()).abs().square()
    shares: Tensor = power / power.sum((-2, -1), keepdim=True)
    return shares


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


def frequency_chart(vectors: Tensor, side: int) -> Chart:
    """Energy of the first three directions over the distance from DC."""
    k = torch.fft.fftfreq(side, 1 / side)
    radius = (k[:, None] ** 2 + k[None, :] ** 2).sqrt().round().long()
    power = energy(vectors.T[:3].reshape(-1, side, side))
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


def overlap_chart(vectors: Tensor, published: Tensor, D: int) -> Chart:
    """Overlap with the published span, for each number of directions."""
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


def _picture(run: Run, found: NADs) -> None:
    """Pixels and Fourier space as a picture, where matplotlib is there."""
    try:
        figure = found.plot()
    except ImportError:
        return
    import matplotlib.pyplot as plt

    save(figure, run.path / "figures", "directions", dpi=150)
    plt.close(figure)
