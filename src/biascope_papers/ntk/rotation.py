"""Fig. 4.8 to 4.10: training on one eigenfunction turns the tangent kernel towards it.

The alignments ||J^T phi_rho||^2 / ||phi_rho||^2 of the first eigenfunctions of the initial kernel are measured again
after training on sign(phi_k) (Fig. 4.8: `targets=500`). The relative gain g_rho is the ratio of the two, divided by its
median over rho. The squared Jacobian norm is the mean over the images of ||grad_theta f||^2, the kernel's diagonal.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import ntk
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import errors_over, mean_of_ranks, over_seeds, spearman
from biascope.support import derive, progress
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t
from biascope_papers.ntk.eigenfunctions import Benchmark, learn

Size = Annotated[int, "images on which the kernel is computed"]


@study(
    "ntk/fig4.8",
    sizes={
        "smoke": {"dataset": "digits", "n": 240, "top": 40, "targets": "5,30", "epochs": 25, "batch": 32,
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "mlp,lenet", "n": 60_000, "top": 1000, "targets": "50,200,500,900", "epochs": 100,
                  **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_8(
    run: Run,
    *,
    dataset: s.Images = "cifar10",
    nets: s.Nets = ("mlp",),
    n: Size = 2000,
    top: Annotated[int, "eigenfunctions that are followed"] = 300,
    targets: Annotated[tuple[int, ...], "eigenfunctions to train on"] = (20, 100, 250),
    training: t.Training = t.LONG,
) -> StudyResult:
    """How training on an eigenfunction changes the kernel's alignment with all of them."""
    numbers: dict[str, Estimate] = {}
    charts, findings = list[Chart](), list[str]()
    for name in progress(nets, "networks"):
        rows: list[dict[str, Any]] = []
        for seed in range(training.seeds):
            bench = Benchmark(run, dataset, name, n, max(top, max(targets) + 1), seed, init=training.init)
            work = partial(_turn, bench, top, training)
            rows += [run.cached(f"{name} {k} {seed}", partial(work, k)) for k in progress(targets, name, leave=False)]
            del bench
        places = list(targets) * training.seeds

        def by_seed(values: list[float]) -> Tensor:  # [seeds, targets]; the targets of the first seed come first
            return torch.tensor(values, dtype=torch.float64).view(training.seeds, -1)

        own = [float(row["gains"][k]) for row, k in zip(rows, places)]
        lead = [float((row["gains"][k] / _without(row["gains"], k).max()).log()) for row, k in zip(rows, places)]
        first = [rank_of(row["gains"], k) == 1 for row, k in zip(rows, places)]
        others = [(_without(row["before"], k), _without(row["after"], k)) for row, k in zip(rows, places)]
        gain, table = over_seeds(by_seed(own)), by_seed(own)
        order = over_seeds(by_seed([spearman(before.tolist(), after.tolist()) for before, after in others]))
        own_numbers = {
            "gain of the target": gain,
            "lead of the target's gain over the largest other (log)": over_seeds(by_seed(lead)),
            "share of trainings where the target gains most": Estimate(sum(first) / len(first)),
            "general growth": over_seeds(by_seed([float(row["growth"]) for row in rows])),
            "share of alignments that grow": over_seeds(
                by_seed([float((row["after"] > row["before"]).double().mean()) for row in rows])
            ),
            "rank correlation of alignments before and after": order,
            "last training loss": over_seeds(by_seed([float(row["loss"]) for row in rows])),
        }
        if all("norm" in row for row in rows):  # runs from before the norm was measured have none
            norm, growth = (by_seed([float(row[key]) for row in rows]) for key in ("norm", "growth"))
            own_numbers["growth of the squared Jacobian norm"] = over_seeds(norm)
            own_numbers["growth of the alignments over that of the norm (log2)"] = over_seeds((growth / norm).log2())
        if len(targets) > 1:
            rising = mean_of_ranks([spearman(targets, row) for row in table.tolist()], len(targets))
            own_numbers["rank correlation of k and the target's gain"] = rising
            own_numbers["log gain of the last target minus the first"] = Estimate.of((table[:, -1] / table[:, 0]).log())
        for j, k in enumerate(targets):  # the worst seed
            ranks = [rank_of(row["gains"], k) for row in rows[j :: len(targets)]]
            own_numbers[f"rank of the gain of target {k}"] = Estimate(max(ranks))
        numbers |= {f"{key}, {name}": value for key, value in own_numbers.items()}
        findings.append(f"{s.title(name)}: the target gains {gain}, the most in {sum(first)} of {len(first)} trainings")
        charts += [_alignment_chart(name, k, row) for k, row in zip(targets, rows)]
    return StudyResult(
        measured=f"{'; '.join(findings)}. {n} images, {training.epochs:g} epochs; "
        f"{errors_over(training.seeds, len(targets), 'targets')}.{s.noted(dataset)}",
        numbers=numbers,
        figures=tuple(charts),
    )


