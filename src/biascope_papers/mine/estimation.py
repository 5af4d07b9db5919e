"""Fig. 5.1 and 5.2: MINE, MINE-f and nearest neighbours on problems with known information.

MINE and MINE-f are reported on pairs they were not trained on: MINE as usually printed (Donsker-Varadhan, plug-in) and
as a lower bound in expectation. A training that diverges is a result: it is counted, and has no estimate.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from biascope import BiascopeError, InputError, mutual_information
from biascope.information import EstimateWarning, Problem, gaussian_problem, noisy_function_problem
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, spearman, through
from biascope.support import derive, progress

RELATIVE, ABSOLUTE = 0.05, 0.02  # what "close" means: the larger of the two
LARGEST_RHO = 0.9  # up to which it is asked
ENOUGH_NATS = 0.5  # with less, there is little to tell apart
FUNCTIONS: dict[Literal["linear", "cubic", "sine"], str] = {"linear": "x", "cubic": "x^3", "sine": "sin x"}
RHOS = (-0.99, -0.9, -0.7, -0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
SMOKE: dict[str, Any] = {"pairs": 1000, "steps": 60, "batch": 128, "lr": 2e-3, "seeds": 2}
LAPTOP: dict[str, Any] = {"pairs": 10_000, "steps": 1000, "batch": 256, "seeds": 3}


@dataclass(frozen=True)
class Training:
    """Options of the trained estimators."""

    pairs: Annotated[int, "pairs for MINE and MINE-f, a quarter of them held out (not given in the text)"] = 100_000
    steps: Annotated[int, "Adam steps of a critic (not given)"] = 3000
    batch: Annotated[int, "pairs in a step (not given)"] = 512
    lr: Annotated[float, "of Adam (not given)"] = 1e-3
    seeds: Annotated[int, "draws of pairs and critics"] = 5


PUBLISHED = Training()


@study(
    "mine/fig5.1",
    sizes={
        "smoke": SMOKE | {"rhos": (0.0, 0.6), "ksg_pairs": 800},
        "laptop": LAPTOP | {"rhos": (-0.9, -0.5, 0.0, 0.5, 0.9), "ksg_pairs": 3000},
        "paper": {},
    },
)
def fig5_1(
    run: Run,
    *,
    dims: Annotated[tuple[int, ...], "d, components of x and of y"] = (2, 20),
    rhos: Annotated[tuple[float, ...], "correlations of the components"] = RHOS,
    ksg_pairs: Annotated[int, "the first of the pairs, for KSG: its cost grows with the square (not given)"] = 20_000,
    training: Training = PUBLISHED,
) -> StudyResult:
    """Estimates against the correlation of Gaussians, in few and in many dimensions.

    x and y are d standard Gaussians each, corr(x_i, y_j) = rho if i = j and else 0: -(d/2) log(1 - rho^2) nats.
    """
    rhos = tuple(sorted(rhos))
    found: dict[int, dict[str, Estimates]] = {}
    exact: dict[int, list[float]] = {}
    for d in dims:
        problems = [gaussian_problem(d, rho) for rho in rhos]
        exact[d] = [problem.nats for problem in problems]
        found[d] = {
            "MINE": estimates(run, problems, "mine", training),
            "MINE-f": estimates(run, problems, "mine-f", training),
            "KSG": estimates(run, problems, "ksg", training, use=ksg_pairs),
        }
    low, high = min(dims), max(dims)
    numbers: dict[str, Estimate] = {}
    for d in dims:
        mine, mine_f = found[d]["MINE"], found[d]["MINE-f"]
        for i, rho in enumerate(rhos):
            at = f"d = {d}, rho = {rho:g}"
            numbers[f"truth, {at}"] = Estimate(exact[d][i])
            numbers |= settled({f"{name}, {at}": e.nats[:, i] for name, e in found[d].items()})
            numbers |= settled({f"MINE - MINE-f, {at}": mine.nats[:, i] - mine_f.nats[:, i]})
            numbers[f"MINE plug-in, {at}"] = Estimate.of(mine.plug_in[:, i])
        truth = torch.tensor(exact[d])
        looser = (mine_f.nats - truth).abs() - (mine.plug_in - truth).abs()
        numbers |= settled({f"distance from the truth, MINE-f - MINE plug-in, d = {d}": looser.nanmean(1)})
        numbers[f"trainings of MINE-f that diverged, d = {d}"] = Estimate(int(mine_f.nats.isnan().sum()))
    off, ahead = dict[str, Estimate](), dict[str, Estimate]()
    for i, rho in enumerate(rhos):
        shown = {"MINE": found[low]["MINE"].nats, "MINE plug-in": found[low]["MINE"].plug_in}
        for name, nats in (shown | {"KSG": found[low]["KSG"].nats}).items():
            if abs(rho) <= LARGEST_RHO:
                each = in_tolerances(nats[:, i].tolist(), exact[low][i])
                off[f"({name} - truth) / tolerance, d = {low}, rho = {rho:g}"] = each
        if exact[high][i] >= ENOUGH_NATS:
            ksg = found[high]["KSG"].nats[:, i]
            closer = (ksg - exact[high][i]).abs() - (found[high]["MINE"].plug_in[:, i] - exact[high][i]).abs()
            ahead[f"distance from the truth, KSG - MINE plug-in, d = {high}, rho = {rho:g}"] = Estimate.of(closer)
    top = max(range(len(rhos)), key=lambda i: exact[high][i])
    at = f"d = {high}, rho = {rhos[top]:g}"
    noted = sum(found[d][name].noted for d in dims for name in ("MINE", "MINE-f"))
    return StudyResult(
        measured=f"d = {high}, rho = {rhos[top]:g}: MINE as printed {numbers[f'MINE plug-in, {at}']}, KSG "
        f"{numbers[f'KSG, {at}']}, the truth {exact[high][top]:.2f} nats. {training.pairs} pairs, the first "
        f"{ksg_pairs} for KSG; {noted} of {2 * len(dims) * len(rhos) * training.seeds} trained estimates carry a note.",
        numbers=numbers | off | ahead,
        figures=tuple(_gaussians(d, rhos, found[d]) for d in dims),
    )


@study(
    "mine/fig5.2",
    sizes={
        "smoke": SMOKE | {"sigmas": (0.1, 0.3, 0.9)},
        "laptop": LAPTOP | {"sigmas": (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},
        "paper": {},
    },
)
def fig5_2(
    run: Run,
    *,
    sigmas: Annotated[tuple[float, ...], "levels of noise"] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    training: Training = PUBLISHED,
) -> StudyResult:
    """The estimate against the noise in y = f(x) + sigma noise for f = x, x^3 and sin x; x is uniform on (-1, 1)^2.

    The information itself differs between the three by up to a factor 2 at equal noise.
    """
    sigmas = tuple(sorted(sigmas))
    problems = {f: [noisy_function_problem(f, sigma) for sigma in sigmas] for f in FUNCTIONS}
    exact = {f: [problem.nats for problem in row] for f, row in problems.items()}
    found = {f: estimates(run, row, "mine", training) for f, row in problems.items()}
    falls = {
        f"fall of MINE, f = {label}, sigma = {sigmas[i]:g} to {sigmas[i + 1]:g}": Estimate.of(
            found[f].nats[:, i] - found[f].nats[:, i + 1]
        )
        for f, label in FUNCTIONS.items()
        for i in range(len(sigmas) - 1)
    }
    together = torch.cat([e.nats for e in found.values()], 1)  # [seeds, functions * levels]
    truth = [nats for row in exact.values() for nats in row]
    follows = Estimate.of([spearman(row, truth) for row in together.tolist()])
    same = {
        f"MINE plug-in of {FUNCTIONS[f]} over that of x, sigma = {sigma:g}": Estimate.of(
            found[f].plug_in[:, i] / found["linear"].plug_in[:, i]
        )
        for f in FUNCTIONS
        if f != "linear"
        for i, sigma in enumerate(sigmas)
    }
    numbers = {"rank correlation with the exact information": follows}
    for f, label in FUNCTIONS.items():
        for i, sigma in enumerate(sigmas):
            numbers[f"MINE, f = {label}, sigma = {sigma:g}"] = Estimate.of(found[f].nats[:, i])
            numbers[f"exact, f = {label}, sigma = {sigma:g}"] = Estimate(exact[f][i])
    curves = [curve(f"MINE, f = {label}", sigmas, found[f].nats) for f, label in FUNCTIONS.items()]
    curves += [Series.of(f"exact, f = {label}", sigmas, exact[f], style="dashed") for f, label in FUNCTIONS.items()]
    chart = Chart(
        "noise", "Information between x and f(x) + noise, by MINE", "sigma of the noise", "mutual information (nats)",
        tuple(curves),
        alt="Three falling curves, that of the cube below the other two, each beside the exact one.",
        caption="Dashed: exact, by quadrature. It differs between functions at equal noise.",
    )  # fmt: skip
    return StudyResult(
        measured=f"Rank correlation of MINE with the exact information {follows}. "
        f"{sum(e.noted for e in found.values())} of {together.numel()} estimates carry a note on their reliability.",
        numbers=numbers | same | falls,
        figures=(chart,),
    )


@dataclass(frozen=True)
class Estimates:
    """`nats` and `plug_in` [seeds, problems] (the same but for MINE), and how many estimates came with a note.

    NaN stands for a training that diverged.
    """

    nats: Tensor
    plug_in: Tensor
    noted: int


def settled(values: dict[str, Tensor]) -> dict[str, Estimate]:
    """Estimates over the repeats [seeds] that are numbers; a name that has none is left out."""
    kept = {name: row[~row.isnan()] for name, row in values.items()}
    return {name: Estimate.of(row) for name, row in kept.items() if len(row)}


def estimates(
    run: Run,
    problems: Sequence[Problem],
    estimator: Literal["mine", "mine-f", "ksg"],
    training: Training,
    use: int | None = None,
) -> Estimates:
    """Every problem at every seed. All estimators see the same pairs at a seed, or the first `use` of them."""

    def compute(problem: Problem, seed: int) -> dict[str, Tensor]:
        pairs = problem.sample(training.pairs, derive(run.seed, "pairs", problem.name, seed))
        x, y = (v[:use].to(run.device) for v in pairs)
        how: dict[str, Any] = {"steps": training.steps, "batch_size": training.batch, "lr": training.lr}
        own = derive(run.seed, "training", problem.name, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EstimateWarning)
            try:
                found = mutual_information(x, y, estimator, seed=own, **({} if estimator == "ksg" else how))
            except InputError:
                raise
            except BiascopeError as error:  # the critic diverged: e^T itself is what MINE-f is trained with
                run.log(problem=problem.name, estimator=estimator, seed=seed, diverged=str(error), exact=problem.nats)
                return {"values": torch.tensor([math.nan, math.nan, 1.0], dtype=torch.float64)}
        run.log(problem=problem.name, estimator=estimator, seed=seed, nats=found.nats, exact=problem.nats)
        usual = found.nats if found.plug_in is None else found.plug_in
        return {"values": torch.tensor([found.nats, usual, len(found.notes)], dtype=torch.float64)}

    rows: list[Any] = [
        run.cached(f"{p.name} {estimator} {seed}", lambda p=p, s=seed: compute(p, s))["values"]  # type: ignore[misc]
        for seed, p in progress([(seed, p) for seed in range(training.seeds) for p in problems], estimator)
    ]
    nats, plug_in, notes = torch.stack(rows).reshape(training.seeds, len(problems), 3).unbind(-1)
    return Estimates(nats, plug_in, int((notes > 0).sum()))


def in_tolerances(samples: Sequence[float], truth: float) -> Estimate:
    """How far the mean of samples is from the truth, in units of what counts as close."""
    return Estimate.of([(sample - truth) / max(RELATIVE * abs(truth), ABSOLUTE) for sample in samples])


def _points(name: str, rhos: tuple[float, ...], nats: Tensor) -> Series:
    """Estimates [seeds, rhos] over the correlations, without those that have none."""
    drawn = settled({f"{rho}": nats[:, i] for i, rho in enumerate(rhos)})
    return through(name, map(float, drawn), drawn.values(), "points")


def _gaussians(d: int, rhos: tuple[float, ...], found: dict[str, Estimates]) -> Chart:
    fine = np.linspace(rhos[0], rhos[-1], 101)
    return Chart(
        f"gaussians-{d}d", f"Information of Gaussians in {d} dimensions", "correlation of the components",
        "mutual information (nats)",
        (
            Series.of("truth", fine, [gaussian_problem(d, float(rho)).nats for rho in fine]),
            # points: straight lines between few correlations would run above the bowl of the truth
            *(_points(name, rhos, estimate.nats) for name, estimate in found.items()),
            curve("MINE, plug-in", rhos, found["MINE"].plug_in, style="points"),
        ),
        alt=f"Estimates in {d} dimensions beside the truth, which is 0 at no correlation and grows towards both ends.",
        caption="MINE and MINE-f on held-out pairs. Plug-in: Donsker-Varadhan as usually printed, not a lower bound.",
    )  # fmt: skip
