"""Figs. 5.4 and C.9: the quadratic model, solved, and ordinary two-layer networks on its data, in both regimes.

Three data sets in which labels, not inputs, decide what is learnt first: the order of the modes, label noise, a
spurious feature. In example 2 all modes but one share their mu, so the model depends on the choice of a basis in that
space: generic bases (seeded rotations), and the one aligned with the labels, where the order is reversed. Difficult
groups are read where the error of the easy group first is below four levels.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from biascope.data import QuadraticTask, quadratic_example1, quadratic_example2, quadratic_example3
from biascope.nets import MLP
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import through
from biascope.support import derive
from biascope.tangent.quadratic import QuadraticModel, example_errors, quadratic_model, simulate
from biascope_papers.lazy.comparison import Style, estimate, known, progress_chart
from biascope_papers.lazy.crowd import Crossings, cross, squares

LEVELS = (0.8, 0.6, 0.4, 0.2)
EXAMPLES = ("order", "noise", "spurious")
STYLES: dict[str, Style] = {"non-linear": "line", "linear": "dashed"}
LRS = (0.001, 0.01)
AUTHORS = {"width": 0, "alphas": (0.1, 10.0), "lrs": (0.0036, 0.0036)}
"""Their program for example 1: as many units as inputs, alpha 0.1 and 10, a rate of 0.001 on the mean of five squares,
which here (half the sum of squares, the rate times mu_1 = 9) is 0.001 * 2 / 5 * 9. None is public for examples 2 and 3.
"""


@study(
    "lazy/fig5.4",
    sizes={"smoke": {"rotations": 8, "points": 4001}, "laptop": {}, "paper": {"rotations": 100}},
)
def fig5_4(
    run: Run,
    *,
    theta0: Annotated[float, "start of every mode, w0^2 / 2"] = 1e-3,
    eps: Annotated[float, "distance at which a mode counts as learnt"] = 0.01,
    q: Annotated[int, "noisy or minority examples, of 20"] = 5,
    eta: Annotated[float, "size of the private feature in example 2 (twice that in example 3)"] = 5.0,
    lam: Annotated[float, "size of the core feature in example 3"] = 1.0,
    rotations: Annotated[int, "generic bases of the degenerate space of example 2"] = 20,
    points: Annotated[int, "times at which curves are computed"] = 20_001,
) -> StudyResult:
    """Closed-form learning curves of the three examples in both regimes."""
    first = quadratic_example1()
    model = quadratic_model(first.mu, first.y_mode, theta0)
    times = {"non-linear": model.times(eps).nonlinear, "linear": model.times(eps).linear}
    hasty, lazy = (t.argsort() for t in times.values())
    same = int((hasty != lazy.flip(0)).sum())

    noisy = [quadratic_example2(q=q, eta=eta, basis=derive(run.seed, "basis", r) % 2**31) for r in range(rotations)]
    table2 = torch.stack([at_levels(task, theta0, points) for task in noisy])  # [rotations, 2, 4]
    aligned = at_levels(quadratic_example2(q=q, eta=eta, basis="aligned"), theta0, points)
    third = quadratic_example3(q=q, eta=2 * eta, lam=lam)
    table3 = at_levels(third, theta0, points)
    descent, printed = map(max, zip(*(_descent_error(task, theta0) for task in (first, noisy[0], third))))

    numbers = {
        f"example 1, t of mode {i + 1}, {name}": Estimate(float(t[i]))
        for name, t in times.items()
        for i in range(len(t))
    }
    numbers["example 1, modes whose place is not reversed"] = Estimate(same)
    for k, level in enumerate(LEVELS):
        second = f"example 2, noisy error at clean error {level:g}"
        minority = f"example 3, minority error at majority error {level:g}"
        for r, name in enumerate(times):
            numbers[f"{second}, {name}"] = Estimate.of(table2[:, r, k])
            numbers[f"{minority}, {name}"] = Estimate(float(table3[r, k]))
        numbers[f"{second}, non-linear minus linear"] = Estimate.of(table2[:, 0, k] - table2[:, 1, k])
        numbers[f"{minority}, non-linear minus linear"] = Estimate(float(table3[0, k] - table3[1, k]))
        numbers[f"example 2, aligned basis, noisy error at {level:g}, non-linear"] = Estimate(float(aligned[0, k]))
    numbers["largest |gradient descent - closed form|"] = Estimate(descent)
    numbers["largest |gradient descent - linearised form as printed|"] = Estimate(printed)
    last = [Estimate.of(table2[:, r, 3]) for r in (0, 1)]
    opposite = ", the opposite order" if bool((aligned[0] < aligned[1]).all()) else ""
    return StudyResult(
        measured=f"Example 2, noisy error at clean error 0.2: {last[0]} against {last[1]} over {rotations} generic "
        f"bases; in the basis aligned with the labels {aligned[0, 3]:.2f} against {aligned[1, 3]:.2f}{opposite}. "
        f"Gradient descent differs from the closed forms, the corrected ones, by at most {descent:.1e}.",
        numbers=numbers,
        figures=(
            _modes_chart(model),
            _groups_chart(noisy[0], theta0, "clean", "noisy"),
            _groups_chart(third, theta0, "majority", "minority"),
        ),
    )


def curves(task: QuadraticTask, theta0: float, points: int) -> list[tuple[Tensor, Tensor]]:
    """(easy error, difficult error), each [points], of the non-linear and the linear regime."""
    model = quadratic_model(task.mu, task.y_mode, theta0)
    arrived, there = model.times(1e-3), task.y_mode > 1e-9 * task.y_mode.max()
    found = []
    for curve, ends in ((model.nonlinear, arrived.nonlinear), (model.linearised, arrived.linear)):
        t = torch.linspace(0, float(ends[there].max()), points, dtype=torch.float64)
        errors = example_errors(curve(t), task.mu, task.u, task.y)
        found.append((errors[:, task.group == 0].mean(1), errors[:, task.group == 1].mean(1)))
    return found


def at_levels(task: QuadraticTask, theta0: float, points: int) -> Tensor:
    """Error of the difficult group [2, 4] (non-linear, linear) when the easy group's first is below the levels."""
    both = curves(task, theta0, points)
    return torch.stack([torch.stack([hard[(easy < v).double().argmax()] for v in LEVELS]) for easy, hard in both])


