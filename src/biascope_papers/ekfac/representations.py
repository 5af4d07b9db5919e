"""Figs. 3.1 and 3.3 to 3.6: representations of the Fisher matrix. One code for all of them, and how good they are.

Fig. 3.1. The three lines run for every representation there is; so do product, trace and damped solve:

    F = bs.fisher(net, x, representation)
    v = dict(net.named_parameters())
    F.quadratic_form(v)

(The document's second snippet is titled "implicit" but makes a dense matrix; here it is the implicit one.)

Figs. 3.3 to 3.6. The truth is the implicit one. F is the Monte-Carlo Fisher (5 labels per example, the same draws for
every representation) at several points of a training. For random unit vectors v: solve, v' = (F~ + lam)^-1 (F + lam) v
against v for a range of lam (3.3); product, F~ v against F v (3.4); quadratic form (3.5); and trace (3.6). The paper
used ResNet-50 and TinyImageNet; here it is a convolutional network (or, small, a dense one) on CIFAR-10.
"""

import functools
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from biascope import BiascopeError, fisher, nets
from biascope.curvature import Metric
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.ekfac.cifar import build, pictures
from biascope_papers.ekfac.common import Row, along_training, images, require

REPRESENTATIONS = (
    "dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank", "implicit", "mixed", "eye"
)  # fmt: skip
EXACT = ("dense", "implicit", "lowrank")  # the same matrix
USES = ("quadratic form", "product", "trace", "solve")
Kind = Literal["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank", "implicit", "mixed", "eye"]
LABELS: dict[Kind, str] = {"diagonal": "diagonal", "quasidiagonal": "quasi-diagonal", "kfac": "KFAC", "ekfac": "EKFAC"}
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)


@study(
    "ekfac/fig3.1",
    sizes={"smoke": {"n": 50, "width": 8}, "laptop": {"n": 500, "width": 24}, "paper": {"n": 1000, "width": 32}},
)
def fig3_1(
    run: Run,
    *,
    dataset: Annotated[str, "images of ten classes"] = "digits",
    n: Annotated[int, "images"] = 100,
    width: Annotated[int, "units in each of the two hidden layers"] = 12,
    damping: Annotated[float, "of the solve, relative to the mean eigenvalue"] = 1.0,
) -> StudyResult:
    """Quadratic form, product, trace and solve, by the same code for every representation."""
    x = images(dataset, n, run)[0].double()
    net = _dense(derive(run.seed, "init"), x, width).to(run.device).double()
    v = {name: p.detach() for name, p in net.named_parameters()}
    found: dict[str, Row] = {}
    failed: dict[str, str] = {}
    for kind in progress(REPRESENTATIONS, "representations"):
        try:
            found[kind] = run.cached(kind, lambda kind=kind: uses(fisher(net, x, kind), v, damping))  # type: ignore[misc]
        except BiascopeError as error:
            failed[kind] = str(error)
    truth = found["dense"]
    errors = {
        kind: {what: float((row[what] - truth[what]).norm() / truth[what].norm()) for what in USES}
        for kind, row in found.items()
    }
    numbers = {f"relative error of {what}, {k}": Estimate(e) for k, row in errors.items() for what, e in row.items()}
    numbers["representations that fail"] = Estimate(len(failed))
    worst = max(error for kind in EXACT if kind in errors for error in errors[kind].values())
    tail = "".join(f" {kind} failed: {why}." for kind, why in failed.items())
    series = tuple(
        Series.of(what, range(len(errors)), [max(row[what], 1e-16) for row in errors.values()], None, "points")
        for what in USES
    )
    names = ", ".join(f"{i}: {kind}" for i, kind in enumerate(errors))
    return StudyResult(
        measured=f"{len(found)} of {len(REPRESENTATIONS)} representations run on {sum(p.numel() for p in v.values())} "
        f"parameters and {n} images of {dataset}; {', '.join(EXACT)} agree to {worst:.1e}.{tail}",
        numbers=numbers,
        figures=(
            Chart("errors", "The same code, every representation", f"representation ({names})",
                  "relative error against dense", series, log_y=True,
                  alt="Exact representations have errors near rounding, the others have larger ones."),
        ),
    )  # fmt: skip


