"""App. A.3: the curvature of the loss in input space becomes the average geometry as training ends.

Hess_x loss = l'(f) Hess_x f + l''(f) g g^T. The paper argues that l'(f) tends to 0, so that the second term stays, and
that its mean is proportional to G^t if l''(f) varies little. Networks have GELU (those with ReLU have no first term).
For the squared error l'' = 1. For cross-entropy |l'| = s and l'' = s (1 - s), s the chance of the wrong class: both
tend to 0, and only as f grows does the second term win; nor is l'' the same for all images.

It then differentiates what is left by time and finds Delta^t. But l'' (df/dt) Hess_x f, which comes of the term that
was dropped, vanishes no faster than Delta^t does: both are of the order of the residuals. Hence d/dt Hess_x loss is
taken whole, under gradient flow on the training set.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.ensembles import Networks, outputs, record
from biascope.geometry import evolution_of, geometry_of
from biascope.geometry.loss_curvature import curvature_evolution, input_curvature
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import through
from biascope.support import derive
from biascope_papers.gih.averages import estimate, limited
from biascope_papers.gih.networks import at_least, factory, scope, shape_of
from biascope_papers.gih.sets import Source, describe, two_classes
from biascope_papers.gih.tracking import Descent, Task, watched
from biascope_papers.gih.training import mean_of

NETS = ("mlp", "lenet", "resnet18", "vit")
Loss = Literal["sse", "logistic"]
LOSSES: dict[Loss, Literal["sse", "cross-entropy"]] = {"sse": "sse", "logistic": "cross-entropy"}
SHARE, CORRELATION, EXCESS, MOVING, MOVING_EXCESS, SLOPE = (
    "share of the gradient term",
    "Corr(E Hess_x loss, G^t)",
    "the same minus random rotations",
    "Corr(E d/dt Hess_x loss, Delta^t)",
    "the correlation with Delta^t minus random rotations",
    "mean |l'(f)|",
)
CHARTS = {  # bars are those of the rule
    "share": (SHARE, "Share of the gradient term in the input Hessian of the loss", 0.5),
    "correlation": (CORRELATION, "Correlation of the input Hessian of the loss with G^t", 0.9),
    "moving": (MOVING, "Correlation of its change in time with Delta^t", 0.9),
    "slope": (SLOPE, "How far the networks are from fitting", 0.1),
}
Curves = dict[str, list[Estimate]]


@study(
    "gih/curvature",
    sizes={
        "smoke": {"nets": ("mlp",), "source": "synthetic", "side": 8, "channels": 1, "per_class": 20, "runs": 4,
                  "epochs": 10, "examples": 4, "looks": 2},
        "laptop": {"nets": ("mlp", "lenet"), "side": 16, "channels": 1, "per_class": 100, "runs": 8, "epochs": 150,
                   "examples": 16},
        "paper": {},
    },
)  # fmt: skip
def curvature(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, with GELU and without normalisation"] = NETS,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    channels: Annotated[Literal[1, 3], "3, or 1 for grey images"] = 3,
    per_class: Annotated[int, "training images per class (not stated in the paper)"] = 500,
    runs: Annotated[int, "networks trained"] = 25,
    examples: Annotated[int, "training images at which curvature is taken"] = 16,
    epochs: Annotated[int, "epochs of Adam"] = 150,
    lr: Annotated[float, "learning rate of Adam"] = 3e-3,
    batch_size: Annotated[int, "images per step"] = 50,
    looks: Annotated[int, "epochs to look at after the start, evenly spread"] = 5,
) -> StudyResult:
    """The input Hessian of the loss along training: its two terms, and its correlation and its change's with theory."""
    at_least(1, looks=looks, batch_size=batch_size)
    at_least(2, examples=examples)
    shape = shape_of(channels, side, nets)
    images, device = two_classes(run, source, side, per_class)[0], torch.device(run.device)
    x = images.x if channels == 3 else images.x.mean(1, keepdim=True)
    at = torch.linspace(0, len(x) - 1, min(examples, len(x))).long()
    every = torch.where(images.y > 0, 1.0, -1.0).to(device)
    seen_at, signs = x[at].to(device), every[at.to(device)]
    times = sorted({0, 1, *(-(-epochs * i // looks) for i in range(1, looks + 1))})
    along: dict[str, Curves] = {}
    for net in nets:
        recorded = record(factory(net, shape, norm=False, activation="gelu"))
        for loss, name in LOSSES.items():

            def look(networks: Networks, loss: Loss = loss) -> dict[str, Tensor]:
                moving = changes(networks, seen_at, signs, (x.to(device), every), loss)
                return terms(networks, seen_at, signs, loss) | moving

            descent = Descent(epochs, lr, batch_size, optimiser="adam", loss=name)
            task = Task(recorded, derive(run.seed, "curvature", net), x.to(device), images.y.to(device), descent)
            along[f"{net}, {name}"] = summarise(watched(run, f"{net} {name}", task, runs, times, look), times)
    numbers = {
        f"{label}: {what}, at the {when}": values[i]
        for label, curves in along.items()
        for what, values in curves.items()
        for when, i in (("start", 0), ("end", -1))
    }
    text = "; ".join(f"{label}: {curves[SHARE][-1]}, {curves[CORRELATION][-1]}" for label, curves in along.items())
    return StudyResult(
        measured=f"Share of the second term and Corr(E Hess_x loss, G^t) after {epochs} epochs: {text}. "
        f"{describe(source, side)}{', grey' if channels == 1 else ''}."
        f"{scope(networks=(nets, NETS), images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(_chart(name, along, times) for name in CHARTS),
    )


def terms(networks: Networks, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Means over examples for each network: Hess_x loss and G^t [T, D, D], the share of the second term, |l'(f)|."""
    logits = outputs(networks, x)
    f = logits[..., 1] - logits[..., 0]
    slope = (f - y).abs() if loss == "sse" else torch.sigmoid(-y * f)
    H, G, shares = [], [], []
    for i in range(len(networks)):
        found = input_curvature(networks.module(i), x, y, loss)
        H.append(found.hessian.double().mean(0))
        G.append(geometry_of(networks[i : i + 1], x).matrix.to(x.device))
        shares.append(found.shares.mean())
    return {"H": torch.stack(H), "G": torch.stack(G), "share": torch.stack(shares), "slope": slope.mean(1)}


def changes(networks: Networks, x: Tensor, y: Tensor, train: tuple[Tensor, Tensor], loss: Loss) -> dict[str, Tensor]:
    """d/dt Hess_x loss and Delta^t of each network [T, D, D], means over examples, under gradient flow on `train`."""
    whole, Delta = [], []
    for i in range(len(networks)):
        whole.append(curvature_evolution(networks.module(i), x, y, *train, loss).total.double().mean(0))
        Delta.append(evolution_of(networks[i : i + 1], x, *train, loss).matrix.to(x.device))
    return {"dH": torch.stack(whole), "Delta": torch.stack(Delta)}


def summarise(seen: dict[tuple[str, int], Tensor], times: Iterable[int]) -> Curves:
    """The numbers at all times, errors over networks."""
    curves: Curves = {name: [] for name in (SHARE, CORRELATION, EXCESS, MOVING, MOVING_EXCESS, SLOPE)}
    for t in times:
        now, moving = alike(seen["H", t], seen["G", t]), alike(seen["dH", t], seen["Delta", t])
        found = (mean_of(seen["share", t]), *now, *moving, mean_of(seen["slope", t]))
        for values, each in zip(curves.values(), found):
            values.append(each)
    return curves


def alike(H: Tensor, G: Tensor) -> tuple[Estimate, Estimate]:
    """Corr of the means of H and G [R, D, D], and that less what random rotations give; jackknife over networks."""
    R, D = len(H), H.shape[-1]
    h, g = H.flatten(1).double(), G.flatten(1).double()
    hh, hg, gg = h @ h.T, h @ g.T, g @ g.T
    traces = [M.diagonal(dim1=1, dim2=2).sum(1).double() for M in (H, G)]

    def norm(w: Tensor) -> Tensor:
        return ((w @ hh @ w) * (w @ gg @ w)).sqrt()

    value = limited(estimate(lambda w: (w @ hg @ w) / norm(w), R))
    return value, estimate(lambda w: (w @ hg @ w - (traces[0] @ w) * (traces[1] @ w) / D) / norm(w), R)


def _chart(name: str, along: dict[str, Curves], times: list[int]) -> Chart:
    what, title, bar = CHARTS[name]
    curves = [through(label, times, curves[what]) for label, curves in along.items()]
    rule = Series.of("bar of the rule", times, [bar] * len(times), style="dashed")
    alt = f"{what[0].upper()}{what[1:]} over epochs for every network and loss."
    return Chart(name, title, "epoch", what, (*curves, rule), alt, log_y=what == SLOPE)
