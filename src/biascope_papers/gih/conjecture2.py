"""Conjecture 2 (the hypothesis itself): along training, G changes only within the leading eigenvectors of GSG.

||Q^T M Q|| / ||M|| for the first eigenvectors Q of GSG and M = Delta^t (where each network would move next under
gradient flow) or G^t - G^0, compared with random subspaces and with the leading eigenvectors of S and of G. Squared
norms come from products of different networks (`averages`). Training is that of Fig. 2, cross-entropy; probes N(0, I).

The paper gives no cut-off: Eig(GSG) holds `energy` (99 %) of its trace here; charts show all k. A share with a standard
error above 0.1 is kept apart: at the start networks have little of Delta in common (`gih/conjecture1` draws many more).
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from biascope.ensembles import Networks, outputs, record
from biascope.geometry import containment, data_second_moment, gsg, moving_gradients, subspace_size
from biascope.linalg import psd_eigh
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import through
from biascope.support import derive
from biascope_papers.gih.averages import estimate, finite, gram, squared
from biascope_papers.gih.fig2_8 import NETS, TRUE_LABELS, OnImages
from biascope_papers.gih.geometries import initial_geometry, known_geometry
from biascope_papers.gih.networks import at_least, factory, scope, shape_of
from biascope_papers.gih.sets import describe, two_classes
from biascope_papers.gih.tracking import Descent, Task, common_probes, watched

KINDS = ("Delta^t", "G^t - G^0")
BLURRED = 0.1  # standard error of a share that is not judged
SHARES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of the dimensions


@study(
    "gih/conjecture2",
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
    energy: Annotated[float, "share of the trace of GSG in its leading eigenvectors (not stated)"] = 0.99,
    looks: Annotated[int, "epochs to look at after the start, evenly spread"] = 4,
) -> StudyResult:
    """Share of Delta^t and of G^t - G^0 within the leading eigenvectors of GSG, along training."""
    nets, side, runs = options.nets, options.side, options.runs
    at_least(1, looks=looks)
    at_least(2, runs=runs)
    shape = shape_of(3, side, nets)
    images, _ = two_classes(run, options.source, side, options.per_class)
    S = data_second_moment(images.x.to(run.device), normalise=True).cpu()
    points = common_probes(run, options.probes, shape)
    precision = options.precision if torch.device(run.device).type == "cuda" else "float32"
    descent = Descent(epochs, lr, 0, momentum, clip_norm=clip_norm or None, micro=options.micro, precision=precision)
    times = sorted({0, 1, *(math.ceil(epochs * i / looks) for i in range(1, looks + 1))})
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    text: list[str] = []
    for net in nets:
        G = known_geometry(net, shape)
        if G is None:
            G = initial_geometry(run, net, shape, networks=options.networks, heads=options.heads, norm=False,
                                 probe_std=1.0, activation=None).matrix  # fmt: skip
        target = gsg(G, S)
        cut, D = subspace_size(target, share=energy), len(target)
        ks = sorted({cut, *(max(1, round(share * D)) for share in SHARES)})
        parts, fit = moved(run, net, shape, images.x, images.y, points, runs, descent, times)
        found = {key: Inside.of(matrices, {"GSG": target, "G": G, "S": S}, ks) for key, matrices in parts.items()}
        shares = {key: inside.share("GSG", cut) for key, inside in found.items()}
        judged = {key: share for key, share in shares.items() if sharp(share)}
        last, made = found[KINDS[1], epochs], dict[str, Estimate]()
        for (kind, t), share in shares.items():
            aside = "" if (kind, t) in judged or not judged else ", not judged"  # the rule is about the others
            made[f"{kind} at epoch {t} within Eig(GSG){aside}"] = share
        for k in ks:
            made[f"{KINDS[1]} at epoch {epochs} within {k} eigenvectors of GSG"] = last.share("GSG", k)
        for name in ("G", "S"):
            made[f"{KINDS[1]} at epoch {epochs} within {cut} eigenvectors of {name}"] = last.share(name, cut)
        for (kind, t), inside in found.items():
            made[f"{kind} at epoch {t} within {cut} random dimensions"] = Estimate(inside.random[cut])
            made[f"{kind} at epoch {t} within Eig(GSG), single networks"] = inside.single("GSG", cut)
        numbers[f"{net}: training accuracy at the end, %"] = Estimate.of(100 * fit)
        numbers[f"{net}: dimensions of Eig(GSG)"] = Estimate(cut)
        numbers[f"{net}: shares known well enough to be judged"] = Estimate(len(judged))
        numbers |= {f"{net}: share of {name}": share for name, share in made.items() if math.isfinite(share.value)}
        excess = [Estimate(s.value - found[key].random[cut], s.standard_error, s.n) for key, s in judged.items()]
        if excess:
            least = min(excess, key=lambda e: e.value - 2 * (e.standard_error or 0.0))
            numbers[f"{net}: smallest share within Eig(GSG) minus that within random dimensions"] = least
        moving, gone = (shares[kind, epochs] for kind in KINDS)
        text.append(f"{net} {moving} of Delta^{epochs}, {gone} of G^{epochs} - G^0 (random: {last.random[cut]:.4g})")
        charts += [_along(net, found, cut), _over_k(net, found, ks, epochs, D)]
    return StudyResult(
        measured=f"Share within the eigenvectors of GSG that hold {100 * energy:g} % of its trace: {'; '.join(text)}. "
        f"{describe(options.source, side)}."
        f"{scope(networks=(nets, NETS), images=([options.source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(charts),
    )


def moved(
    run: Run, net: str, shape: tuple[int, ...], x: Tensor, y: Tensor, probes: Tensor, runs: int, descent: Descent,
    times: list[int],
) -> tuple[dict[tuple[str, int], Tensor], Tensor]:  # fmt: skip
    """{(kind, epoch): matrices [runs, D, D]} of trained networks: Delta^t at all times, G^t - G^0 after the start.

    And their training accuracy at the end [runs], on at most 2,000 images.
    """
    device = torch.device(run.device)
    recorded, signs = record(factory(net, shape, norm=False)), torch.where(y > 0, 1.0, -1.0)
    task = Task(recorded, derive(run.seed, "moved", net), x.to(device), y.to(device), descent)
    room = None if device.type == "cuda" else "1GB"

    def look(networks: Networks) -> dict[str, Tensor]:
        batch = min(descent.micro, 250)
        g, u = moving_gradients(networks, probes, x, signs, "logistic", max_memory=room, batch=batch)
        logits = torch.cat([outputs(networks, part) for part in torch.split(x[:2000].to(device), batch)], 1)
        return {"g": g, "u": u, "fit": (logits.argmax(-1).cpu() == y[:2000].cpu()).float().mean(1)}

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("rpi,rpj->rij", a, b)

    factors, found = watched(run, f"moved {net}", task, runs, times, look), {}
    for t in times:
        g, first = factors["g", t], factors["g", 0]
        B = product(factors["u", t], g)
        found[KINDS[0], t] = B + B.mT
        if t > 0:
            found[KINDS[1], t] = product(g, g) - product(first, first)
    return found, factors["fit", times[-1]]


@dataclass(frozen=True)
class Inside:
    """Products between networks of what lies in the first k eigenvectors of each subspace, and of the whole."""

    whole: Tensor = field(repr=False)
    parts: dict[tuple[str, int], Tensor] = field(repr=False)
    random: dict[int, float]

    @classmethod
    def of(cls, matrices: Tensor, subspaces: dict[str, Tensor], ks: list[int]) -> "Inside":
        """From matrices [R, D, D] and the matrices whose leading eigenvectors span the subspaces."""
        parts = {}
        for name, reference in subspaces.items():
            Q = psd_eigh(reference.double()).vectors[:, : max(ks)].to(matrices)
            inner = Q.T @ matrices @ Q
            for k in ks:
                parts[name, k] = gram(inner[:, :k, :k])
        random = containment(matrices.mean(0), next(iter(subspaces.values())), ks).random
        return cls(gram(matrices), parts, dict(zip(ks, random)))

    def share(self, name: str, k: int) -> Estimate:
        """||Q^T M Q|| / ||M|| of the mean over networks, without their noise.

        NaN without an error where the networks, or all of them but one, have nothing in common: ||M||^2 is not above 0.
        """
        part = self.parts[name, k]

        def ratio(w: Tensor) -> Tensor:
            whole = squared(self.whole, w)
            return (squared(part, w).clamp_min(0) / whole.clamp_min(0)).sqrt() if whole > 0 else whole * math.nan

        found = finite(estimate(ratio, len(part)))
        return found if found.standard_error is not None else Estimate(math.nan, None, len(part))

    def single(self, name: str, k: int) -> Estimate:
        """The same of every network on its own, mean over networks."""
        return Estimate.of((self.parts[name, k].diagonal() / self.whole.diagonal()).sqrt())


def sharp(share: Estimate) -> bool:
    """Whether a share is known well enough to be judged."""
    return share.standard_error is not None and share.standard_error <= BLURRED


def _along(net: str, found: dict[tuple[str, int], Inside], cut: int) -> Chart:
    series = []
    for kind in KINDS:
        times = [t for one, t in found if one == kind]
        for name, style in (("GSG", "line"), ("S", "dashed")):
            known = {t: share for t in times if sharp(share := found[kind, t].share(name, cut))}
            series.append(through(f"{kind} in {name}", known, known.values(), style))  # type: ignore[arg-type]
    times = [t for one, t in found if one == KINDS[0]]
    series.append(Series.of("random", times, [found[KINDS[0], t].random[cut] for t in times], style="dashed"))
    return Chart(
        f"inside-{net}", f"What of the change lies in {cut} leading eigenvectors, {net}", "epoch", "share of the norm",
        tuple(each for each in series if each.y),
        "Share of Delta^t and of G^t - G^0 within the leading eigenvectors of GSG over epochs.",
        "Solid: eigenvectors of GSG. Dashed: as many of S, and random dimensions. Left out: error above 0.1.",
    )  # fmt: skip


def _over_k(net: str, found: dict[tuple[str, int], Inside], ks: list[int], epochs: int, D: int) -> Chart:
    series = []
    for kind, t in ((KINDS[0], 0), (KINDS[0], epochs), (KINDS[1], epochs)):
        known = {k: share for k in ks if sharp(share := found[kind, t].share("GSG", k))}
        series.append(through(f"{kind}, epoch {t}", known, known.values()))
    series.append(Series.of("random", ks, [found[KINDS[1], epochs].random[k] for k in ks], style="dashed"))
    return Chart(
        f"dimensions-{net}", f"The change within the first k eigenvectors of GSG, {net}", f"k of {D}",
        "share of the norm", tuple(each for each in series if each.y),
        "Share of the change of G within the first k eigenvectors of GSG against k.", log_x=True,
    )  # fmt: skip