def uses(F: Metric, v: dict[str, Tensor], damping: float) -> dict[str, Tensor]:
    """The four uses, with the vector as a dict of parameters; nothing here depends on the representation."""
    trace = F.trace()
    lam = damping * float(trace) / F.shape[0]
    found = (F.quadratic_form(v), F.space.flatten(F @ v), trace, F.space.flatten(F.solve(v, damping=lam)))
    return {what: value.double() for what, value in zip(USES, found)}


def _dense(seed: int, x: Tensor, width: int) -> nn.Module:
    return nets.build("mlp", seed=seed, in_features=x[0].numel(), hidden=(width, width), outputs=10)


@study(
    "ekfac/fig3.3",
    sizes={
        "smoke": {"dataset": "digits", "network": "mlp", "n": 100, "steps": 20, "seeds": 2, "draws": 3, "width": 8}
        | {"points": 2},
        "laptop": {"n": 500, "width": 8, "steps": 100, "draws": 10, "seeds": 5},
        "paper": {"n": 1000, "width": 64, "steps": 500, "draws": 20, "seeds": 5},
    },
)
def fig3_3(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    network: Annotated[Literal["mlp", "vgg11", "resnet34"], "what is trained"] = "vgg11",
    width: Annotated[int, "hidden units, or channels of the first stage"] = 8,
    n: Annotated[int, "images that define F"] = 1000,
    samples: Annotated[int, "labels drawn per image"] = 5,
    steps: Annotated[int, "training steps between two points of measurement"] = 100,
    points: Annotated[int, "points of measurement, the first before training"] = 3,
    lr: Annotated[float, "learning rate of SGD, momentum 0.9 (not in the paper)"] = 0.01,
    size: Annotated[int, "examples per batch of the training"] = 100,
    draws: Annotated[int, "random vectors"] = 20,
    dampings: Annotated[tuple[float, ...], "lam, relative to the largest entry of diag F"] = DAMPINGS,
    seeds: Annotated[int, "trainings"] = 3,
) -> StudyResult:
    """Quality of four representations for solve, product, quadratic form and trace.

    Means are over draws, points of training and (for solves) dampings, errors over seeds.
    """
    require(points > 0 < draws, f"points={points}, draws={draws}: at least one of each")

    @functools.cache
    def data() -> tuple[Tensor, Tensor]:
        return images(dataset, n, run) if network == "mlp" else pictures(dataset, n, run)

    def training(seed: int) -> dict[str, Tensor]:
        """Every measure of every representation: [points] or, by damping, [points, dampings]."""
        (x, y), init = data(), derive(run.seed, "init", seed)
        net = _dense(init, x, width) if network == "mlp" else build(network, init, False, width, x.shape[1])
        net = net.to(run.device)
        found: dict[str, list[Tensor]] = {}
        for point in along_training(run, net, x, y, seed, points, steps, lr, size):
            for key, value in measure(net, x, samples, draws, dampings, derive(run.seed, seed, point)).items():
                found.setdefault(key, []).append(value)
        return {key: torch.stack(values) for key, values in found.items()}

    rows: list[Row] = run.cached_each("seed", progress(range(seeds), "trainings"), training)

    def mean(key: str, kind: str, minus: str = "") -> Estimate:
        each = [row[f"{key} {kind}"] - (row[f"{key} {minus}"] if minus else 0.0) for row in rows]
        return Estimate.of([float(values.double().mean()) for values in each])

    names = {
        "product": "cosine of F~ v with F v",
        "solve": "cosine of v' with v",
        "quadratic": "relative error of v F v",
        "trace": "relative error of the trace",
    }
    numbers = {f"{what}, {LABELS[k]}": mean(key, k) for key, what in names.items() for k in LABELS}
    judged: tuple[tuple[str, Kind], ...] = (("product", "ekfac"), ("solve", "kfac"))
    for key, best in judged:
        for other in (kind for kind in LABELS if kind != best):
            numbers[f"{names[key]}, {LABELS[best]} minus {LABELS[other]}"] = mean(key, best, other)
    for other in (kind for kind in LABELS if kind != "ekfac"):
        numbers[f"{names['quadratic']}, {LABELS[other]} minus EKFAC"] = mean("quadratic", other, "ekfac")
    for kind, label in LABELS.items():
        over = [row[f"solve {kind}"].double().mean(0) for row in rows]  # [dampings]
        numbers[f"{names['solve']}, {label}, highest minus lowest over damping"] = Estimate.of(
            [float(values.max() - values.min()) for values in over]
        )
    at, product = range(0, steps * points, steps), f"{names['product']}, "
    return StudyResult(
        measured=f"{network} of width {width} on {n} images of {dataset} (not ResNet-50 on TinyImageNet): cosine of "
        f"products {', '.join(f'{label} {numbers[product + label]}' for label in LABELS.values())}.",
        numbers=numbers,
        figures=(
            _panel(rows, dampings, "solve", "Solve: cosine of v' with v", "cosine", over="damping"),
            _panel(rows, dampings, "residual", "Solve: ||v - v'|| / ||v'||", "relative residual", True, "damping"),
            _panel(rows, at, "product", "Product: cosine of F~ v with F v", "cosine"),
            _panel(rows, at, "difference", "Product: ||F v - F~ v|| / ||F v||", "relative residual"),
            _panel(rows, at, "quadratic", "Quadratic form", "relative error", True),
            _panel(rows, at, "trace", "Trace", "relative error", True),
        ),
    )


