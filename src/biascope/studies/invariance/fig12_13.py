"""Figs 12 and 13: does the gap between G-covariance and flip(G)-covariance data survive more examples?

Fig. 12 grows the set at a fixed batch size, so the number of steps grows too; Fig. 13 grows the batch with the set, so
that the steps stay. "Gap" is the time-averaged training accuracy on G-covariance minus that on flip(G)-covariance data.
Verdict rules: Fig. 12: the gap at the smallest size exceeds that at the largest by 2 standard errors over networks.
Fig. 13: at the largest size the gap with the steps fixed exceeds the gap with the batch fixed by 2 standard errors of
the difference, taken network by network as both start from the same ones. (Changed after the first run: the errors of
the two gaps had been added as if the networks were others.) Gradients are clipped as in the published code, of which
the text does not speak. One size, or for Fig. 13 two that give the same batches either way, is a comparison with itself
and tests nothing.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from biascope.arguments import check_count
from biascope.errors import InputError
from biascope.studies.estimates import above, through
from biascope.studies.invariance.aligned_flipped import Following, Pair, compare_pair, fitting_chart, velocity_chart
from biascope.studies.invariance.charts import decide, restricted
from biascope.studies.invariance.networks import as_they_are, is_own, named, shape_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM_12 = (
    "With a fixed batch size the gap in training accuracy between G- and flip(G)-covariance data shrinks as the number "
    "of examples (and of steps) grows."
)
CLAIM_13 = (
    "When the batch grows with the data so that the number of steps stays the same, the gap between G- and flip(G)-"
    "covariance data remains: the distance travelled matters, not the number of examples."
)
SIZES = {
    "smoke": {"net": "lenet", "side": 16, "networks": 48, "heads": 32, "sizes": (128, 256), "batch_size": 64, "runs": 3,
              "epochs": 4, "probes": 2},
    "laptop": {"net": "lenet", "side": 16, "networks": 256, "heads": 32, "sizes": (500, 1000, 2000), "runs": 6,
               "epochs": 60, "probes": 8},
}  # fmt: skip
NETS = ("resnet18",)
PAPER_SETS = (10_000, 20_000, 40_000, 60_000, 80_000, 100_000)


@dataclass(frozen=True)
class Growing(Following):
    """Options of both figures."""

    net: Annotated[str, "architecture, without normalisation; or your own as module:factory"] = "resnet18"
    sizes: Annotated[tuple[int, ...], "numbers of training examples"] = PAPER_SETS
    batch_size: Annotated[int, "examples per step at the smallest size"] = 128
    runs: Annotated[int, "networks trained per set"] = 25
    epochs: Annotated[int, "epochs"] = 50
    clip_norm: Annotated[float, "largest gradient norm, 0 for none"] = 0.5
    probes: Annotated[int, "probe inputs, the same at all times"] = 16

    def __str__(self) -> str:
        stand_in = "" if self.net == "resnet18" else " (the paper: ResNet18)"
        norm = "" if is_own(self.net) else " without normalisation"
        return (
            f"{self.net}{stand_in}{norm}, 1 x {self.side} x {self.side}, {self.runs} networks per set, "
            f"{self.epochs} epochs.{as_they_are([self.net])}"
        )


GROWING = Growing()


@study("gih/fig12", paper="invariance", figure="12", claim=CLAIM_12, sizes={**SIZES, "paper": {}})
def fig12(
    run: Run,
    *,
    options: Growing = GROWING,
) -> StudyResult:
    """Velocity and fitting against the number of examples, batch size fixed."""
    options = replace(options, net=named([options.net])[0])
    sizes, pairs = options.sizes, grow(run, options, options.sizes, fixed_steps=False)
    gaps, numbers = {n: pair.accuracy_gap for n, pair in pairs.items()}, _numbers(pairs)
    told, right = f"{gaps[sizes[0]]} points with {sizes[0]} examples, the only size, so that nothing is compared", None
    if len(sizes) > 1:
        shrinks = _minus(gaps[sizes[0]], gaps[sizes[-1]])
        numbers["gap at the smallest size minus gap at the largest, points"] = shrinks
        told = f"{gaps[sizes[0]]} points with {sizes[0]} examples, {gaps[sizes[-1]]} with {sizes[-1]}"
        told, right = f"{told}; difference {shrinks}", above(shrinks)
    claim, untested = restricted(CLAIM_12, networks=([options.net], NETS))
    return StudyResult(
        verdict=decide(right, options.runs),
        claim=claim,
        measured=f"Gap in time-averaged training accuracy: {told}. {options}{untested}",
        numbers=numbers,
        figures=_charts(options.net, pairs, "batch size fixed"),
    )


@study("gih/fig13", paper="invariance", figure="13", claim=CLAIM_13, sizes={**SIZES, "paper": {}})
def fig13(
    run: Run,
    *,
    options: Growing = GROWING,
) -> StudyResult:
    """Velocity and fitting against the number of examples, number of steps fixed."""
    options = replace(options, net=named([options.net])[0])
    sizes, pairs = options.sizes, grow(run, options, options.sizes, fixed_steps=True)
    gap, numbers = pairs[sizes[-1]].accuracy_gap, _numbers(pairs)
    told, right = (
        f"{gap} points with the number of steps fixed; nothing is compared, which needs a larger set in other batches",
        None,
    )
    if len(sizes) > 1 and not same_batches(sizes[-1], sizes[0], options.batch_size):
        other = grow(run, options, sizes[-1:], fixed_steps=False)[sizes[-1]]
        plain, returns = other.accuracy_gap, Estimate.of(pairs[sizes[-1]].fitting - other.fitting)
        numbers[f"n = {sizes[-1]}, batch size fixed: gap in training accuracy, points"] = plain
        numbers["gap with the steps fixed minus gap with the batch fixed, points"] = returns
        told = f"{gap} points with the number of steps fixed and {plain} with the batch fixed; difference {returns}"
        right = above(returns)
    claim, untested = restricted(CLAIM_13, networks=([options.net], NETS))
    return StudyResult(
        verdict=decide(right, options.runs),
        claim=claim,
        measured=f"With {sizes[-1]} examples the gap in time-averaged training accuracy is {told}. {options}{untested}",
        numbers=numbers,
        figures=_charts(options.net, pairs, "number of steps fixed"),
    )


def grow(run: Run, options: Growing, sizes: tuple[int, ...], fixed_steps: bool) -> dict[int, Pair]:
    """Both sets at every size."""
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise InputError(f"sizes={sizes} must be increasing numbers of examples")
    check_count(options.batch_size, "batch_size")
    G, pairs = options.geometry(run, options.net, shape_of(1, options.side, [options.net])), {}
    for n in sizes:
        batch = batch_for(n, sizes[0], options.batch_size) if fixed_steps else options.batch_size
        descent = options.descent(options.epochs, batch, options.clip_norm)
        key = f"{'steps' if fixed_steps else 'batch'} fixed"
        pairs[n] = compare_pair(
            run, key, options.net, G, descent, n=n, runs=options.runs, probes=options.probes, probe_std=1.0
        )
    return pairs


def batch_for(n: int, smallest: int, batch: int) -> int:
    """The batch size with which n examples take as many steps as the smallest set.

    Example:
        >>> batch_for(20_000, 10_000, 128)
        254
    """
    return math.ceil(n / math.ceil(smallest / batch))


def same_batches(n: int, smallest: int, batch: int) -> bool:
    """Whether n examples come in batches of the same size with the steps fixed as with the batch fixed.

    Example:
        >>> same_batches(20_000, 10_000, 128), same_batches(128, 128, 64), same_batches(100, 50, 128)
        (False, True, True)
    """
    return min(n, batch_for(n, smallest, batch)) == min(n, batch)


def _minus(a: Estimate, b: Estimate) -> Estimate:
    errors = [e.standard_error for e in (a, b)]
    error = None if None in errors else math.hypot(*(e for e in errors if e is not None))
    return Estimate(a.value - b.value, error, a.n)


def _numbers(pairs: dict[int, Pair]) -> dict[str, Estimate]:
    found = {}
    for n, pair in pairs.items():
        found[f"n = {n}: gap in training accuracy, points"] = pair.accuracy_gap
        found[f"n = {n}: mean velocity, G covariance"] = pair.mean_velocity[False]
        found[f"n = {n}: mean velocity, flip(G) covariance"] = pair.mean_velocity[True]
        if pair.floor is not None:
            found[f"n = {n}: velocity that fresh probes alone would give"] = Estimate(
                pair.floor, None, len(pair.fitting)
            )
    return found


def _charts(net: str, pairs: dict[int, Pair], how: str) -> tuple[Chart, ...]:
    ns = list(pairs)

    gap = Chart(
        name="gap",
        title=f"Fitting gap against the number of examples, {how}",
        x_label="training examples",
        y_label="training accuracy on G minus flip(G) data, points",
        series=(through("time-averaged", ns, [p.accuracy_gap for p in pairs.values()]),),
        alt="Gap in training accuracy over the number of examples.",
        log_x=True,
    )
    known = {n: pair.floor for n, pair in pairs.items() if pair.floor is not None}
    floors = [Series.of("fresh probes alone", known, known.values(), style="dashed")] if known else []
    velocity = Chart(
        name="velocity",
        title=f"Mean geometric velocity, {how}",
        x_label="training examples",
        y_label="mean of 1 - Corr(G^t, G^(t-1))",
        series=(
            through("G covariance", ns, [p.mean_velocity[False] for p in pairs.values()]),
            through("flip(G) covariance", ns, [p.mean_velocity[True] for p in pairs.values()]),
            *floors,
        ),
        alt="Mean velocity on both sets over the number of examples.",
        caption="The probes are the same at all times; dashed: what new ones would give without any training.",
        log_x=True,
        log_y=True,
    )
    panels = list[Chart]()  # those of the paper: both curves over epochs, for every size
    for n, pair in pairs.items():
        title = f"{net}, {n} examples"
        panels += [velocity_chart(str(n), title, pair, f"The {how}."), fitting_chart(str(n), title, pair)]
    return gap, velocity, *panels
