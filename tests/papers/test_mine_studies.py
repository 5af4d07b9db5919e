"""The studies of mutual information at smoke size, against the closed forms, and their building blocks."""

import math
from pathlib import Path

import pytest
import torch

from biascope.information import gaussian_problem
from biascope.information.neighbours import ksg
from biascope.studies import Chart, Run, configure, execute, find
from biascope.studies.claims import claims_of
from biascope.support.seeds import derive
from biascope_papers.mine.estimation import Training, estimates, in_tolerances
from studies.smoke_runs import Results, smoke_runs

NAMES = ("mine/fig5.1", "mine/fig5.2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return smoke_runs(tmp_path_factory, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    assert result.verdict in ("confirmed", "not confirmed")
    assert result.claim == find(name).claim
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
    assert numbers["exact ratio, sigma = 0.3"].value == pytest.approx(1.498 / 0.939, abs=2e-3)


@pytest.mark.slow
def test_one_seed_tests_nothing(tmp_path: Path) -> None:
    options = {"seeds": 1, "sigmas": (0.3, 0.9), "pairs": 400, "steps": 10}
    run = Run.create(tmp_path / "r", configure("mine/fig5.2", "smoke", overrides=options))
    assert execute(run).verdict == "not tested"


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
        ([1.0, 1.02], 1.0, True),  # 0.01 + 2 * 0.01 <= 0.05
        ([1.0, 1.04], 1.0, False),  # 0.02 + 2 * 0.02 > 0.05: near, but not surely
        ([1.06, 1.06], 1.0, False),
        ([0.0, 0.01], 0.0, True),  # the absolute tolerance, where the truth is 0
        ([0.0, 0.02], 0.0, False),
        ([1.0], 1.0, None),  # no error bar
    ],
)
def test_what_is_close_enough(samples: list[float], truth: float, within: bool | None) -> None:
    rule = [c for c in claims_of("mine/fig5.1")[0].rule if c.number.startswith("(MINE - truth)")]
    found = [condition.holds({"(MINE - truth) / tolerance, a": in_tolerances(samples, truth)}) for condition in rule]
    assert (False if False in found else None if None in found else True) is within
