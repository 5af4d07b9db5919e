"""Rules of the invariance paper on made-up numbers: what confirms a claim, what does not, and what tests nothing."""

import math

import pytest

from biascope.studies import StudyResult
from biascope.studies.claims import claims
from biascope.studies.result import Estimate

YES, NO, OPEN = "confirmed", "not confirmed", "not tested"
Numbers = dict[str, Estimate]


def verdict(figure: str, numbers: Numbers) -> str:
    claim = next(claim for claim in claims() if claim.id == f"invariance/{figure}")
    assert claim.tested_by(claim.studies[0], {}, numbers)
    return claim.judge(StudyResult(numbers=numbers))[0]


# ------------------------------------------------------------ networks that are judged in their own way


def circles(net: str, a: float, b: float, error: float | None = 0.5) -> Numbers:
    return {f"{net}, {name}: test accuracy, %": Estimate(value, error) for name, value in (("A", a), ("B", b))}


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ({**circles("mlp", 99, 99), **circles("resnet18", 99, 51)}, YES),
        ({**circles("mlp", 99, 51), **circles("resnet18", 99, 51)}, NO),  # the MLP must learn both
        ({**circles("mlp", 99, 99), **circles("resnet18", 99, 99)}, NO),  # and ResNet-18 one
        (circles("mlp.py:net", 99, 51), YES),  # an own network is none of the paper's, whatever it is called
        (circles("lenet", 99, 51), YES),
        (circles("mlp", 99, 99), YES),
        (circles("lenet", 99, 51, error=None), OPEN),  # fewer than three seeds
    ],
)
def test_circles(numbers: Numbers, wanted: str) -> None:
    assert verdict("1", numbers) == wanted


def evolution(net: str, excess: float, ahead: float, apart: tuple[float, float] = (0.01, 0.001)) -> Numbers:
    return {
        f"{net}: the same minus the rise under random rotations": Estimate(excess, 0.01),
        f"{net}: Corr(G^t, GSG) - Corr(G^t, S) at epoch 6": Estimate(ahead, 0.01),
        f"{net}: largest difference of the two curves": Estimate(*apart),
    }


@pytest.mark.parametrize("figure", ["2", "8"])
def test_noise_does_not_help_a_claim_that_two_curves_are_equal(figure: str) -> None:
    lenet = evolution("lenet", 0.3, 0.1, (0.2, 0.01))
    assert verdict(figure, {**evolution("mlp", 0.3, -0.03), **lenet}) == YES
    assert verdict(figure, {**evolution("mlp", 0.3, -0.03, (-0.049, 0.002)), **lenet}) == NO  # not shown to be small
    assert verdict(figure, {**evolution("mlp", 0.3, -0.03, (0.3, 0.1)), **lenet}) == NO  # surely large
    assert verdict(figure, {**evolution("mlp", 0.3, -0.03, (0.01, 0.1)), **lenet}) == OPEN
    assert verdict(figure, {**evolution("mlp", 0.0, -0.03), **lenet}) == NO
    assert verdict(figure, evolution("lenet", 0.3, 0.0)) == NO  # S does as well


def moving(net: str, gap: float, points: float, share: float = 0.0, error: float = 0.02) -> Numbers:
    return {
        f"{net}: mean velocity, G minus flip(G)": Estimate(gap, 0.01),
        f"{net}: mean velocity, G minus flip(G), over their mean": Estimate(share, error),
        f"{net}: time-averaged training accuracy, G minus flip(G), points": Estimate(points, 0.1),
    }


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ({**moving("mlp", -0.1, 0.0, 0.1), **moving("lenet", 0.1, 20.0)}, YES),
        ({**moving("mlp", 0.1, 9.0, 0.24), **moving("lenet", 0.1, 20.0)}, NO),  # not shown to be less than a quarter
        ({**moving("mlp", 0.0, 0.0, 0.1, 0.3), **moving("lenet", 0.1, 20.0)}, OPEN),
        ({**moving("mlp", 0.0, 0.0, 0.1, 0.3), **moving("lenet", 0.1, 0.1)}, NO),  # one part that fails decides
        (moving("vit", 0.0, 20.0), NO),
    ],
)
def test_velocities(numbers: Numbers, wanted: str) -> None:
    assert verdict("3", numbers) == wanted


