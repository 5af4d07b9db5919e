"""Conjecture 2 (the hypothesis itself): along training, G changes only within the leading eigenvectors of GSG.

For a matrix M and the first k eigenvectors Q of GSG the share of M inside is ||Q^T M Q|| / ||M||. It is measured for
M = Delta^t, where each network would move next under gradient flow on its loss, and for M = G^t - G^0, where it has
moved so far, and compared with random subspaces of as many dimensions and with the leading eigenvectors of S and of G
alone. Squared norms come from products of different networks, so that what a single network does by chance does not
count (`averages`). Training is that of Fig. 2, cross-entropy; probes N(0, I) are the same at all times, and G is that
of the networks as they are at probes N(0, I).

The paper gives no cut-off. Here Eig(GSG) is the span of the eigenvectors that add up to `energy` (99 %) of its trace;
charts show all k, for by footnote 4 invariance is gradual.

Verdict rule, fixed before the first run above smoke size: for every network, at every epoch looked at, the share of
Delta^t within Eig(GSG), and after the start that of G^t - G^0, is above 0.9 and above that of random subspaces, by 2
standard errors (jackknife over networks). A share with a standard error above 0.1 is not judged: at the start networks
have so little of Delta in common that many more are needed (study `gih/conjecture1` draws them). Where a share is
within 2 standard errors of 0.9, or none can be judged, nothing is tested, unless another part is not as claimed. (In
the first run shares of networks with nothing in common counted as 0; without these the MLP cannot be told.) The
shares of single networks, which have no such noise, are shown beside these and not judged: the conjecture is about the
mean.
"""

import math
from typing import Annotated

import torch

from biascope.arguments import check_count
from biascope.geometry import data_second_moment, gsg, subspace_size
from biascope.studies.estimates import above, below, through
from biascope.studies.invariance.charts import decide, remark, restricted, together
from biascope.studies.invariance.fig2_8 import NETS, TRUE_LABELS, OnImages
from biascope.studies.invariance.geometries import initial_geometry, known_geometry
from biascope.studies.invariance.images import said, two_classes
from biascope.studies.invariance.inside import KINDS, Inside, moved
from biascope.studies.invariance.networks import shape_of
from biascope.studies.invariance.tracking import Descent, common_probes
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "During training the average geometry changes within the leading eigenvectors of GSG only: Eig(Delta^t) is "
    "contained in Eig(GSG) at all times."
)
INSIDE = 0.9
BLURRED = 0.1  # standard error of a share that is not judged
SHARES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of the dimensions


