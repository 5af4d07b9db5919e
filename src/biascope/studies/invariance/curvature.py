"""App. A.3: the curvature of the loss in input space becomes the average geometry as training ends.

Hess_x loss = l'(f) Hess_x f + l''(f) g g^T. The paper argues that l'(f) tends to 0, so that the second term is what
stays, and its mean over networks is proportional to G^t if l''(f) varies little. Networks with GELU (those with ReLU
have no first term) are trained with the squared error and with cross-entropy until they fit their images; both terms
are taken at training images, network by network, and G^t at the same images. For the squared error l'' = 1. For
cross-entropy on the difference f of two logits |l'| = s and l'' = s (1 - s), s the chance of the wrong class: both tend
to 0 together, and only as f grows does the second term, of second order in f, win. Nor is l'' the same for all images.

Verdict rule, fixed before the first run above smoke size: for every network and loss, after the last epoch, the mean
share of the second term, ||l'' g g^T|| / (||l' Hess f|| + ||l'' g g^T||), is above one half, and Corr(E Hess_x loss,
G^t) above 0.9 and above what random rotations give, each by 2 standard errors over networks. Where the mean |l'(f)| is
still above 0.1 nothing is tested: the argument is about networks that fit.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.ensembles import Networks, outputs, record
from biascope.geometry import geometry_of, input_curvature
from biascope.seeds import derive
from biascope.studies.estimates import above, through
from biascope.studies.invariance.charts import decide, remark, restricted, together
from biascope.studies.invariance.factors import estimate
from biascope.studies.invariance.images import Source, said, two_classes
from biascope.studies.invariance.networks import factory, shape_of
from biascope.studies.invariance.tracking import Descent, Task, watched
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "Once a network fits its data, the curvature of the loss in input space is dominated by the outer product of the "
    "input gradient, and its mean over networks is proportional to G^t."
)
NETS = ("mlp", "lenet", "resnet18", "vit")
LOSSES: dict[str, Literal["sse", "cross-entropy"]] = {"sse": "sse", "logistic": "cross-entropy"}
FITTED = 0.1  # mean |l'(f)|
ALIKE = 0.9


@study(
    "gih/curvature",
    paper="invariance",
    figure="A.3",
    claim=CLAIM,
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
    """The two terms of the input Hessian of the loss along training, and its correlation with G^t."""
    check_count(looks, "looks")
    check_count(examples, "examples", least=2)
    check_count(batch_size, "batch_size")
    shape = shape_of(channels, side, nets)
    images = two_classes(run, source, side, per_class)[0]
    x = images.x if channels == 3 else images.x.mean(1, keepdim=True)
    at = torch.linspace(0, len(x) - 1, min(examples, len(x))).long()
    signs = torch.where(images.y > 0, 1.0, -1.0)[at]
    times = sorted({0, 1, *(-(-epochs * i // looks) for i in range(1, looks + 1))})
    device = torch.device(run.device)
    numbers: dict[str, Estimate] = {}
    right: dict[str, bool | None] = {}
    along: dict[str, dict[str, list[Estimate]]] = {}
    for net in nets:
        recorded = record(factory(net, shape, norm=False, activation="gelu"))
        for loss, name in LOSSES.items():

            def look(networks: Networks, loss: str = loss) -> dict[str, Tensor]:
                return terms(networks, x[at].to(device), signs.to(device), loss)

            descent = Descent(epochs, lr, batch_size, optimiser="adam", loss=name)
            task = Task(recorded, derive(run.seed, "curvature", net), x.to(device), images.y.to(device), descent)
            seen = watched(run, f"{net} {name}", task, runs, times, look)
            curves = summarise(seen, times)
            label = f"{net}, {name}"
            along[label] = curves
            last = {what: values[-1] for what, values in curves.items()}
            right[label] = as_claimed(last)
            for what, values in curves.items():
                numbers[f"{label}: {what}, at the start"] = values[0]
                numbers[f"{label}: {what}, at the end"] = values[-1]
    told = "; ".join(
        f"{label}: share {numbers[f'{label}: {SHARE}, at the end']}, correlation "
        f"{numbers[f'{label}: {CORRELATION}, at the end']}, mean |l'| {numbers[f'{label}: {SLOPE}, at the end']}"
        f"{remark(right[label])}"
        for label in along
    )
    claim, untested = restricted(CLAIM, networks=(nets, NETS), images=([source], ["cifar10"]))
    return StudyResult(
        verdict=decide(together(right.values()), runs),
        claim=claim,
        measured=f"Share of the second term and Corr(E Hess_x loss, G^t) after {epochs} epochs: {told}. GELU, "
        f"{said(source, side)}{', grey' if channels == 1 else ''}, {per_class} images per class, {runs} networks, "
        f"{len(at)} images.{untested}",
        numbers=numbers,
        figures=(
            _chart("share", "Share of the gradient term in the input Hessian of the loss", SHARE, along, times, 0.5),
            _chart(
                "correlation", "Correlation of the input Hessian of the loss with G^t", CORRELATION, along, times, ALIKE
            ),
            _chart("slope", "How far the networks are from fitting", SLOPE, along, times, FITTED),
        ),
    )


SHARE, CORRELATION, EXCESS, SLOPE = (
    "share of the gradient term",
    "Corr(E Hess_x loss, G^t)",
    "the same minus random rotations",
    "mean |l'(f)|",
)


def terms(networks: Networks, x: Tensor, y: Tensor, loss: str) -> dict[str, Tensor]:
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


def summarise(seen: dict[tuple[str, int], Tensor], times: Iterable[int]) -> dict[str, list[Estimate]]:
    """The four numbers at all times, errors over networks."""
    curves: dict[str, list[Estimate]] = {SHARE: [], CORRELATION: [], EXCESS: [], SLOPE: []}
    for t in times:
        value, excess = alike(seen["H", t], seen["G", t])
        curves[SHARE].append(Estimate.of(seen["share", t]))
        curves[CORRELATION].append(value)
        curves[EXCESS].append(excess)
        curves[SLOPE].append(Estimate.of(seen["slope", t]))
    return curves


def alike(H: Tensor, G: Tensor) -> tuple[Estimate, Estimate]:
    """Corr of the means of H and G [R, D, D], and that less what random rotations give; jackknife over networks.

    Example:
        >>> alike(torch.eye(2).expand(3, 2, 2), torch.eye(2).expand(3, 2, 2))[0].value
        1.0
    """
    R, D = len(H), H.shape[-1]
    h, g = H.flatten(1).double(), G.flatten(1).double()
    hh, hg, gg = h @ h.T, h @ g.T, g @ g.T
    traces = [M.diagonal(dim1=1, dim2=2).sum(1).double() for M in (H, G)]

    def norm(w: Tensor) -> Tensor:
        return ((w @ hh @ w) * (w @ gg @ w)).sqrt()

    value = estimate(lambda w: (w @ hg @ w) / norm(w), R)
    return value, estimate(lambda w: (w @ hg @ w - (traces[0] @ w) * (traces[1] @ w) / D) / norm(w), R)


def as_claimed(last: dict[str, Estimate]) -> bool | None:
    """The rule in the module's docstring."""
    if last[SLOPE].value > FITTED:
        return None
    return above(last[SHARE], 0.5) and above(last[CORRELATION], ALIKE) and above(last[EXCESS])


def _chart(
    name: str, title: str, what: str, along: dict[str, dict[str, list[Estimate]]], times: list[int], bar: float
) -> Chart:
    return Chart(
        name=name,
        title=title,
        x_label="epoch",
        y_label=what,
        series=(
            *(through(label, times, curves[what]) for label, curves in along.items()),
            Series.of("bar of the rule", times, [bar] * len(times), style="dashed"),
        ),
        alt=f"{what[0].upper()}{what[1:]} over epochs for every network and loss.",
        log_y=what == SLOPE,
    )
