"""Conjecture 1, directly: is Delta at initialisation along G S G?

The paper looks at G^t along discrete training instead (Fig. 2). Delta itself can be sampled: `geometry_evolution` gives
the derivative of G under gradient flow exactly for every network drawn. Labels do not matter at initialisation for the
squared error (Prop. A.1, study `gih/proposition-a1`), so all labels are 0 here, which takes their noise away. Delta and
G are those of the networks of Fig. 2 at probes N(0, I); G by the paper's recipe (GELU, small probes) is shown beside
it. In every case that can be solved Delta is minus a positive matrix, so the correlation is expected to be negative;
the paper looks at the modulus.

Sampling noise lengthens Delta and shrinks the correlation. Networks come in independent groups, and the "corrected"
correlation has products of different groups in place of ||Delta||^2, which noise does not lengthen; the raw one is a
lower bound of the modulus. G is exact where theory knows it (MLP) and sampled elsewhere; noise left in it lowers both.

Verdict rule, fixed before the first run above smoke size: "highly correlated" is that more than half of ||Delta||^2
lies along GSG, |Corr| > 0.707 (corrected). For every network |Corr(Delta, GSG)| is above that, above what random
rotations of GSG give, and, but for the MLP, not below |Corr(Delta, S)|; each by 2 standard errors (jackknife over
groups). Where |Corr| is within 2 standard errors of 0.707, nothing is tested. (Shown since the first run, and not
judged: the correlation with I, and that with GSG without the mean eigenvalues.)
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.ensembles import record
from biascope.geometry import data_second_moment, geometry_evolution, gsg
from biascope.linalg import psd_eigh
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, below, through
from biascope.studies.invariance.averages import Averages, rotated_away, stacked, without_mean
from biascope.studies.invariance.charts import decide, remark, restricted, together
from biascope.studies.invariance.geometries import initial_geometry, known_geometry
from biascope.studies.invariance.images import Source, said, two_classes
from biascope.studies.invariance.networks import ISOTROPIC, factory, shape_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "At initialisation, with the squared error, the average geometry evolution Delta is highly correlated with GSG."
NETS = ("mlp", "lenet", "resnet18", "vit")
HIGH = math.sqrt(0.5)


@study(
    "gih/conjecture1",
    paper="invariance",
    figure="Conjecture 1",
    claim=CLAIM,
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
    check_count(groups, "groups", least=3)
    check_count(networks, "networks", least=groups)
    shape = shape_of(3, side, nets)
    x = two_classes(run, source, side, per_class)[0].x
    S = data_second_moment(x.to(run.device), normalise=True).cpu()
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    right: dict[str, bool | None] = {}
    for net in nets:
        drawn = {"networks": geometry_networks, "heads": heads, "groups": groups, "norm": False}
        exact = known_geometry(net, shape)
        G = initial_geometry(run, net, shape, **drawn, probe_std=1.0, activation=None)  # type: ignore[arg-type]
        recipe = initial_geometry(run, net, shape, **drawn)  # type: ignore[arg-type]
        target = gsg(G.matrix if exact is None else exact, S)
        Delta = stacked(sampled(run, net, x, networks, groups, probes, batch))
        found = against(Delta, target, S)
        right[net] = as_claimed(net, found)
        numbers |= {f"{net}: {name}": value for name, value in found.items()}
        paper = gsg(recipe.matrix, S)
        numbers[f"{net}: signed Corr(Delta, GSG), G by the paper's recipe, corrected"] = Delta.correlation(paper)
        numbers[f"{net}: sampling noise, share of ||Delta||"] = Estimate(Delta.noise(), None, networks)
        numbers[f"{net}: relative error of G"] = Estimate(G.error, None, G.rows) if exact is None else Estimate(0.0)
        charts += [_sampling(net, Delta, target, networks // groups), _spectrum(net, Delta.mean, target)]
    told = "; ".join(
        f"{net} {numbers[f'{net}: signed Corr(Delta, GSG), corrected']} "
        f"(S: {numbers[f'{net}: signed Corr(Delta, S), corrected']}; GSG randomly rotated: "
        f"{numbers[f'{net}: signed Corr(Delta, GSG), random rotations']}){remark(right[net])}"
        for net in nets
    )
    claim, untested = restricted(CLAIM, networks=(nets, NETS), images=([source], ["cifar10"]))
    return StudyResult(
        verdict=decide(together(right.values()), groups),
        claim=claim,
        measured=f"Signed Corr(Delta, GSG), corrected for sampling noise: {told}. {said(source, side)}, {per_class} "
        f"images per class, squared error, labels 0 (by Prop. A.1 they do not matter), {networks} networks in {groups} "
        f"groups with {probes} probes N(0, I) each.{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )


def sampled(run: Run, net: str, x: Tensor, networks: int, groups: int, probes: int, batch: int) -> list[Tensor]:
    """Delta [D, D] of each of the independent groups of networks, labels 0."""
    recorded = record(factory(net, x.shape[1:], outputs=1, norm=False))
    room = None if torch.device(run.device).type == "cuda" else "1GB"  # more is slower on a CPU

    def one(i: int) -> dict[str, Value]:
        made = geometry_evolution(
            recorded, x, torch.zeros(len(x)), networks // groups, n_probes=probes,
            seed=derive(run.seed, "delta", net, i), device=run.device, max_memory=room, batch=batch,
        )  # fmt: skip
        return {"matrix": made.matrix.float()}

    found = run.cached_each(f"delta {net}", progress(range(groups), f"Delta of {net}", leave=False), one)
    return [torch.as_tensor(each["matrix"]) for each in found]


def against(Delta: Averages, target: Tensor, S: Tensor) -> dict[str, Estimate]:
    """The numbers of the rule, and what stands beside them."""
    null, excess = rotated_away(Delta, target)
    return {
        "signed Corr(Delta, GSG), raw": Delta.correlation(target, between=False),
        "signed Corr(Delta, GSG), corrected": Delta.correlation(target),
        "signed Corr(Delta, GSG), random rotations": null,
        "signed Corr(Delta, GSG) minus random rotations": excess,
        "signed Corr(Delta, S), raw": Delta.correlation(S, between=False),
        "signed Corr(Delta, S), corrected": Delta.correlation(S),
        "signed Corr(Delta, GSG) minus Corr(Delta, S)": Delta.correlation(target, minus=S),
        "signed Corr(Delta, I), corrected": Delta.correlation(torch.eye(len(S), dtype=S.dtype)),
        "signed Corr(Delta, GSG), mean eigenvalues taken out, corrected": without_mean(Delta, target),
    }


def as_claimed(net: str, found: dict[str, Estimate]) -> bool | None:
    """The rule in the module's docstring.

    Example:
        >>> names = ("GSG), corrected", "GSG) minus random rotations", "GSG) minus Corr(Delta, S)")
        >>> numbers = (Estimate(-0.9, 0.02), Estimate(-0.5, 0.02), Estimate(0.0, 0.02))
        >>> as_claimed("lenet", {f"signed Corr(Delta, {a}": b for a, b in zip(names, numbers)})
        True
    """
    whole = found["signed Corr(Delta, GSG), corrected"]
    if not math.isfinite(whole.value) or whole.standard_error is None or not math.isfinite(whole.standard_error):
        return None
    sign = -1.0 if whole.value < 0 else 1.0

    def turned(name: str) -> Estimate:
        return Estimate(sign * found[name].value, found[name].standard_error, found[name].n)

    size = turned("signed Corr(Delta, GSG), corrected")
    high = True if above(size, HIGH) else False if below(size, HIGH) else None
    ahead = net in ISOTROPIC or not below(turned("signed Corr(Delta, GSG) minus Corr(Delta, S)"))
    return together([high, above(turned("signed Corr(Delta, GSG) minus random rotations")), ahead])


def _sampling(net: str, Delta: Averages, target: Tensor, each: int) -> Chart:
    counts = range(3, Delta.R + 1)  # fewer groups have no error
    x = [each * r for r in counts]
    curves = []
    for label, between in (("corrected for noise", True), ("raw", False)):
        found = [Averages(Delta.matrices[:r]).correlation(target, between) for r in counts]
        known = [(n, e) for n, e in zip(x, found) if math.isfinite(e.value)]
        sizes = [Estimate(abs(e.value), e.standard_error, e.n) for _, e in known]
        curves.append(through(label, [n for n, _ in known], sizes))
    null = abs(rotated_away(Delta, target)[0].value)
    return Chart(
        name=f"sampling-{net}",
        title=f"How far Delta lies along GSG, {net}",
        x_label="networks averaged",
        y_label="|Corr(Delta, GSG)|",
        series=(
            *curves,
            Series.of("GSG randomly rotated", x, [null] * len(x), style="dashed"),
            Series.of("half of the squared norm", x, [HIGH] * len(x), style="dashed"),
        ),
        alt="Modulus of the correlation of Delta with GSG against the number of networks, raw and corrected.",
        caption="Noise shrinks the raw correlation; it grows with the networks towards the corrected one.",
    )


def _spectrum(net: str, Delta: Tensor, target: Tensor) -> Chart:
    values, Q = psd_eigh(target.double())
    moved = -((Q.T @ Delta.double() @ Q).diagonal())
    keep = (values > 1e-8 * values[0]) & (moved > 0)
    return Chart(
        name=f"spectrum-{net}",
        title=f"Delta along the eigenvectors of GSG, {net}",
        x_label="eigenvalue of GSG / largest",
        y_label="-v^T Delta v / that of the first",
        series=(
            Series.of("eigenvectors v", values[keep] / values[0], moved[keep] / moved[0].abs(), style="points"),
            Series.of("proportional", [1e-4, 1.0], [1e-4, 1.0], style="dashed"),
        ),
        alt="Minus the quadratic form of Delta at each eigenvector of GSG against its eigenvalue, on logarithmic axes.",
        caption="On the dashed line Delta would be proportional to GSG; only positive values are shown.",
        log_x=True,
        log_y=True,
    )
