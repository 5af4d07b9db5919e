"""Fig. 4.1 and B.4 (also 6.1): eigenfunctions of the tangent kernel while a network learns a disk.

Points of the square are positive inside the disk of radius sqrt(2 / pi). The published lambda_20 / lambda_1 is that of
the centred kernel: the uncentred one starts a hundred times lower. The learning rate is not in the text, and the last
value depends on it.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from biascope import nets, ntk
from biascope.data import disk, disk_labels, square_grid
from biascope.linalg import effective_rank
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.studies.pictures import picture, signed
from biascope.support import derive, progress
from biascope_papers.ntk.training import Recipe, evaluate, fit

SHOWN = (0, 1, 2, 3, 4, 19)  # eigenfunctions in the picture
TOP, RINGS = 5, 12  # eigenfunctions among which round ones are looked for, and rings of the disk of radius 1
CAPTION = "Eigenfunctions of the tangent kernel on the plane while one network trains: red positive, blue negative."


@study(
    "alignment/fig4.1",
    sizes={
        "smoke": {"n": 100, "width": 64, "depth": 3, "grid": 12, "iterations": "0,400", "lr": 0.5, "seeds": 2},
        "laptop": {"seeds": 2, "grid": 30},
        "paper": {"seeds": 10, "iterations": "0,50,100,200,300,500,1000,2000"},
    },
)
def fig4_1(
    run: Run,
    *,
    n: Annotated[int, "training points"] = 500,
    width: Annotated[int, "units per hidden layer"] = 256,
    depth: Annotated[int, "hidden layers"] = 6,
    grid: Annotated[int, "side of the grid on which the kernel is computed"] = 50,
    lr: Annotated[float, "learning rate (not in the text)"] = 0.05,
    iterations: Annotated[tuple[int, ...], "when to measure, in steps of gradient descent"] = (0, 100, 300, 1000, 2000),
    seeds: Annotated[int, "initialisations"] = 3,
) -> StudyResult:
    """Eigenfunctions of the tangent kernel on a plane, its spectrum and its alignment while a disk is learnt."""
    times = sorted({0, *iterations})
    task = disk(n, seed=derive(run.seed, "points")).to(run.device)

    def train(seed: int) -> dict[str, Tensor]:
        init = derive(run.seed, "init", seed)
        net = nets.build("mlp", seed=init, in_features=2, hidden=(width,) * depth).to(run.device)
        points = square_grid(grid).to(run.device)
        labels = disk_labels(points)
        signs = labels.double() * 2 - 1
        rows: dict[str, list[Any]] = {name: [] for name in ("ratio", "raw", "cka", "rank", "top", "accuracy")}
        values, functions, fits = [], [], []

        def look(step: int) -> None:
            K = ntk(net, points, outputs=0, precision="float64")
            centred, plain = K.centered().eigh(), K.eigh()
            lam = centred.values.double()
            vectors = centred.vectors[:, [i for i in SHOWN if i < len(lam)]].double()
            overlap = vectors.T @ (signs / signs.norm())
            functions.append((vectors * torch.where(overlap < 0, -1.0, 1.0)).T.float().cpu())
            fits.append(overlap.abs().cpu())
            values.append((lam[:100] / lam[0]).cpu())
            rows["ratio"].append(float(lam[19] / lam[0]))
            rows["raw"].append(float(plain.values[19] / plain.values[0]))
            rows["cka"].append(K.alignment(signs))
            rows["rank"].append(effective_rank(lam))
            rows["top"].append(float(plain.values[0]))
            rows["accuracy"].append(evaluate(net, points, labels)[1])
            run.log(seed=seed, step=step, **{name: row[-1] for name, row in rows.items()})

        recipe = Recipe(times[-1], n, lr, momentum=0.0, schedule="constant", precision="float32")
        fit(net, task.x, task.y, recipe, derive(run.seed, "order", seed), at=times, look=look)
        tables = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
        return tables | {n: torch.stack(v) for n, v in (("values", values), ("functions", functions), ("fit", fits))}

    found: list[dict[str, Any]] = run.cached_each("seed", progress(range(seeds), "seeds"), train)
    ratio, cka, rank, top, accuracy = (
        torch.stack([f[name] for f in found]) for name in ("ratio", "cka", "rank", "top", "accuracy")
    )  # [seeds, times]
    last = times[-1]
    numbers = {
        "lambda_20 / lambda_1 at iteration 0": Estimate.of(ratio[:, 0]),
        f"lambda_20 / lambda_1 at iteration {last}": Estimate.of(ratio[:, -1]),
        "rise of the CKA": Estimate.of(cka[:, -1] - cka[:, 0]),
        "fall of lambda_20 / lambda_1": Estimate.of(ratio[:, 0] - ratio[:, -1]),
        "lowest effective rank": Estimate.of(rank.min(1).values),
        "growth of lambda_1": Estimate.of(top[:, -1] / top[:, 0]),
        "accuracy on the grid": Estimate.of(accuracy[:, -1]),
    }
    first, end = list(numbers.values())[:2]
    round_ = torch.stack([radial_share(f["functions"][:, :TOP], square_grid(grid)).amax(1) for f in found])
    fit_ = torch.stack([f["fit"][:, :TOP].amax(1) for f in found])  # [seeds, times]
    for name, row in (("radial share", round_), ("overlap with the labels", fit_)):
        rise = Estimate.of(row[:, -1] - row[:, 0])
        numbers[f"rise of the largest {name} of the first {TOP} eigenfunctions"] = rise
    functions = found[0]["functions"].view(len(times), len(SHOWN), grid, grid)
    _picture(run, functions, times)
    return StudyResult(
        measured=f"Centred lambda_20 / lambda_1 goes from {first} to {end} in {last} iterations at learning rate "
        f"{lr:g} (not in the text); the alignment with the labels rises by {numbers['rise of the CKA']}.",
        numbers=numbers,
        figures=_charts(times, cka, ratio, found[0]["values"], functions[-1], int(found[0]["fit"][-1].argmax())),
    )


def radial_share(functions: Tensor, points: Tensor) -> Tensor:
    """Share [...] of the variance of functions [..., n] in the unit disk that the radius of points [n, 2] explains."""
    radius = points.norm(dim=1)
    inside = radius < 1
    ring = torch.nn.functional.one_hot((radius[inside] * RINGS).long(), RINGS).double()
    values = functions[..., inside].double()
    values = values - values.mean(-1, keepdim=True)
    counts = ring.sum(0)
    return ((values @ ring).square() / counts.clamp_min(1)).sum(-1) / values.square().sum(-1)


def _charts(
    times: list[int], cka: Tensor, ratio: Tensor, values: Tensor, functions: Tensor, best: int
) -> tuple[Chart | HeatMap, ...]:
    """Alignment and steepness; eigenvalues [times, k] and last eigenfunctions [shown, grid, grid] of the first seed."""
    shown = [max(1, t) for t in times]
    line = torch.linspace(-1, 1, functions.shape[-1]).tolist()
    alignment = (
        curve("CKA with the labels", shown, cka),
        curve("lambda_20 / lambda_1, centred", shown, ratio),
        Series.of("published ratio", [1, 2000], [0.015, 0.002], style="points"),
    )
    spectra = (Series.of(f"iteration {t}", range(1, 1 + len(row)), row) for t, row in zip(times, values))
    return (
        Chart(
            "alignment", "Alignment with the labels and steepness of the spectrum", "iteration",
            "CKA; ratio of eigenvalues", alignment,
            alt="CKA with the labels and the ratio of eigenvalues over iterations.",
            caption="Iteration 0 is drawn at 1. Mean and standard error over seeds.", log_x=True, log_y=True,
        ),
        Chart(
            "spectrum", "Eigenvalues of the centred kernel relative to the first", "index", "lambda_j / lambda_1",
            tuple(spectra), alt="Decaying eigenvalues at several iterations, first seed.", log_x=True, log_y=True,
        ),
        HeatMap.of(
            "eigenfunction",
            f"Eigenfunction {SHOWN[best] + 1}, of those shown the nearest to the labels, at iteration {times[-1]}",
            x=line, y=line, z=functions[best].tolist(), x_label="x_1", y_label="x_2", z_label="value",
            alt="An eigenfunction of the kernel over the square; a ring or disk where the labels are.", diverging=True,
        ),
    )  # fmt: skip


def _picture(run: Run, functions: Tensor, times: list[int]) -> None:
    """Eigenfunctions of the first seed, one row per iteration."""

    def draw(axes: Any) -> None:
        for r, row in enumerate(functions):
            for c, image in enumerate(row):
                signed(axes[r][c], image, origin="lower")
                if r == 0:
                    axes[r][c].set_title(f"eigenfunction {SHOWN[c] + 1}", fontsize=8)
            axes[r][0].set_ylabel(f"iteration {times[r]}", fontsize=8)

    rows, columns = functions.shape[:2]
    picture(run, "eigenfunctions", rows, columns, draw, (1.4, 1.45), dpi=150, caption=CAPTION)
