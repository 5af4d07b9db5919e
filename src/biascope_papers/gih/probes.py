"""App. A.12: with which probes G is estimated best, GELU near 0 or ReLU at N(0, I).

Networks are trained once along a fixed list of directions u, and every kind of estimate, each from as many networks of
one output, is compared with the test accuracies: Spearman(u^T G u, accuracy over u). Groups of networks give the
errors.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope import average_geometry
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import spearman, through
from biascope.support import derive, progress
from biascope_papers.gih.averages import stacked
from biascope_papers.gih.fig10_14 import LEARNED, Sweep, accuracy_chart, sweep_directions, too_few
from biascope_papers.gih.geometries import spread_indices
from biascope_papers.gih.networks import at_least, factory, scope, shape_of

NETS = ("lenet", "resnet18", "vit")
SMALL = (1e-3, 1e-4, 1e-5)
SWEEP = Sweep(boundaries=("linear",))
RELU = "ReLU, std 1"
AT_ZERO = "GELU, at 0"
KINDS: dict[str, tuple[str, float]] = {
    RELU: ("relu", 1.0),
    **{f"GELU, std {std:g}": ("gelu", std) for std in (1.0, 1e-1, 1e-2, *SMALL)},
    AT_ZERO: ("gelu", 0.0),
}


@study(
    "gih/probes",
    sizes={
        "smoke": {"nets": ("lenet",), "side": 16, "networks": 64, "heads": 16, "stride": 85, "n_train": 256,
                  "n_test": 200, "epochs": 2, "repeats": 1, "each": 32, "groups": 3, "engine": "vmap"},
        "laptop": {"nets": ("lenet",), "side": 16, "networks": 256, "heads": 32, "stride": 17, "n_train": 2000,
                   "epochs": 10, "each": 256, "engine": "vmap"},
        "paper": {"stride": 100},
    },
)  # fmt: skip
def probe_sizes(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures"] = NETS,
    stride: Annotated[int, "every how many eigenvectors one is tried"] = 10,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    each: Annotated[int, "networks behind one estimate of G that is compared"] = 1000,
    groups: Annotated[int, "independent estimates of every kind"] = 8,
    sweep: Sweep = SWEEP,
) -> StudyResult:
    """How well eigenvalues of differently probed G predict the order of accuracies."""
    at_least(3, groups=groups)
    at_least(1, each=each)
    side, protocol = sweep.side, sweep.along("linear", lr)
    shape, indices = shape_of(1, side, nets), spread_indices(side**2, stride)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    text: list[str] = []
    for net in nets:
        reference = sweep.geometry(run, net, shape)
        _, test = sweep_directions(
            run, "sweep", net, sweep.later(run, net, shape), indices, shape, "linear", protocol, sweep
        )
        accuracy = test.double().mean(0)
        U = torch.stack([reference.direction(i).flatten() for i in indices]).double()
        orders, errors, found = dict[str, Tensor](), dict[str, float](), dict[str, Estimate]()
        for kind, (activation, std) in KINDS.items():
            parts = estimates(run, net, shape, activation, std, each, groups)
            orders[kind] = torch.tensor([spearman(((U @ G) * U).sum(1), accuracy) for G in parts], dtype=torch.float64)
            errors[kind], found[kind] = stacked(parts).noise(), Estimate.of(orders[kind])
            numbers[f"{net}, {kind}: Spearman(u^T G u, accuracy)"] = found[kind]
            error = Estimate(errors[kind], None, each * groups)
            numbers[f"{net}, {kind}: relative error of all groups together"] = error
        few = [f"GELU, std {std:g}" for std in SMALL]
        small, largest = torch.stack([orders[kind] for kind in few]).mean(0), max(errors[kind] for kind in few)
        learned = int((accuracy >= LEARNED).sum())
        numbers[f"{net}: Spearman, small probes with GELU minus ReLU"] = Estimate.of(small - orders[RELU])
        numbers[f"{net}: Spearman, G(0) minus small probes with GELU"] = Estimate.of(orders[AT_ZERO] - small)
        numbers[f"{net}: largest relative error of small probes over that of ReLU"] = Estimate(largest / errors[RELU])
        numbers[f"{net}: directions learned, of {len(indices)}"] = Estimate(learned)
        text.append(f"{net} {found['GELU, std 0.0001']} with GELU and probes of 1e-4, {found[RELU]} with ReLU")
        caption = f"{sweep.n_train} training examples, {sweep.repeats} repeats, {sweep.epochs} epochs."
        charts += [_chart(net, found), accuracy_chart(net, indices, {"linear": test}, caption, "G")]
    return StudyResult(
        measured=f"Rank correlation of u^T G u with the test accuracy over {len(indices)} directions: "
        f"{'; '.join(text)}."
        f"{too_few(indices)}{scope(networks=(nets, NETS))}",
        numbers=numbers,
        figures=tuple(charts),
    )


def estimates(
    run: Run, net: str, shape: tuple[int, ...], activation: str, std: float, each: int, groups: int
) -> list[Tensor]:
    """Independent estimates [D, D] of G, one probe per network; the networks are the same for all kinds."""

    def one(i: int) -> dict[str, Tensor]:
        seed = derive(run.seed, "probes", net, i)
        made = factory(net, shape, outputs=1, activation=activation)
        return {"matrix": average_geometry(made, shape, each, seed=seed, probe_std=std, device=run.device).matrix}

    found = run.cached_each(f"G {net} {activation} {std:g}", progress(range(groups), "G", leave=False), one)
    return [torch.as_tensor(part["matrix"]) for part in found]


def _chart(net: str, orders: dict[str, Estimate]) -> Chart:
    stds = {kind: std for kind, (activation, std) in KINDS.items() if activation == "gelu" and std > 0}
    levels = {name: orders[name].value for name in (RELU, AT_ZERO) if math.isfinite(orders[name].value)}
    series = [through("GELU", stds.values(), [orders[kind] for kind in stds])]
    series += [Series.of(name, stds.values(), [level] * len(stds), style="dashed") for name, level in levels.items()]
    return Chart(
        f"probes-{net}", f"How well G predicts the order of accuracies, {net}",
        "standard deviation of the probes, GELU", "Spearman(u^T G u, accuracy)", tuple(series),
        "Rank correlation of the quadratic form of G with the test accuracy against the size of the probes.",
        log_x=True,
    )  # fmt: skip