def _descent_error(task: QuadraticTask, theta0: float) -> tuple[float, float]:
    """Gradient descent with small steps against the closed forms, at the time the first mode is half-way.

    Second: against the linearised form as printed (5.4.6), whose rate is mu theta0 and not 2 mu theta0.
    """
    model = quadratic_model(task.mu, task.y_mode, theta0)
    steps, worst, printed = 2000, 0.0, 0.0
    for linearised in (False, True):
        end = float((model.times(0.3).linear if linearised else model.times(0.3).nonlinear).max())
        exact = model.linearised(end) if linearised else model.nonlinear(end)
        reached = simulate(model, end / steps, [steps], linearised)
        worst = max(worst, float((reached - exact).abs().max()))
        if linearised:
            printed = float((reached - model.linearised(end / 2)).abs().max())
    return worst, printed


def _modes_chart(model: QuadraticModel) -> Chart:
    series, ends = [], model.times(1e-2)
    for (name, style), curve, times in zip(
        STYLES.items(), (model.nonlinear, model.linearised), (ends.nonlinear, ends.linear)
    ):
        end = float(times.max())
        t = torch.linspace(0, end, 200, dtype=torch.float64)
        theta = curve(t) / model.theta_star
        modes = (0, len(model.mu) - 1)
        series += [Series.of(f"mode {i + 1}, {name}", t / end, theta[:, i], style=style) for i in modes]
    return Chart("example-1", "Example 1: two modes in both regimes", "time / time of the slowest mode",
                 "theta / theta*", tuple(series),
                 alt="The non-linear regime learns the last mode first, the linear one the first mode.")  # fmt: skip


def _groups_chart(task: QuadraticTask, theta0: float, easy_name: str, hard_name: str) -> Chart:
    both = zip(STYLES.items(), curves(task, theta0, 400))
    return progress_chart(
        task.name, f"Error of the {hard_name} examples at equal error of the {easy_name} ones",
        f"mean squared error, {easy_name}", f"mean squared error, {hard_name}",
        [Series.of(label, easy, hard, style=style) for (label, style), (easy, hard) in both],
        f"The {hard_name} error of the non-linear regime lies above that of the linear one.",
        "The first generic basis." if task.name == "quadratic-2" else "",
    )  # fmt: skip


