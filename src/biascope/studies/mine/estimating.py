"""Estimates of problems with known information, over seeds: computed once, stored in the run folder."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.information import EstimateWarning, Problem, mutual_information
from biascope.information.estimate import Estimator
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.result import Estimate
from biascope.studies.runs import Run, Value


@dataclass(frozen=True)
class Estimates:
    """`nats` and `plug_in` [seeds, problems] (the same but for MINE), and how many estimates came with a note."""

    nats: Tensor
    plug_in: Tensor
    noted: int


def estimates(
    run: Run,
    problems: Sequence[Problem],
    estimator: Estimator,
    *,
    seeds: int,
    pairs: int,
    use: int | None = None,
    steps: int = 0,
    batch: int = 256,
    lr: float = 1e-3,
) -> Estimates:
    """Every problem at every seed. All estimators see the same `pairs` at a seed, or the first `use` of them.

    Notes of the estimates are counted, not shown: there are hundreds of estimates.
    """

    def compute(problem: Problem, seed: int) -> dict[str, Value]:
        x, y = (v[:use].to(run.device) for v in problem.sample(pairs, derive(run.seed, "pairs", problem.name, seed)))
        trained = derive(run.seed, "training", problem.name, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EstimateWarning)
            found = mutual_information(x, y, estimator, seed=trained, steps=steps, batch_size=batch, lr=lr)
        run.log(problem=problem.name, estimator=estimator, seed=seed, nats=found.nats, exact=problem.nats)
        usual = found.nats if found.plug_in is None else found.plug_in
        return {"values": torch.tensor([found.nats, usual, len(found.notes)], dtype=torch.float64)}

    jobs = [(seed, problem) for seed in range(seeds) for problem in problems]
    rows = [
        torch.as_tensor(run.cached(f"{p.name} {estimator} {seed}", lambda p=p, s=seed: compute(p, s))["values"])  # type: ignore[misc]
        for seed, p in progress(jobs, estimator)
    ]
    nats, plug_in, notes = torch.stack(rows).reshape(seeds, len(problems), 3).unbind(-1)
    return Estimates(nats, plug_in, int((notes > 0).sum()))


def surely_within(samples: Sequence[float], truth: float, relative: float, absolute: float) -> bool:
    """Whether the mean of samples, two standard errors either way, lies within the larger tolerance of the truth.

    Example:
        >>> surely_within([1.01, 1.03], 1.0, 0.05, 0.02), surely_within([0.9, 1.1], 1.0, 0.05, 0.02)
        (True, False)
        >>> surely_within([1.0], 1.0, 0.05, 0.02)  # no error bar
        False
    """
    found = Estimate.of(samples)
    if found.standard_error is None:
        return False
    return abs(found.value - truth) + 2 * found.standard_error <= max(relative * abs(truth), absolute)