def contest(net: str, last: float, circle: float = 90.0, error: float | None = 0.1) -> Numbers:
    return {
        f"{net}: linear minus circle, first direction, points": Estimate(40, 1),
        f"{net}: circle minus linear, last direction, points": Estimate(last, 1),
        f"{net}: accuracy by the circle alone, last direction, %": Estimate(circle, 1),
        f"{net}: Spearman(index, linear accuracy)": Estimate(-0.9, error),
        f"{net}: Spearman(index, circle accuracy)": Estimate(0.9, error),
    }


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ({**contest("mlp", -40, 50), **contest("resnet18", 40)}, YES),
        ({**contest("mlp", 40), **contest("resnet18", 40)}, NO),  # the MLP stays linear
        ({**contest("mlp", 0, 50), **contest("resnet18", 40)}, OPEN),  # neither is ahead
        (contest("lenet", 3, 52), NO),  # both at chance
        (contest("lenet", 40, error=None), OPEN),  # fewer than four directions
        (contest("lenet", -40, error=None), NO),
    ],
)
def test_contest(numbers: Numbers, wanted: str) -> None:
    assert verdict("5", numbers) == wanted


def test_each_architecture_has_its_pattern() -> None:
    def geometry(net: str, spread: float, orders: float, near: float, period: float) -> Numbers:
        return {
            f"{net}: spread of the true eigenvalues / mean": Estimate(spread, 0.01),
            f"{net}: orders of magnitude from the first to the lowest tenth of the eigenvalues": Estimate(orders, 0.1),
            f"{net}: mean entry at distance 1-3 minus 8 and more": Estimate(near, 0.01),
            f"{net}: mean entry at distance 8 minus 4": Estimate(period, 0.01),
        }

    for net, near, period in (("lenet", 0.5, 0.0), ("resnet18-narrow", 0.0, 0.9), ("vit", 0.0, 0.9), ("a.py:n", 0, 0)):
        both = {**geometry("mlp", 0.0, 0.0, 0.0, 0.0), **geometry(net, 3.0, 5.0, near, period)}
        assert verdict("9", both) == YES, net
        assert verdict("9", geometry(net, 3.0, 1.5, near, period)) == NO, net
    assert verdict("9", geometry("lenet-small", 3.0, 5.0, 0.0, 0.9)) == NO
    assert verdict("9", geometry("vit-small", 3.0, 5.0, 0.5, 0.0)) == NO
    assert verdict("9", geometry("lenet.py:net", 3.0, 5.0, 0.0, 0.0)) == YES  # no pattern is claimed of it
    assert verdict("9", geometry("mlp", 0.3, 0.0, 0.0, 0.0)) == NO


def test_what_no_network_learns_is_left_out() -> None:
    def swept(net: str, boundary: str, order: float, fall: float, aside: str = "") -> Numbers:
        return {
            f"{net}, {boundary}: Spearman(index, accuracy){aside}": Estimate(order, 0.1),
            f"{net}, {boundary}: first minus last direction, points{aside}": Estimate(fall, 0.5),
        }

    learned = {"mlp: boundaries learned": Estimate(1), "lenet: boundaries learned": Estimate(2)}
    mlp = {**swept("mlp", "linear", 0.5, 1.0), **swept("mlp", "sinusoidal", 0.5, 20.0, ", not learned")}
    lenet = {**swept("lenet", "linear", -0.8, 40.0), **swept("lenet", "quadratic", -0.5, 40.0)}
    assert verdict("10", {**mlp, **lenet, **learned}) == YES
    assert verdict("10", {**mlp, **lenet, **learned, "lenet: boundaries learned": Estimate(0)}) == OPEN
    assert verdict("10", {**mlp, **lenet, **learned, **swept("lenet", "quadratic", 0.5, 40.0)}) == NO
    assert verdict("10", {**mlp, **lenet, **learned, **swept("mlp", "linear", 0.5, 4.5)}) == NO


