"""Conjecture 1, directly: is Delta at initialisation along G S G?

`geometry_evolution` gives the derivative of G under gradient flow exactly for every network drawn. By Prop. A.1 labels
do not matter, so all are 0. Delta and G are those of the networks of Fig. 2 at probes N(0, I); G by the paper's recipe
(GELU, small probes) is shown beside it. Wherever Delta can be solved it is minus a positive matrix, so the correlation
is expected to be negative; the paper looks at the modulus. Sampling noise lengthens Delta: the "corrected" correlation
has products of independent groups in place of ||Delta||^2. G is exact where theory knows it (MLP).
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope import geometry_evolution
from biascope.ensembles import record
from biascope.geometry import data_second_moment, gsg
from biascope.linalg import psd_eigh
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import through
from biascope.support import derive, progress
from biascope_papers.gih.averages import Averages, rotated_away, stacked, without_mean
from biascope_papers.gih.geometries import initial_geometry, known_geometry
from biascope_papers.gih.networks import at_least, factory, scope, shape_of
from biascope_papers.gih.sets import Source, describe, two_classes

NETS = ("mlp", "lenet", "resnet18", "vit")
HIGH = math.sqrt(0.5)


@study(
    "gih/conjecture1",
    sizes={
        "smoke": {"nets": ("mlp", "lenet"), "source": "synthetic", "side": 16, "per_class": 20, "networks": 96,
                  "geometry_networks": 32, "groups": 4, "heads": 16, "probes": 4},
        "laptop": {"nets": ("mlp", "lenet", "resnet18-narrow", "vit-small"), "side": 16, "per_class": 100,
                   "networks": 2400, "geometry_networks": 512},
        "paper": {},
    },
)  # fmt: skip
def conjecture1(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, without normalisation"] = NETS,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    per_class: Annotated[int, "training images per class"] = 5000,
    networks: Annotated[int, "networks drawn for Delta (not stated in the paper)"] = 1000,
    geometry_networks: Annotated[int, "networks drawn for G"] = 1000,
    heads: Annotated[int, "output layers per network drawn for G (1 in the paper)"] = 64,
    groups: Annotated[int, "independent groups of networks, for errors"] = 8,
    probes: Annotated[int, "probe inputs N(0, I) per network of Delta (not stated in the paper)"] = 8,
    batch: Annotated[int, "images per pass; sets the memory, not the result"] = 100,
) -> StudyResult:
    """Correlation of the evolution of G at initialisation with GSG and with S."""
    at_least(3, groups=groups)
    at_least(groups, networks=networks)
    shape = shape_of(3, side, nets)
    x = two_classes(run, source, side, per_class)[0].x
    S = data_second_moment(x.to(run.device), normalise=True).cpu()
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    text: list[str] = []
    for net in nets:
        exact = known_geometry(net, shape)
        G, recipe = (
            initial_geometry(run, net, shape, networks=geometry_networks, heads=heads, groups=groups, norm=False,
                             probe_std=std, activation=activation)
            for std, activation in ((1.0, None), (1e-3, "gelu"))
        )  # fmt: skip
        target = gsg(G.matrix if exact is None else exact, S)
        Delta = stacked(sampled(run, net, x, networks, groups, probes, batch))
        found = compared(Delta, target, S)
        found["signed Corr(Delta, GSG), G by the paper's recipe, corrected"] = Delta.correlation(gsg(recipe.matrix, S))
        found["sampling noise, share of ||Delta||"] = Estimate(Delta.noise(), None, networks)
        found["relative error of G"] = Estimate(G.error, None, G.rows) if exact is None else Estimate(0.0)
        numbers |= {f"{net}: {name}": value for name, value in found.items()}
        text.append(f"{net} {found['signed Corr(Delta, GSG), corrected']}")
        charts += [_sampling(net, Delta, target, networks // groups), _spectrum(net, Delta.mean, target)]
    return StudyResult(
        measured=f"Signed Corr(Delta, GSG), corrected for sampling noise: {'; '.join(text)}. {describe(source, side)}."
        f"{scope(networks=(nets, NETS), images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(charts),
    )


def sampled(run: Run, net: str, x: Tensor, networks: int, groups: int, probes: int, batch: int) -> list[Tensor]:
    """Delta [D, D] of each of the independent groups of networks, labels 0."""
    recorded = record(factory(net, x.shape[1:], outputs=1, norm=False))
    room = None if torch.device(run.device).type == "cuda" else "1GB"  # more is slower on a CPU

    def one(i: int) -> dict[str, Tensor]:
        made = geometry_evolution(
            recorded, x, torch.zeros(len(x)), networks // groups, n_probes=probes,
            seed=derive(run.seed, "delta", net, i), device=run.device, max_memory=room, batch=batch,
        )  # fmt: skip
        return {"matrix": made.matrix.float()}

    found = run.cached_each(f"delta {net}", progress(range(groups), f"Delta of {net}", leave=False), one)
    return [torch.as_tensor(each["matrix"]) for each in found]


def compared(Delta: Averages, target: Tensor, S: Tensor) -> dict[str, Estimate]:
    """The numbers of the rule, and what stands beside them."""
    null, excess = rotated_away(Delta, target)
    return {
        "signed Corr(Delta, GSG), raw": Delta.correlation(target, between=False),
        "signed Corr(Delta, GSG), corrected": Delta.correlation(target),
        "signed Corr(Delta, GSG), random rotations": null,
        "signed Corr(Delta, GSG) minus random rotations": excess,
        "signed Corr(Delta, S), corrected": Delta.correlation(S),
        "signed Corr(Delta, GSG), mean eigenvalues taken out, corrected": without_mean(Delta, target),
    }


def _sampling(net: str, Delta: Averages, target: Tensor, each: int) -> Chart:
    counts = range(3, Delta.R + 1)  # fewer groups have no error
    x = [each * r for r in counts]
    curves = []
    for label, between in (("corrected for noise", True), ("raw", False)):
        found = [Averages(Delta.matrices[:r]).correlation(target, between) for r in counts]
        known = {n: Estimate(abs(e.value), e.standard_error) for n, e in zip(x, found) if math.isfinite(e.value)}
        curves.append(through(label, known, known.values()))
    levels = {"GSG randomly rotated": abs(rotated_away(Delta, target)[0].value), "half of the squared norm": HIGH}
    flat = [Series.of(label, x, [level] * len(x), style="dashed") for label, level in levels.items()]
    return Chart(
        f"sampling-{net}", f"How far Delta lies along GSG, {net}", "networks averaged", "|Corr(Delta, GSG)|",
        (*curves, *flat),
        "Modulus of the correlation of Delta with GSG against the number of networks, raw and corrected.",
        "Noise shrinks the raw correlation; it grows with the networks towards the corrected one.",
    )  # fmt: skip


def _spectrum(net: str, Delta: Tensor, target: Tensor) -> Chart:
    values, Q = psd_eigh(target.double())
    moved = -((Q.T @ Delta.double() @ Q).diagonal())
    keep = (values > 1e-8 * values[0]) & (moved > 0)
    series = (
        Series.of("eigenvectors v", values[keep] / values[0], moved[keep] / moved[0].abs(), style="points"),
        Series.of("proportional", [1e-4, 1.0], [1e-4, 1.0], style="dashed"),
    )
    return Chart(
        f"spectrum-{net}", f"Delta along the eigenvectors of GSG, {net}", "eigenvalue of GSG / largest",
        "-v^T Delta v / that of the first", series,
        "Minus the quadratic form of Delta at each eigenvector of GSG against its eigenvalue, on logarithmic axes.",
        "On the dashed line Delta would be proportional to GSG; only positive values are shown.",
        log_x=True, log_y=True,
    )  # fmt: skip
