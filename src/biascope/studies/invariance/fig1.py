"""Fig. 1: two concentric circles in a plane of input space; both axes aligned with G (D_A), or only one (D_B).

A network that sees the first axis only is not at chance on D_B: the best such classifier says "outer circle" when
|x.u1| exceeds the inner radius and is right in 1 - asin(r/R)/pi of the cases (94.7 % for 0.25 and 1.5). That number is
on the page; the rule below is the paper's reading and does not use it.

Verdict rule: every network but the MLP has a mean test accuracy above 90 % on D_A and below 60 % on D_B, each by 2
standard errors over seeds; the MLP is above 90 % on both.

The paper says nothing of the noise. With that of the published code for its circles (sigma = 1, the default) an MLP
learns neither set at the paper's size, so that nothing can be said of ResNet18 either; sigma = 0.5 is the largest of 1,
0.5, 0.25 and 0.1 with which an MLP learns both (two seeds; ResNet18 was not looked at for this).
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.ensembles import Networks, outputs, record, train_ensemble
from biascope.ensembles.arithmetic import Precision
from biascope.seeds import derive
from biascope.studies.estimates import above, below, through
from biascope.studies.invariance.charts import decide, percent, remark, restricted
from biascope.studies.invariance.geometries import Geometry, check_axes, initial_geometry
from biascope.studies.invariance.networks import ISOTROPIC, as_they_are, factory, is_a, named, shape_of
from biascope.studies.invariance.tasks import Lazy, Noise, circles_task
from biascope.studies.pictures import picture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "ResNet18 learns concentric circles when both axes of their plane are aligned with its average geometry (D_A), and "
    "fails to generalise when one is not (D_B); an MLP learns both."
)
NETS = ("mlp", "resnet18")
SETS = {"A": "D_A, both axes aligned with G", "B": "D_B, one axis not aligned"}
CAPTION = (
    "The plane of the circles without noise: test data projected on it, of two classes (blue inside, orange outside), "
    "and where each trained network changes its mind (green, one line for each seed; none for one that never does). In "
    "brackets: G along the axis, as a share of its largest eigenvalue."
)
GRID = 41
SHOWN = 120  # examples in a panel


@study(
    "gih/fig1",
    paper="invariance",
    figure="1",
    claim=CLAIM,
    sizes={
        "smoke": {"nets": ("lenet",), "side": 16, "networks": 64, "heads": 32, "n_train": 384, "n_test": 400,
                  "epochs": 12, "seeds": 3, "engine": "vmap"},
        "laptop": {"nets": ("mlp", "lenet"), "side": 16, "networks": 256, "heads": 32, "n_train": 8000, "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def fig1(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, with normalisation; or your own as module:factory"] = NETS,
    side: Annotated[int, "side of the grey input image"] = 32,
    networks: Annotated[int, "networks drawn for G"] = 10_000,
    heads: Annotated[int, "output layers per network drawn for G (1 in the paper)"] = 1,
    u1: Annotated[int, "index of the first axis, in both sets"] = 0,
    u2: Annotated[int, "index of the second axis of D_A; D_B has the last eigenvector"] = 1,
    radius: Annotated[float, "radius of the outer circle, the inner one is 0.25; 0: 1.5, for ResNet18 3"] = 0.0,
    sigma: Annotated[float, "noise in the other directions"] = 1.0,
    n_train: Annotated[int, "training examples"] = 10_000,
    n_test: Annotated[int, "test examples"] = 2000,
    seeds: Annotated[int, "initialisations, each with its own data and order"] = 5,
    epochs: Annotated[int, "epochs"] = 20,
    batch_size: Annotated[int, "examples per step"] = 128,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    clip_norm: Annotated[float, "largest gradient norm"] = 0.5,
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32",
    engine: Annotated[str, "auto, vmap, loop or graph"] = "auto",
) -> StudyResult:
    """Circles in a plane aligned with G or not: accuracy and decision boundaries."""
    nets = named(nets)
    shape, cuda = shape_of(1, side, nets), torch.device(run.device).type == "cuda"
    check_axes(f"u1={u1}, u2={u2}", (u1, u2), side**2 - 1)  # the last one is D_B's second axis
    numbers: dict[str, Estimate] = {}
    right: dict[str, bool] = {}
    planes: dict[tuple[str, str], Plane] = {}
    series = []
    outer = {net: radius or (3.0 if is_a(net, "resnet") else 1.5) for net in nets}
    for net in nets:
        G = initial_geometry(run, net, shape, networks=networks, heads=heads)
        radii = (0.25, outer[net])
        for name in SETS:
            axes = torch.stack([G.direction(u1), G.direction(u2 if name == "A" else side**2 - 1)]).to(run.device)

            def one(
                axes: Tensor = axes, net: str = net, name: str = name, G: Geometry = G, r: Any = radii
            ) -> dict[str, Value]:
                train = [Noise.draw(n_train, G.shape, sigma, run.seed, run.device, "train", s) for s in range(seeds)]
                test = [Noise.draw(n_test, G.shape, sigma, run.seed, run.device, "test", s) for s in range(seeds)]
                sets = [circle_sets(part, axes, r) for part in (train, test)]
                done = train_ensemble(
                    record(factory(net, G.shape)), sets[0], test=sets[1], epochs=epochs, batch_size=batch_size, lr=lr,
                    clip_norm=clip_norm, seed=derive(run.seed, net, name), device=run.device,
                    precision=precision if cuda else "float32", engine=engine,  # type: ignore[arg-type]
                )  # fmt: skip
                assert done.networks is not None
                logits = plane_logits(done.networks.to(run.device), axes, 1.4 * r[1])
                data = sets[1][0][0][:SHOWN].flatten(1) @ axes.flatten(1).T  # of the first seed, on the plane
                return {"train": done.train_accuracy, "test": done.test_accuracy, "plane": logits.cpu(),
                        "data": data.cpu(), "classes": sets[1][0][1][:SHOWN].cpu()}  # fmt: skip

            found = run.cached(f"circles {net} {name}", one)
            numbers[f"{net}, {name}: test accuracy, %"] = Estimate.of(percent(torch.as_tensor(found["test"])))
            numbers[f"{net}, {name}: training accuracy, %"] = Estimate.of(percent(torch.as_tensor(found["train"])))
            along = [float(G.values[i] / G.values[0]) for i in (u1, u2 if name == "A" else side**2 - 1)]
            planes[net, name] = Plane(
                torch.as_tensor(found["plane"]), (along[0], along[1]),
                *(torch.as_tensor(found.get(key, ())) for key in ("data", "classes")),  # older runs have none
            )  # fmt: skip
        a, b = (numbers[f"{net}, {name}: test accuracy, %"] for name in SETS)
        right[net] = above(a, 90) and (above(b, 90) if net in ISOTROPIC else below(b, 60))
        series.append(through(net, [1, 2], [a, b], "points"))
        numbers[f"{net}: best accuracy from the first axis alone, %"] = Estimate(100 * one_axis_accuracy(radii))
        numbers[f"{net}: eigenvalue of the second axis, D_B over D_A"] = Estimate(float(G.values[-1] / G.values[u2]))
    _picture(run, nets, planes, outer)
    said = "; ".join(
        f"{net} {numbers[f'{net}, A: test accuracy, %']} % on D_A and {numbers[f'{net}, B: test accuracy, %']} % on "
        f"D_B (the first axis alone allows {numbers[f'{net}: best accuracy from the first axis alone, %'].value:.1f} %)"
        f"{remark(right[net])}"
        for net in nets
    )
    claim, untested = restricted(CLAIM, networks=(nets, NETS))
    return StudyResult(
        verdict=decide(all(right.values()), seeds),
        claim=claim,
        measured=f"{said}. {n_train} examples of 1 x {side} x {side}, {seeds} seeds; the paper gives no numbers and no "
        "settings for this figure: radii and noise are the published code's for its circles."
        + as_they_are(nets)
        + untested,
        numbers=numbers,
        figures=(
            Chart(
                name="accuracy",
                title="Circles aligned with G or not",
                x_label="axes of the plane",
                y_label="test accuracy, %",
                series=tuple(series),
                alt="Test accuracy of each network on D_A and D_B.",
                x_names=("D_A, both aligned", "D_B, one is not"),
            ),
        ),
    )


def one_axis_accuracy(radii: tuple[float, float]) -> float:
    """Best accuracy on the circles from one of their two axes alone: 1 - asin(r/R)/pi.

    Example:
        >>> round(one_axis_accuracy((0.25, 1.5)), 4)
        0.9467
    """
    return 1 - math.asin(min(radii) / max(radii)) / math.pi


def circle_sets(noises: list[Noise], axes: Tensor, radii: tuple[float, float]) -> Lazy:
    """One set of circles per draw of the noise."""
    return Lazy(lambda i: circles_task(noises[i], axes[0], axes[1], radii), len(noises))


def plane_logits(networks: Networks, axes: Tensor, reach: float) -> Tensor:
    """Difference of the two logits [T, GRID, GRID] at a u1 + b u2 without noise, a and b in [-reach, reach]."""
    line = torch.linspace(-reach, reach, GRID, device=axes.device)
    b, a = torch.meshgrid(line, line, indexing="ij")
    points = torch.einsum("ijk,k...->ij...", torch.stack([a, b], dim=-1), axes).flatten(0, 1)
    out = outputs(networks, points)
    return (out[..., 1] - out[..., 0]).view(len(networks), GRID, GRID)


@dataclass(frozen=True)
class Plane:
    """What a panel shows: logits [T, GRID, GRID] (see `plane_logits`), G along both axes, data [n, 2] and classes."""

    logits: Tensor = field(repr=False)
    along: tuple[float, float]
    data: Tensor = field(repr=False)
    classes: Tensor = field(repr=False)


def _picture(run: Run, nets: tuple[str, ...], planes: dict[tuple[str, str], Plane], radii: dict[str, float]) -> None:
    """Decision boundaries of every seed in the plane of the circles, and data projected on it."""

    def draw(axes: Any) -> None:
        turn = torch.linspace(0, 2 * torch.pi, 200)
        for row, net in zip(axes, nets):
            gap = " " if len(net) < 16 else "\n"  # own networks can have long names
            for axis, name in zip(row, SETS):
                reach, shown = 1.4 * radii[net], planes[net, name]
                line = torch.linspace(-reach, reach, GRID).numpy()
                for k, (r, colour) in enumerate(((0.25, "#0072b2"), (radii[net], "#d55e00"))):
                    axis.plot(
                        (r * turn.cos()).numpy(), (r * turn.sin()).numpy(), color=colour, linewidth=2.5, alpha=0.3
                    )
                    points = shown.data[shown.classes == k]
                    if len(points):
                        axis.scatter(*points.T.numpy(), s=7, color=colour, alpha=0.6, linewidths=0, zorder=3)
                for logits in shown.logits:
                    if float(logits.min()) < 0 < float(logits.max()):
                        axis.contour(line, line, logits.numpy(), levels=[0.0], colors="#009e73", linewidths=1.0)
                axis.set_title(f"{net}:{gap}{SETS[name]}", fontsize=8)
                axis.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))  # also where there is no line
                axis.set_xlabel(f"u1 (G: {shown.along[0]:.1g})", fontsize=8)
                axis.set_ylabel(f"u2 (G: {shown.along[1]:.1g})", fontsize=8)
                axis.tick_params(labelsize=7)

    picture(run, "decision-boundaries", len(nets), len(SETS), draw, (3.0, 3.0), caption=CAPTION)
