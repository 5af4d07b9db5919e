"""Figs 3, 12 and 13: G moves when data lie where G is large, and hardly moves when they lie where it is small.

Data are Gaussian with covariance G, or G with its spectrum reversed, flip(G), and have random labels. Velocity is 1 -
Corr(G^t, G^(t-1)) at common probes; fresh probes alone would give the "floor". Gradients are clipped as in the
published code. The "gap" is the time-averaged training accuracy on G minus that on flip(G) data. Fig. 12 grows the set
at a fixed batch size, Fig. 13 the batch with it.

A network that wanders while all of them together stand still is seen to move; "between networks" is the velocity from
products of different networks. A ViT on flip(G) data is such a case: it keeps one gradient direction and turns it
about.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torch import Tensor

from biascope import InputError
from biascope.data import geometry_gaussian
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, difference, through
from biascope.support import derive
from biascope_papers.gih.averages import History, estimate, jackknife, probe_floor
from biascope_papers.gih.geometries import Drawn, Geometry
from biascope_papers.gih.networks import at_least, factory, is_own, named, scope, shape_of
from biascope_papers.gih.tracking import Descent, common_probes, track
from biascope_papers.gih.training import Precision, mean_of, percent

KINDS = {False: "G covariance", True: "flip(G) covariance"}
NETS = ("mlp", "lenet", "resnet18", "vit")
PAPER_SETS = (10_000, 20_000, 40_000, 60_000, 80_000, 100_000)
SIZES = {
    "smoke": {"net": "lenet", "side": 16, "networks": 48, "heads": 32, "sizes": (128, 256), "batch_size": 64, "runs": 3,
              "epochs": 4, "probes": 2},
    "laptop": {"net": "lenet", "side": 16, "networks": 256, "heads": 32, "sizes": (500, 1000, 2000), "runs": 6,
               "epochs": 60, "probes": 8},
    "paper": {},
}  # fmt: skip


@dataclass(frozen=True)
class Following(Drawn):
    """Options of all three figures."""

    side: Annotated[int, "side of the grey input image"] = 32
    runs: Annotated[int, "networks trained per set, for G^t"] = 25
    probes: Annotated[int, "probe inputs, the same at all times (not stated in the paper)"] = 16
    batch_size: Annotated[int, "examples per step (at the smallest size)"] = 128
    lr: Annotated[float, "learning rate"] = 0.1
    momentum: Annotated[float, "momentum"] = 0.9
    clip_norm: Annotated[float, "largest gradient norm, 0 for none (0.5 in the published code)"] = 0.5
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32"
    engine: Annotated[Literal["auto", "eager", "graph"], "how large networks are trained on CUDA"] = "auto"

    def descent(self, epochs: int, batch_size: int) -> Descent:
        """How the networks are trained."""
        at_least(1, batch_size=batch_size)
        return Descent(epochs, self.lr, batch_size, self.momentum, clip_norm=self.clip_norm or None,
                       precision=self.precision, engine=self.engine)  # fmt: skip


@dataclass(frozen=True)
class Growing(Following):
    """Options of Figs 12 and 13."""

    net: Annotated[str, "architecture, without normalisation; or your own as module:factory"] = "resnet18"
    sizes: Annotated[tuple[int, ...], "numbers of training examples"] = PAPER_SETS
    epochs: Annotated[int, "epochs"] = 50

    def __str__(self) -> str:
        stand_in = "" if self.net == "resnet18" else " (the paper: ResNet18)"
        norm = "" if is_own(self.net) else " without normalisation"
        return f"{self.net}{stand_in}{norm}.{scope(networks=([self.net], ['resnet18']))}"


FOLLOWING = Following()
GROWING = Growing()


@study(
    "gih/fig3",
    sizes={
        "smoke": {"nets": ("mlp", "lenet"), "side": 16, "networks": 64, "heads": 32, "n": 256, "runs": 4, "epochs": 6,
                  "large_epochs": 6, "probes": 4},
        "laptop": {"nets": ("mlp", "lenet"), "side": 16, "networks": 256, "heads": 32, "n": 1000, "runs": 6,
                   "epochs": 200, "large_epochs": 50},
        "paper": {},
    },
)  # fmt: skip
def fig3(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS,
    n: Annotated[int, "training examples (not stated in the paper)"] = 10_000,
    probe_std: Annotated[float, "standard deviation of the probes of G^t"] = 1.0,
    epochs: Annotated[int, "epochs of MLP and LeNet"] = 100,
    large_epochs: Annotated[int, "epochs of the other networks"] = 50,
    following: Following = FOLLOWING,
) -> StudyResult:
    """Geometric velocity and fitting of random labels on data aligned or anti-aligned with G."""
    nets, runs, side = named(nets), following.runs, following.side
    shape = shape_of(1, side, nets)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    for net in nets:
        passes = epochs if net in ("mlp", "lenet", "lenet-small") else large_epochs
        descent, G = following.descent(passes, following.batch_size), following.geometry(run, net, shape, norm=False)
        pair = compare_pair(run, "track", net, G, descent, n, runs, following.probes, probe_std)
        a, b = (pair.mean_velocity[flip] for flip in KINDS)
        for flip, name in KINDS.items():
            numbers[f"{net}: mean velocity, {name}"] = pair.mean_velocity[flip]
            numbers[f"{net}: training accuracy at the end, {name}, %"] = mean_of(percent(pair.accuracy[flip][-1]))
            if pair.between:
                numbers[f"{net}: mean velocity between networks, {name}"] = pair.between[flip]
        gap, size = pair.velocity_gap, (a.value + b.value) / 2
        error = None if gap.standard_error is None else gap.standard_error / size
        numbers[f"{net}: mean velocity, G minus flip(G)"] = gap
        numbers[f"{net}: mean velocity, G minus flip(G), over their mean"] = Estimate(gap.value / size, error, runs)
        caption = f"{runs} networks, {following.probes} common probes."
        if pair.floor is not None:
            numbers[f"{net}: velocity that fresh probes alone would give"] = Estimate(pair.floor, None, runs)
            caption = f"{caption[:-1]}; as many fresh ones alone would give {pair.floor:.2g}."
        charts += panels(net, net, pair, caption)
    text = "; ".join(f"{net} {numbers[f'{net}: mean velocity, G minus flip(G)']}" for net in nets)
    return StudyResult(
        measured=f"Mean velocity on G minus flip(G) covariance: {text}. {runs} networks per "
        f"set.{scope(networks=(nets, NETS))}",
        numbers=numbers,
        figures=tuple(charts),
    )


@study("gih/fig12", sizes=SIZES)
def fig12(run: Run, *, options: Growing = GROWING) -> StudyResult:
    """Velocity and fitting against the number of examples, batch size fixed."""
    options = replace(options, net=named([options.net])[0])
    first, last = options.sizes[0], options.sizes[-1]
    pairs = grow(run, options, options.sizes, fixed_steps=False)
    gaps, shrinks = {n: pair.accuracy_gap for n, pair in pairs.items()}, Estimate(0.0)
    text = f"{gaps[first]} points with {first} examples, the only size, so that nothing is compared"
    if last > first:
        shrinks = difference(gaps[first], gaps[last])
        text = f"{gaps[first]} points with {first} examples, {gaps[last]} with {last}; difference {shrinks}"
    return StudyResult(
        measured=f"Gap in time-averaged training accuracy: {text}. {options}",
        numbers={
            **_numbers(pairs),
            "gap at the smallest size, points": gaps[first],
            "gap at the smallest size minus gap at the largest, points": shrinks,
        },
        figures=_charts(options.net, pairs, "batch size fixed"),
    )


@study("gih/fig13", sizes=SIZES)
def fig13(run: Run, *, options: Growing = GROWING) -> StudyResult:
    """Velocity and fitting against the number of examples, number of steps fixed."""
    options = replace(options, net=named([options.net])[0])
    first, last = options.sizes[0], options.sizes[-1]
    pairs = grow(run, options, options.sizes, fixed_steps=True)
    gap, numbers, returns = pairs[last].accuracy_gap, _numbers(pairs), Estimate(0.0)
    text = f"{gap} points with the steps fixed; nothing is compared, which needs a larger set in other batches"
    if last > first and not same_batches(last, first, options.batch_size):
        other = grow(run, options, (last,), fixed_steps=False)[last]
        plain, returns = other.accuracy_gap, mean_of(pairs[last].fitting - other.fitting)
        numbers[f"n = {last}, batch size fixed: gap in training accuracy, points"] = plain
        text = f"{gap} points with the number of steps fixed and {plain} with the batch fixed; difference {returns}"
    numbers["gap at the smallest size, points"] = pairs[first].accuracy_gap
    return StudyResult(
        measured=f"With {last} examples the gap in time-averaged training accuracy is {text}. {options}",
        numbers={**numbers, "gap with the steps fixed minus gap with the batch fixed, points": returns},
        figures=_charts(options.net, pairs, "number of steps fixed"),
    )


# ---- one network on both sets ----


@dataclass(frozen=True)
class Pair:
    """One network trained on both sets: velocities [epochs] with errors, accuracies [epochs + 1, R], and summaries.

    fitting [R]: time-averaged training accuracy on G minus flip(G) data, in points, of each network. between: the mean
    velocity from products of different networks. floor: the velocity that fresh probes alone would give.
    """

    velocity: dict[bool, tuple[Tensor, Tensor | None]] = field(repr=False)
    accuracy: dict[bool, Tensor] = field(repr=False)
    mean_velocity: dict[bool, Estimate]
    between: dict[bool, Estimate]
    velocity_gap: Estimate
    fitting: Tensor = field(repr=False)
    accuracy_gap: Estimate
    floor: float | None


def compare_pair(
    run: Run, key: str, net: str, G: Geometry, descent: Descent, n: int, runs: int, probes: int, probe_std: float = 1.0
) -> Pair:
    """Train `runs` networks without normalisation on n examples of each set."""
    points, made, tracks = common_probes(run, probes, G.shape, probe_std), factory(net, G.shape, norm=False), {}
    for flip in KINDS:
        seed = derive(run.seed, "data", n, flip)
        data = geometry_gaussian(G.matrix.float(), n, flip=flip, input_shape=G.shape, seed=seed)
        name = f"{key} {net} n={n} {'flip' if flip else 'G'}"  # both sets are given to the same networks
        tracks[flip] = track(run, name, made, data.x, data.y, points, runs, descent, stream=f"{net} {n}")
    histories = {flip: History(each.gradients) for flip, each in tracks.items()}

    def mean_velocity(flip: bool, between: bool = False) -> Estimate:
        return estimate(lambda w: histories[flip].velocity(w, between).mean(), runs)

    gap = estimate(lambda w: histories[False].velocity(w).mean() - histories[True].velocity(w).mean(), runs)
    # time-averaged training accuracy: how fast the labels are fitted, whatever the end
    fitting = percent(tracks[False].accuracy[1:].mean(0) - tracks[True].accuracy[1:].mean(0))
    return Pair(
        velocity={flip: jackknife(each.velocity, runs) for flip, each in histories.items()},
        accuracy={flip: each.accuracy for flip, each in tracks.items()},
        mean_velocity={flip: mean_velocity(flip) for flip in KINDS},
        between={flip: mean_velocity(flip, between=True) for flip in KINDS if runs > 2},
        velocity_gap=gap,
        fitting=fitting,
        accuracy_gap=mean_of(fitting),
        floor=probe_floor(tracks[False].gradients[0]) if probes > 1 else None,  # one probe cannot tell
    )


def grow(run: Run, options: Growing, sizes: tuple[int, ...], fixed_steps: bool) -> dict[int, Pair]:
    """Both sets at every size."""
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise InputError(f"sizes={sizes} must be increasing numbers of examples")
    at_least(1, batch_size=options.batch_size)
    G, pairs = options.geometry(run, options.net, shape_of(1, options.side, [options.net]), norm=False), {}
    for n in sizes:
        batch = batch_for(n, sizes[0], options.batch_size) if fixed_steps else options.batch_size
        descent = options.descent(options.epochs, batch)
        key = f"{'steps' if fixed_steps else 'batch'} fixed"
        pairs[n] = compare_pair(run, key, options.net, G, descent, n, options.runs, options.probes)
    return pairs


def batch_for(n: int, smallest: int, batch: int) -> int:
    """The batch size with which n examples take as many steps as the smallest set."""
    return math.ceil(n / math.ceil(smallest / batch))


def same_batches(n: int, smallest: int, batch: int) -> bool:
    """Whether n examples come in batches of the same size with the steps fixed as with the batch fixed."""
    return min(n, batch_for(n, smallest, batch)) == min(n, batch)


def _numbers(pairs: dict[int, Pair]) -> dict[str, Estimate]:
    found = {}
    for n, pair in pairs.items():
        found[f"n = {n}: gap in training accuracy, points"] = pair.accuracy_gap
        for flip, name in KINDS.items():
            found[f"n = {n}: mean velocity, {name}"] = pair.mean_velocity[flip]
        if pair.floor is not None:
            floor = Estimate(pair.floor, None, len(pair.fitting))
            found[f"n = {n}: velocity that fresh probes alone would give"] = floor
    return found


# ---- charts ----


def panels(name: str, title: str, pair: Pair, caption: str) -> list[Chart]:
    """Velocity and training accuracy over epochs for both sets; `title` says what was trained."""
    speeds, fits = [], []
    for flip, (value, error) in pair.velocity.items():
        style: Literal["dashed", "line"] = "dashed" if flip else "line"
        speeds.append(Series.of(KINDS[flip], range(1, len(value) + 1), value.clamp_min(1e-12), error, style))
        accuracy = pair.accuracy[flip]
        fits.append(curve(KINDS[flip], range(len(accuracy)), percent(accuracy.T), style))
    velocity = Chart(
        f"velocity-{name}", f"Geometric velocity, {title}", "epoch", "1 - Corr(G^t, G^(t-1))", tuple(speeds),
        "Velocity over epochs for data aligned with G and for data with the reversed spectrum.", caption, log_y=True,
    )  # fmt: skip
    fitting = Chart(
        f"fitting-{name}", f"Fitting random labels, {title}", "epoch", "training accuracy, %", tuple(fits),
        "Training accuracy over epochs on both sets.",
    )  # fmt: skip
    return [velocity, fitting]


def _charts(net: str, pairs: dict[int, Pair], how: str) -> tuple[Chart, ...]:
    ns = list(pairs)
    gap = Chart(
        "gap", f"Fitting gap against the number of examples, {how}", "training examples",
        "training accuracy on G minus flip(G) data, points",
        (through("time-averaged", ns, [p.accuracy_gap for p in pairs.values()]),),
        "Gap in training accuracy over the number of examples.", log_x=True,
    )  # fmt: skip
    known = {n: pair.floor for n, pair in pairs.items() if pair.floor is not None}
    floors = [Series.of("fresh probes alone", known, known.values(), style="dashed")] if known else []
    means = [through(name, ns, [p.mean_velocity[flip] for p in pairs.values()]) for flip, name in KINDS.items()]
    velocity = Chart(
        "velocity", f"Mean geometric velocity, {how}", "training examples", "mean of 1 - Corr(G^t, G^(t-1))",
        (*means, *floors), "Mean velocity on both sets over the number of examples.",
        "The probes are the same at all times; dashed: what new ones would give without any training.",
        log_x=True, log_y=True,
    )  # fmt: skip
    # the panels of the paper: both curves over epochs, for every size
    each = [chart for n, pair in pairs.items() for chart in panels(str(n), f"{net}, {n} examples", pair, f"The {how}.")]
    return gap, velocity, *each