def rank_of(gains: Tensor, k: int) -> int:
    """1 if gains[k] is the largest, 2 if one is larger, and so on."""
    return 1 + int((gains > gains[k]).sum())


def _without(values: Tensor, k: int) -> Tensor:
    """All entries but the k-th."""
    return torch.cat([values[:k], values[k + 1 :]])


def alignments(net: nn.Module, x: Tensor, vectors: Tensor) -> tuple[Tensor, float]:
    """phi^T K phi for unit vectors, columns of [n, k], and the mean of K's diagonal, E_x ||grad_theta f||^2.

    The first is what `target_alignments` gives, by way of the kernel: with hundreds of eigenfunctions one kernel costs
    less than a backward pass for each of them.
    """
    K = ntk(net, x, outputs=0).matrix()
    V = vectors.to(K)
    return (V * (K @ V)).double().sum(0) / V.double().square().sum(0), float(K.diagonal().double().mean())


def squared_norm(net: nn.Module, x: Tensor, size: int = 500) -> float:
    """E_x ||grad_theta f||^2, the mean of the kernel's diagonal, from kernels of a few images at a time."""
    parts = [ntk(net, part, outputs=0).matrix().diagonal() for part in torch.split(x, size)]
    return float(torch.cat(parts).double().mean())


def _turn(bench: Benchmark, top: int, training: t.Training, k: int) -> dict[str, Any]:
    net, keep = training.copy_of(bench.net, "f"), max(top, k + 1)
    found = learn(net, bench, k, training.recipe(bench.n_train), derive(bench.run.seed, "order", bench.seed))
    start = squared_norm(bench.net, bench.x)
    after, end = alignments(t.expanded(net, bench.net), bench.x, bench.spectrum.vectors)
    before = bench.spectrum.values.double()
    before, after = before[:keep].cpu(), after[:keep].cpu()
    growth = (after / before).quantile(0.5)
    result = {"loss": found["loss"], "accuracy": found["accuracy"], "norm": end / start}
    gains = after / before / growth
    bench.run.log(target=k, seed=bench.seed, gain=float(gains[k]), **result)
    return {"gains": gains, "before": before, "after": after, "growth": float(growth), **result}


def _alignment_chart(name: str, k: int, row: dict[str, Any]) -> Chart:
    places = range(1, 1 + len(row["before"]))
    return Chart(
        f"alignment-{name}-{k}",
        f"Alignment with the initial eigenfunctions, {s.title(name)} trained on number {k + 1}",
        "eigenfunction", "alignment",
        (
            Series.of("before training", places, row["before"]),
            Series.of("after training", places, row["after"], style="points"),
            Series.of("the target, after", [k + 1], [row["after"][k]], style="points"),
        ),
        alt="Alignments fall with the index; after training they are higher, with a spike at the target.",
        log_x=True, log_y=True,
    )  # fmt: skip
