"""The studies of mutual information at smoke size, against the closed forms, and their building blocks."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from biascope import BiascopeError
from biascope.information import gaussian_problem
from biascope.information.neighbours import ksg
from biascope.studies import Chart, Run, configure, execute
from biascope.studies.claims import claims_of
from biascope.studies.conditions import all_hold
from biascope.studies.judging import judgements
from biascope.support.seeds import derive
from biascope_papers.mine import estimation
from biascope_papers.mine.estimation import Training, estimates, in_tolerances, settled
from studies.smoke_runs import Results, smoke_runs

NAMES = ("mine/fig5.1", "mine/fig5.2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return smoke_runs(tmp_path_factory, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    assert judgements(run, result.numbers)
    assert all(math.isfinite(number.value) for number in result.numbers.values())
    for chart in result.figures:
        assert isinstance(chart, Chart)
        assert all(math.isfinite(v) for series in chart.series for v in series.y)
        assert len({series.style for series in chart.series}) == 2  # estimates and the truth
    assert execute(Run.resume(run.path)).to_json() == result.to_json()


@pytest.mark.slow
def test_gaussians_against_the_closed_form(results: Results) -> None:
    _, result = results["mine/fig5.1"]
    numbers = result.numbers
    for d in (2, 20):
        assert numbers[f"truth, d = {d}, rho = 0.6"].value == pytest.approx(-d / 2 * math.log(1 - 0.36))
        assert numbers[f"truth, d = {d}, rho = 0"].value == 0
        assert numbers[f"MINE, d = {d}, rho = 0"].value < 0.1  # a lower bound of nothing
    assert numbers["MINE, d = 2, rho = 0.6"].value == pytest.approx(0.446, abs=0.15)
    assert numbers["KSG, d = 2, rho = 0.6"].value == pytest.approx(0.446, abs=0.12)
    truth, mine, neighbours = (numbers[f"{n}, d = 20, rho = 0.6"].value for n in ("truth", "MINE", "KSG"))
    assert neighbours < mine < truth
    gap = numbers["MINE - MINE-f, d = 20, rho = 0.6"].value
    assert gap == pytest.approx(mine - numbers["MINE-f, d = 20, rho = 0.6"].value)


@pytest.mark.slow
def test_noise_takes_information_and_the_function_matters(results: Results) -> None:
    _, result = results["mine/fig5.2"]
    numbers = result.numbers
    table = {"x": (3.334, 1.498, 0.344), "x^3": (2.499, 0.939, 0.162), "sin x": (3.071, 1.341, 0.290)}  # check 42
    for f, row in table.items():
        for sigma, nats in zip((0.1, 0.3, 0.9), row):
            assert numbers[f"exact, f = {f}, sigma = {sigma}"].value == pytest.approx(nats, abs=1e-3)
        values = [numbers[f"MINE, f = {f}, sigma = {sigma}"].value for sigma in (0.1, 0.3, 0.9)]
        assert values == sorted(values, reverse=True)
    assert numbers["MINE, f = x, sigma = 0.3"].value > numbers["MINE, f = x^3, sigma = 0.3"].value


@pytest.mark.slow
def test_one_seed_tests_nothing(tmp_path: Path) -> None:
    options = {"seeds": 1, "sigmas": (0.3, 0.9), "pairs": 400, "steps": 10}
    run = Run.create(tmp_path / "r", configure("mine/fig5.2", "smoke", overrides=options))
    assert {each.verdict for each in judgements(run, execute(run).numbers)} == {"undecided"}


def test_estimates_are_those_of_the_first_pairs_and_computed_once(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", {"study": "x", "seed": 3})
    problems = [gaussian_problem(1, 0.5), gaussian_problem(1, 0.9)]
    found = estimates(run, problems, "ksg", Training(pairs=300, seeds=2), use=200)
    for i, problem in enumerate(problems):
        for seed in range(2):
            x, y = problem.sample(300, derive(3, "pairs", problem.name, seed))
            assert float(found.nats[seed, i]) == ksg(x[:200], y[:200]).nats
    assert torch.equal(found.nats, found.plug_in)
    assert found.noted == 0
    lines = len(run.metrics())
    again = estimates(run, problems, "ksg", Training(pairs=300, seeds=2), use=200)
    assert torch.equal(again.nats, found.nats)
    assert len(run.metrics()) == lines == 4


@pytest.mark.parametrize(
    ("samples", "truth", "within"),
    [
        ([1.0, 1.001], 1.0, True),  # 0.0005 + 14 * 0.0005 <= 0.05
        ([1.0, 1.04], 1.0, None),  # near, but not surely
        ([1.06, 1.06], 1.0, False),
        ([0.0, 0.001], 0.0, True),  # the absolute tolerance, where the truth is 0
        ([0.0, 0.02], 0.0, None),
        ([1.0], 1.0, None),  # no error bar
    ],
)
def test_what_is_close_enough(samples: list[float], truth: float, within: bool | None) -> None:
    number = "(MINE plug-in - truth) / tolerance, d = 2, rho = 0.5"
    assert all_hold(claims_of("mine/fig5.1")[0].rule, {number: in_tolerances(samples, truth)})[0] is within


def test_a_training_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object, **__: object) -> None:
        raise BiascopeError("the critic diverged")

    monkeypatch.setattr(estimation, "mutual_information", diverge)
    run = Run.create(tmp_path / "r", {"study": "x", "seed": 3})
    found = estimates(run, [gaussian_problem(1, 0.5)], "mine-f", Training(pairs=300, seeds=2))
    assert bool(found.nats.isnan().all())
    assert settled({"a": found.nats[:, 0], "b": torch.tensor([1.0, math.nan, 3.0])}).keys() == {"b"}
    assert settled({"b": torch.tensor([1.0, math.nan, 3.0])})["b"].n == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine/theorem5.5", "mine/gradient-bias"])
def test_what_is_proved_is_measured(name: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure(name, "smoke"))
    numbers = execute(run).numbers
    judged = judgements(run, numbers)
    assert [each.verdict for each in judged] == (["supported"] if name == "mine/theorem5.5" else ["undecided"])


def test_information_depends_on_the_function_too(tmp_path: Path) -> None:
    """h(Y) - h(noise) by a histogram-free sum over the density of Y on a grid, one component."""
    x, sigma = (np.arange(4000) + 0.5) / 2000 - 1, 0.5
    y = np.linspace(-4, 4, 2001)

    def nats(values: Any) -> float:
        density = np.exp(-0.5 * ((y[:, None] - values) / sigma) ** 2).mean(1) / (sigma * math.sqrt(2 * math.pi))
        noise = 0.5 * math.log(2 * math.pi * math.e * sigma**2)
        return float(-np.trapezoid(density * np.log(density), y)) - noise

    numbers = execute(Run.create(tmp_path / "r", configure("mine/equitability", "smoke"))).numbers
    for label, values in {"x^3": x**3, "sin x": np.sin(x)}.items():
        found = numbers[f"exact information of {label} over that of x, sigma = 0.5"]
        assert found.value == pytest.approx(nats(values) / nats(x), rel=1e-3)