@study(
    "lazy/figC.9",
    sizes={
        "smoke": AUTHORS | {"seeds": 6, "steps": 1000, "lrs": (0.02, 0.02)},
        "laptop": AUTHORS,
        "paper": AUTHORS | {"seeds": 100},
    },
)
def fig_c_9(
    run: Run,
    *,
    seeds: Annotated[int, "networks"] = 20,
    width: Annotated[int, "hidden units, 0: as many as inputs"] = 50,
    activation: Annotated[str, "identity or relu"] = "identity",
    scale: Annotated[float, "factor on torch's initial weights"] = 0.5,
    alphas: Annotated[tuple[float, ...], "the non-linear and the linear regime"] = (0.1, 100.0),
    lrs: Annotated[tuple[float, ...], "learning rate of the plain network for each alpha, times the largest mu"] = LRS,
    steps: Annotated[int, "gradient steps at most"] = 4000,
    capture: Annotated[bool, "replay a CUDA graph, on CUDA"] = True,
) -> StudyResult:
    """Dense two-layer networks on the data of the three examples.

    Networks f = v^T W x without biases are trained by full-batch gradient descent; widths and rates are those of the
    authors' program. Example 1 asks whether the order of the five examples flips: the relative residual of every
    example when the mean squared residual has fallen to half; its slope over the index has opposite signs in the
    quadratic model.
    """
    tasks = dict(zip(EXAMPLES, (quadratic_example1(), quadratic_example2(), quadratic_example3())))

    def train(name: str, alpha: float, lr: float) -> Crossings:
        task = tasks[name]
        x, y = (v[None].expand(seeds, *v.shape).contiguous().to(run.device) for v in (task.x, task.y))
        units = width or x.shape[2]

        def factory() -> MLP:
            return MLP(in_features=x.shape[2], hidden=(units,), activation=activation, bias=False).double()

        return cross(
            factory, x, y, task.x.to(run.device), alpha=alpha, lr=lr / float(task.mu[0]), steps=steps, scale=scale,
            thresholds=(0.5,) if name == "order" else LEVELS, loss=squares, measure=_progress(task, run.device),
            include_init_output=False, seed=derive(run.seed, "networks"), capture=capture,
        )  # fmt: skip

    found = {
        name: [
            Crossings.cached(run, f"{name} alpha={alpha:g}", partial(train, name, alpha, lr))
            for alpha, lr in zip(alphas, lrs, strict=True)
        ]
        for name in tasks
    }
    numbers, figures, gaps = dict[str, Estimate](), list[Chart](), list[Estimate]()
    for alpha, found_here in zip(alphas, found["order"]):
        value = estimate(slope(found_here, tasks["order"]))
        numbers[f"example 1, slope of the relative residual over the index, alpha = {alpha:g}"] = value
    for name in EXAMPLES[1:]:
        errors = [difficult_error(c, tasks[name]) for c in found[name]]  # [T, 4] each
        table = {alpha: [estimate(v[v.isfinite()]) for v in own.T] for alpha, own in zip(alphas, errors)}
        for alpha, row in table.items():
            for level, value in zip(LEVELS, row):
                numbers[f"{name}: difficult error at easy error {level:g}, alpha = {alpha:g}"] = value
        gap = (errors[0] - errors[1]).nanmean(1)
        gaps.append(estimate(gap[gap.isfinite()]))
        numbers[f"{name}: difficult error, small minus large alpha"] = gaps[-1]
        figures.append(_chart(name, table))
    return StudyResult(
        measured="Difficult error at equal easy error, small minus large alpha: "
        f"{gaps[0]} with label noise, {gaps[1]} with a spurious feature.",
        numbers=known(numbers),
        figures=tuple(figures),
    )


def _progress(task: QuadraticTask, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean squared error of the easy group; for example 1 mean squared residual relative to its start."""
    easy = (task.group == 0).nonzero().flatten().to(device)  # there before a graph is captured
    whole = float(task.y.square().sum())

    def measure(out: Tensor, y: Tensor) -> Tensor:
        residual = (out - y).square()
        return residual.sum(1) / whole if task.name == "quadratic-1" else residual.index_select(1, easy).mean(1)

    return measure


def slope(found: Crossings, task: QuadraticTask) -> Tensor:
    """Slope [T] of the relative residual |y - f| / |y| over the index of the example, at half the squared residual."""
    reached = found.steps[:, 0] >= 0
    residual = ((found.outputs[reached, 0] - task.y) / task.y).abs()
    index = torch.arange(len(task.y), dtype=torch.float64)
    index -= index.mean()
    return (residual - residual.mean(1, keepdim=True)) @ index / index.square().sum()


def difficult_error(found: Crossings, task: QuadraticTask) -> Tensor:
    """Mean squared error [T, K] of the difficult group at the thresholds; NaN where they were not reached."""
    return (found.outputs - task.y)[:, :, task.group == 1].square().mean(2)


def _chart(name: str, table: dict[float, list[Estimate]]) -> Chart:
    shown = {alpha: [(v, e) for v, e in zip(LEVELS, row) if e.n] for alpha, row in table.items()}
    series = [through(f"alpha = {alpha:g}", [v for v, _ in row], [e for _, e in row]) for alpha, row in shown.items()]
    return progress_chart(
        name, f"Dense network, {name}: error of the difficult examples", "mean squared error of the easy examples",
        "mean squared error of the difficult examples", series, "Two nearly equal curves, one per alpha.", "",
    )  # fmt: skip