# ------------------------------------------------------------ theory


@pytest.mark.parametrize(
    ("slow", "fast", "wanted"),
    [
        ([0.2, 0.7, 0.95], [0.2, 0.999], YES),
        ([0.2, 0.96, 0.95], [0.2, 0.999], NO),  # a slow curve must still grow
        ([0.2, 0.999, 0.995], [0.2, 0.999], YES),
        ([0.2, 0.7, 0.95], [0.2, 0.95], NO),
        ([0.2, 0.7, 0.95], [0.9995, 0.999], YES),
        ([0.2, 0.7, 0.95], [0.9995, 0.992], NO),
    ],
)
def test_curves_tend_to_one(slow: list[float], fast: list[float], wanted: str) -> None:
    numbers = {"linear CNN, width 4: signed Corr(Delta, GSG), sampled": Estimate(-0.9),
               "linear CNN, width 4: distance to the exact Delta over the sampling error": Estimate(1.1)}  # fmt: skip
    for name, curve in (("MLP, unit variances", slow), ("MLP, torch variances", fast), ("linear CNN", [0.9, 0.999])):
        numbers[f"{name}: exact |Corr| at the largest width"] = Estimate(curve[-1])
        numbers[f"{name}: exact |Corr| at the largest width minus the smallest"] = Estimate(curve[-1] - curve[0])
        if curve[-1] <= 0.99:
            growth = Estimate(curve[-1] - curve[-2])
            numbers[f"{name}: growth from the width before, |Corr| up to 0.99"] = growth
    assert verdict("7", numbers) == wanted
    far = {"linear CNN, width 8: distance to the exact Delta over the sampling error": Estimate(2.1)}
    assert verdict("7", numbers | far) == NO


@pytest.mark.parametrize(("value", "error", "wanted"), [(3.02, 0.01, YES), (3.05, 0.01, NO), (3.0, 0.2, NO)])
def test_eigenvalues_of_the_example(value: float, error: float, wanted: str) -> None:
    numbers = {
        "eigenvalue 1 of 4 G / s^2 (exact: 3)": Estimate(value, error),
        "eigenvalue 2 of 4 G / s^2 (exact: 1)": Estimate(1.0, 0.01),
        "eigenvalue 3 of 4 G / s^2 (exact: 0)": Estimate(1e-15, 1e-16),
        "overlap of the third eigenvector with (1, -1, 1)": Estimate(1.0),
    }
    assert verdict("15", numbers) == wanted


# ------------------------------------------------------------ conjectures


def correlated(net: str, value: float, error: float, excess: float = -0.5, ahead: float = -0.1) -> Numbers:
    return {
        f"{net}: signed Corr(Delta, GSG), corrected": Estimate(value, None if math.isnan(error) else error),
        f"{net}: signed Corr(Delta, GSG) minus random rotations": Estimate(excess, 0.01),
        f"{net}: signed Corr(Delta, GSG) minus Corr(Delta, S)": Estimate(ahead, 0.01),
    }


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        (correlated("lenet", -0.9, 0.02), YES),
        (correlated("lenet", -0.9, 0.02, ahead=0.01), YES),  # S alone is not surely better
        (correlated("lenet", -0.5, 0.02), NO),
        (correlated("lenet", -0.72, 0.02), OPEN),
        (correlated("lenet", -0.9, 0.02, excess=0.0), NO),
        (correlated("lenet", -0.9, 0.02, ahead=0.1), NO),  # S alone does better
        (correlated("mlp", -0.9, 0.02, ahead=0.1), YES),
        (correlated("lenet", math.nan, math.nan), OPEN),
    ],
)
def test_conjecture_1(numbers: Numbers, wanted: str) -> None:
    assert verdict("conjecture1", numbers) == wanted


