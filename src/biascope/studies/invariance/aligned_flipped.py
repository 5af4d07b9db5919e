"""Gaussian data whose covariance is G, or G with its spectrum reversed, and random labels (Figs 3, 12 and 13)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor

from biascope.data import geometry_gaussian
from biascope.ensembles.arithmetic import Precision
from biascope.geometry.probe_noise import floor_of_gradients
from biascope.seeds import derive
from biascope.studies.estimates import curve
from biascope.studies.invariance.charts import percent
from biascope.studies.invariance.factors import History, estimate, jackknife
from biascope.studies.invariance.geometries import Geometry, initial_geometry
from biascope.studies.invariance.networks import factory
from biascope.studies.invariance.tracking import Descent, Track, common_probes, track
from biascope.studies.result import Chart, Estimate, Series
from biascope.studies.runs import Run

KINDS = {False: "G covariance", True: "flip(G) covariance"}


@dataclass(frozen=True)
class Following:
    """Options of the studies that follow the geometry of networks trained on such data."""

    side: Annotated[int, "side of the grey input image"] = 32
    networks: Annotated[int, "networks drawn for G"] = 10_000
    heads: Annotated[int, "output layers per network drawn for G (1 in the paper)"] = 1
    lr: Annotated[float, "learning rate"] = 0.1
    momentum: Annotated[float, "momentum"] = 0.9
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32"
    engine: Annotated[Literal["auto", "eager", "graph"], "how large networks are trained on CUDA"] = "auto"

    def geometry(self, run: Run, net: str, shape: Sequence[int]) -> Geometry:
        """G of a network without normalisation."""
        return initial_geometry(run, net, shape, networks=self.networks, heads=self.heads, norm=False)

    def descent(self, epochs: int, batch_size: int, clip_norm: float) -> Descent:
        """How the networks are trained; clip_norm 0 is for none."""
        return Descent(epochs, self.lr, batch_size, self.momentum, clip_norm=clip_norm or None,
                       precision=self.precision, engine=self.engine)  # fmt: skip


FOLLOWING = Following()


@dataclass(frozen=True)
class Pair:
    """One network trained on both sets: velocities [epochs] with errors, accuracies [epochs + 1, R], and summaries.

    fitting [R]: time-averaged training accuracy on G minus flip(G) data, in points, of each network. between: the mean
    velocity from products of different networks (`History.velocity_between`), with three networks or more. floor: the
    velocity that fresh probes alone would give before training, as `velocity_floor` (its formula, not the verdict, was
    changed after the first runs).
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
    run: Run, key: str, net: str, G: Geometry, descent: Descent, *, n: int, runs: int, probes: int, probe_std: float
) -> Pair:
    """Train `runs` networks without normalisation on n examples of each set."""
    tracks = {flip: _track(run, key, net, G, descent, n, runs, probes, probe_std, flip) for flip in (False, True)}
    histories = {flip: History(each.gradients) for flip, each in tracks.items()}
    velocity = {flip: jackknife(each.velocity, runs) for flip, each in histories.items()}
    means = {flip: estimate(lambda w, h=each: h.velocity(w).mean(), runs) for flip, each in histories.items()}  # type: ignore[misc]
    between = {flip: estimate(lambda w, h=each: h.velocity_between(w).mean(), runs)  # type: ignore[misc]
               for flip, each in histories.items() if runs > 2}  # fmt: skip
    aligned, flipped = histories[False], histories[True]
    gap = estimate(lambda w: aligned.velocity(w).mean() - flipped.velocity(w).mean(), runs)
    # time-averaged training accuracy: how fast the labels are fitted, whatever the end
    fitting = percent(tracks[False].accuracy[1:].mean(0) - tracks[True].accuracy[1:].mean(0))
    floor = floor_of_gradients(tracks[False].gradients[0]) if probes > 1 else None  # one probe cannot tell
    accuracy = {flip: each.accuracy for flip, each in tracks.items()}
    return Pair(velocity, accuracy, means, between, gap, fitting, Estimate.of(fitting), floor)


def _track(
    run: Run,
    key: str,
    net: str,
    G: Geometry,
    descent: Descent,
    n: int,
    runs: int,
    probes: int,
    probe_std: float,
    flip: bool,
) -> Track:
    data = geometry_gaussian(
        G.matrix.float(), n, flip=flip, input_shape=G.shape, seed=derive(run.seed, "data", n, flip)
    )
    made = factory(net, G.shape, norm=False)
    points = common_probes(run, probes, tuple(G.shape), probe_std)
    name = f"{key} {net} n={n} {'flip' if flip else 'G'}"  # both sets are given to the same networks
    return track(run, name, made, data.x, data.y, points, runs, descent, stream=f"{net} {n}")


def velocity_chart(name: str, title: str, pair: Pair, caption: str) -> Chart:
    """Velocity over epochs for both sets; `title` says what was trained."""
    series = []
    for flip, (value, error) in pair.velocity.items():
        epochs = range(1, len(value) + 1)
        series.append(Series.of(KINDS[flip], epochs, value.clamp_min(1e-12), error, "dashed" if flip else "line"))
    return Chart(
        name=f"velocity-{name}",
        title=f"Geometric velocity, {title}",
        x_label="epoch",
        y_label="1 - Corr(G^t, G^(t-1))",
        series=tuple(series),
        alt="Velocity over epochs for data aligned with G and for data with the reversed spectrum.",
        caption=caption,
        log_y=True,
    )


def fitting_chart(name: str, title: str, pair: Pair) -> Chart:
    """Training accuracy over epochs for both sets; `title` says what was trained."""
    series = []
    for flip, accuracy in pair.accuracy.items():
        series.append(curve(KINDS[flip], range(len(accuracy)), percent(accuracy.T), "dashed" if flip else "line"))
    return Chart(
        name=f"fitting-{name}",
        title=f"Fitting random labels, {title}",
        x_label="epoch",
        y_label="training accuracy, %",
        series=tuple(series),
        alt="Training accuracy over epochs on both sets.",
    )