@study(
    "gih/conjecture2",
    paper="invariance",
    figure="Conjecture 2",
    claim=CLAIM,
    sizes={
        "smoke": {"nets": ("mlp", "lenet"), "source": "synthetic", "side": 16, "per_class": 30, "networks": 32,
                  "heads": 16, "runs": 4, "epochs": 4, "probes": 2},
        "laptop": {"nets": ("mlp", "lenet", "resnet18-narrow", "vit-small"), "side": 16, "per_class": 250,
                   "networks": 512, "heads": 64, "runs": 16, "epochs": 40, "probes": 16},
        "paper": {},
    },
)  # fmt: skip
def conjecture2(
    run: Run,
    *,
    options: OnImages = TRUE_LABELS,
    epochs: Annotated[int, "epochs, one step of gradient descent each"] = 100,
    lr: Annotated[float, "learning rate"] = 0.1,
    momentum: Annotated[float, "momentum"] = 0.9,
    clip_norm: Annotated[float, "largest gradient norm, 0 for none (5 in the published code)"] = 5.0,
    energy: Annotated[
        float, "share of the trace of GSG that its leading eigenvectors hold (not stated in the paper)"
    ] = 0.99,
    looks: Annotated[int, "epochs to look at after the start, evenly spread"] = 4,
) -> StudyResult:
    """Share of Delta^t and of G^t - G^0 within the leading eigenvectors of GSG, along training."""
    check_count(looks, "looks")
    nets, side, runs = options.nets, options.side, check_count(options.runs, "runs", least=2)
    shape = shape_of(3, side, nets)
    images, _ = two_classes(run, options.source, side, options.per_class)
    S = data_second_moment(images.x.to(run.device), normalise=True).cpu()
    points = common_probes(run, options.probes, shape)
    precision = options.precision if torch.device(run.device).type == "cuda" else "float32"
    descent = Descent(epochs, lr, 0, momentum, clip_norm=clip_norm or None, micro=options.micro, precision=precision)
    times = sorted({0, 1, *(math.ceil(epochs * i / looks) for i in range(1, looks + 1))})
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    right: dict[str, bool | None] = {}
    cuts: dict[str, int] = {}
    for net in nets:
        G = known_geometry(net, shape)
        if G is None:
            drawn = {"networks": options.networks, "heads": options.heads, "norm": False}
            G = initial_geometry(run, net, shape, **drawn, probe_std=1.0, activation=None).matrix  # type: ignore[arg-type]
        target = gsg(G, S)
        cut = cuts[net] = subspace_size(target, share=energy)
        D = len(target)
        ks = sorted({cut, *(max(1, round(share * D)) for share in SHARES)})
        subspaces = {"GSG": target, "G": G, "S": S}
        parts = moved(run, net, shape, images.x, images.y, points, runs, descent, times)
        found = {
            (kind, t): Inside.of(matrices, subspaces, ks)
            for kind, t, matrices in parts
        }  # fmt: skip
        judged = {
            f"{kind} at epoch {t}": (inside.share("GSG", cut), inside.random[cut])
            for (kind, t), inside in found.items()
        }
        clear = [pair for pair in judged.values() if sharp(pair[0])]
        right[net] = together(as_claimed(share, random) for share, random in clear) if clear else None
        numbers[f"{net}: dimensions of Eig(GSG)"] = Estimate(cut)
        shares = {f"{name} within Eig(GSG)": share for name, (share, _) in judged.items()}
        last = found[KINDS[1], epochs]
        shares |= {f"{KINDS[1]} at epoch {epochs} within {k} eigenvectors of GSG": last.share("GSG", k) for k in ks}
        for name in ("G", "S"):
            shares[f"{KINDS[1]} at epoch {epochs} within {cut} eigenvectors of {name}"] = last.share(name, cut)
        for name, (_, random) in judged.items():
            shares[f"{name} within {cut} random dimensions"] = Estimate(random)
        for (kind, t), inside in found.items():
            shares[f"{kind} at epoch {t} within Eig(GSG), single networks"] = inside.single("GSG", cut)
        numbers |= {f"{net}: share of {name}": share for name, share in shares.items() if math.isfinite(share.value)}
        charts += [_along(net, found, cut), _over_k(net, found, ks, epochs, D)]
    end = f"at epoch {epochs} within"
    told = "; ".join(
        f"{net} ({cuts[net]} dimensions) {numbers.get(f'{net}: share of {KINDS[0]} {end} Eig(GSG)', 'unknown')} of "
        f"Delta^{epochs}, {numbers.get(f'{net}: share of {KINDS[1]} {end} Eig(GSG)', 'unknown')} of G^{epochs} - G^0 "
        f"(single networks: {numbers[f'{net}: share of {KINDS[1]} {end} Eig(GSG), single networks']}; random "
        f"dimensions: {numbers[f'{net}: share of {KINDS[1]} {end} {cuts[net]} random dimensions']}){remark(right[net])}"
        for net in nets
    )
    claim, untested = restricted(CLAIM, networks=(nets, NETS), images=([options.source], ["cifar10"]))
    return StudyResult(
        verdict=decide(together(right.values()), runs),
        claim=claim,
        measured=f"Share within the eigenvectors of GSG that hold {100 * energy:g} % of its trace: {told}. "
        f"{said(options.source, side)}, {options.per_class} images per class, {runs} networks, "
        f"{options.probes} probes, epochs {', '.join(map(str, times))}.{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )


def sharp(share: Estimate) -> bool:
    """Whether a share is known well enough to be judged.

    Example:
        >>> sharp(Estimate(0.5, 0.01)), sharp(Estimate(0.5, 0.3)), sharp(Estimate(float("nan")))
        (True, False, False)
    """
    return share.standard_error is not None and share.standard_error <= BLURRED


def as_claimed(share: Estimate, random: float) -> bool | None:
    """The rule in the module's docstring, for one share.

    Example:
        >>> [as_claimed(Estimate(v, e), 0.1) for v, e in ((0.97, 0.01), (0.8, 0.01), (0.89, 0.03))]
        [True, False, None]
    """
    if share.standard_error is None or not math.isfinite(share.value):
        return None
    return True if above(share, max(INSIDE, random)) else False if below(share, max(INSIDE, random)) else None


def _along(net: str, found: dict[tuple[str, int], Inside], cut: int) -> Chart:
    series = []
    for kind in KINDS:
        times = [t for one, t in found if one == kind]
        for name in ("GSG", "S"):
            shares = [found[kind, t].share(name, cut) for t in times]
            known = [(t, share) for t, share in zip(times, shares) if sharp(share)]
            style = "line" if name == "GSG" else "dashed"
            series.append(through(f"{kind} in {name}", [t for t, _ in known], [s for _, s in known], style))  # type: ignore[arg-type]
    times = [t for one, t in found if one == KINDS[0]]
    series.append(Series.of("random", times, [found[KINDS[0], t].random[cut] for t in times], style="dashed"))
    return Chart(
        name=f"inside-{net}",
        title=f"What of the change lies in {cut} leading eigenvectors, {net}",
        x_label="epoch",
        y_label="share of the norm",
        series=tuple(each for each in series if each.y),
        alt="Share of Delta^t and of G^t - G^0 within the leading eigenvectors of GSG over epochs.",
        caption="Solid: eigenvectors of GSG. Dashed: as many of S, and random dimensions. Left out: error above 0.1.",
    )


def _over_k(net: str, found: dict[tuple[str, int], Inside], ks: list[int], epochs: int, D: int) -> Chart:
    series = []
    for label, key in (
        (f"{KINDS[0]}, epoch 0", (KINDS[0], 0)),
        (f"{KINDS[0]}, epoch {epochs}", (KINDS[0], epochs)),
        (f"{KINDS[1]}, epoch {epochs}", (KINDS[1], epochs)),
    ):
        known = [(k, s) for k, s in ((k, found[key].share("GSG", k)) for k in ks) if sharp(s)]
        series.append(through(label, [k for k, _ in known], [s for _, s in known]))
    series.append(Series.of("random", ks, [found[KINDS[1], epochs].random[k] for k in ks], style="dashed"))
    return Chart(
        name=f"dimensions-{net}",
        title=f"The change within the first k eigenvectors of GSG, {net}",
        x_label=f"k of {D}",
        y_label="share of the norm",
        series=tuple(each for each in series if each.y),
        alt="Share of the change of G within the first k eigenvectors of GSG against k.",
        log_x=True,
    )