@pytest.mark.parametrize(
    ("share", "random", "wanted"),
    [
        (Estimate(0.97, 0.01), 0.1, YES),
        (Estimate(0.95, 0.01), 0.99, NO),  # no more than random dimensions hold
        (Estimate(0.8, 0.01), 0.1, NO),
        (Estimate(0.91, 0.02), 0.1, OPEN),
    ],
)
def test_conjecture_2(share: Estimate, random: float, wanted: str) -> None:
    numbers = {
        "lenet: share of Delta^t at epoch 4 within Eig(GSG)": share,
        "lenet: share of Delta^t at epoch 1 within Eig(GSG), not judged": Estimate(0.1, 0.2),
        "lenet: share of Delta^t at epoch 4 within Eig(GSG), single networks": Estimate(0.1, 0.01),
        "lenet: smallest share within Eig(GSG) minus that within random dimensions": Estimate(
            share.value - random, share.standard_error
        ),
        "lenet: shares known well enough to be judged": Estimate(1),
    }
    assert verdict("conjecture2", numbers) == wanted
    assert verdict("conjecture2", {**numbers, "vit: shares known well enough to be judged": Estimate(0)}) == OPEN


@pytest.mark.parametrize(
    ("drawn", "control", "pairs", "wanted"),
    [
        ([0.1, -0.2], 0.5, 1e-14, YES),
        ([0.1, 0.4], 0.5, 1e-14, NO),
        ([0.1, -0.4], 0.5, 1e-14, NO),
        ([0.1, -0.2], 0.2, 1e-14, OPEN),  # an effect of labels would not have been seen
        ([0.1, -0.2], 0.5, 1e-3, NO),
    ],
)
def test_proposition_a1(drawn: list[float], control: float, pairs: float, wanted: str) -> None:
    common = "common part of the difference to labels 0"
    numbers = {
        f"mlp: constant labels, last layer with a mean: {common}": Estimate(control, 0.1),
        "mlp: true labels, pairs of opposite last layers: ||difference|| / ||Delta||": Estimate(pairs),
        **{f"mlp: {name} labels, networks as drawn: {common}": Estimate(value, 0.1)
           for name, value in zip(("true", "random"), drawn)},
    }  # fmt: skip
    assert verdict("a1", numbers) == wanted


@pytest.mark.parametrize(
    ("share", "value", "excess", "slope", "wanted"),
    [
        (0.8, 0.95, 0.5, 0.01, YES),
        (0.4, 0.95, 0.5, 0.01, NO),
        (0.8, 0.8, 0.5, 0.01, NO),
        (0.8, 0.95, 0.0, 0.01, NO),
        (0.8, 0.95, 0.5, 0.5, OPEN),  # not fitted yet
    ],
)
def test_curvature(share: float, value: float, excess: float, slope: float, wanted: str) -> None:
    names = (
        "share of the gradient term",
        "Corr(E Hess_x loss, G^t)",
        "the same minus random rotations",
        "mean |l'(f)|",
    )
    values = zip(names, (share, value, excess, slope))
    assert verdict("a3", {f"mlp, sse: {name}, at the end": Estimate(each, 0.01) for name, each in values}) == wanted


@pytest.mark.parametrize(
    ("gain", "loss", "ratio", "learned", "wanted"),
    [
        (Estimate(0.1, 0.02), Estimate(0.0, 0.01), 0.5, 4, YES),
        (Estimate(0.1, 0.02), Estimate(0.0, 0.01), 1.5, 4, NO),
        (Estimate(0.03, 0.02), Estimate(0.0, 0.01), 0.5, 4, NO),
        (Estimate(0.1, 0.02), Estimate(-0.2, 0.01), 0.5, 4, NO),
        (Estimate(0.1, 0.02), Estimate(0.0, 0.04), 0.5, 4, OPEN),
        (Estimate(0.03, 0.02), Estimate(0.0, 0.01), 0.5, 3, OPEN),  # too few directions are learned
    ],
)
def test_probes(gain: Estimate, loss: Estimate, ratio: float, learned: int, wanted: str) -> None:
    numbers = {
        "lenet: Spearman, small probes with GELU minus ReLU": gain,
        "lenet: Spearman, G(0) minus small probes with GELU": loss,
        "lenet: largest relative error of small probes over that of ReLU": Estimate(ratio),
        "lenet: directions learned, of 16": Estimate(learned),
    }
    assert verdict("a12", numbers) == wanted