def _panel(
    rows: list[Row],
    x: tuple[float, ...] | range,
    key: str,
    title: str,
    label: str,
    log: bool = False,
    over: Literal["training", "damping"] = "training",
) -> Chart:
    damped = over == "damping"
    curves = tuple(
        curve(name, x, [row[f"{key} {kind}"].mean(0) if damped else row[f"{key} {kind}"] for row in rows])
        for kind, name in LABELS.items()
    )
    where = "damping / largest diagonal entry of F" if damped else "training step"
    of = "vectors and points of training" if damped else "vectors"
    return Chart(key, title, where, label, curves, alt=f"One curve per representation over {over}.",
                 caption=f"Mean over {of}; band: standard error over seeds.", log_x=damped, log_y=log)  # fmt: skip


def measure(
    net: nn.Module, x: Tensor, samples: int, draws: int, dampings: tuple[float, ...], seed: int
) -> dict[str, Tensor]:
    """The panels' numbers at one point of training, means over the vectors."""

    def metric(kind: Kind) -> Metric:
        same = generator(seed, "labels")
        return fisher(net, x, kind, estimator="monte-carlo", samples=samples, generator=same)

    truth = metric("implicit")
    V = torch.randn(truth.shape[0], draws, generator=generator(seed, "vectors")).to(x)
    V = V / V.norm(dim=0)
    FV, trace = truth @ V, truth.trace()
    quadratic = (V * FV).sum(0)
    scale = float(truth.diagonal().max())
    out: dict[str, Tensor] = {}
    for kind in LABELS:
        approximate = metric(kind)
        AV = approximate @ V
        out[f"product {kind}"] = cosine(AV, FV).mean()
        out[f"difference {kind}"] = ((AV - FV).norm(dim=0) / FV.norm(dim=0)).mean()
        out[f"quadratic {kind}"] = (((V * AV).sum(0) - quadratic).abs() / quadratic).mean()
        out[f"trace {kind}"] = (approximate.trace() - trace).abs() / trace
        solved = [approximate.solve(FV + lam * scale * V, damping=lam * scale) for lam in dampings]
        out[f"solve {kind}"] = torch.stack([cosine(W, V).mean() for W in solved])
        out[f"residual {kind}"] = torch.stack([((V - W).norm(dim=0) / W.norm(dim=0)).mean() for W in solved])
    return {key: value.double().cpu() for key, value in out.items()}


def cosine(A: Tensor, B: Tensor) -> Tensor:
    """Column by column."""
    out: Tensor = (A * B).sum(0) / (A.norm(dim=0) * B.norm(dim=0))
    return out.clamp(-1, 1)
