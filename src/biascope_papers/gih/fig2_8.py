"""Figs 2 and 8: correlation of G^t with S and with G S G along training on CIFAR-2, with true and with random labels.

Two positive semi-definite matrices correlate by default, so the charts also show Corr(G^t, I), Corr(G^t, G^0), and what
a random rotation of GSG would give, Corr(G^t, I) Corr(GSG, I). To first order G^t moves away from GSG in every case
that can be solved, so the signed correlation of G^t - G^0 is reported too. "Early" is the epoch at a tenth of the
training; Adam at 1e-3 has hardly moved by then, so the rise to the highest point is measured as well. G of the MLP is
exact. How much of G^t - G^0 lies in the first eigenvectors of GSG is reported beside random subspaces.

Fig. 2: gradients are clipped at the published code's norm of 5 (`clip_norm=0`: none). Fig. 8: Adam at 1e-3 for all; the
published code has 1e-4 for ResNet18 and ViT (`large_lr`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.geometry import compare, containment, data_second_moment, gsg
from biascope.linalg import psd_eigh
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, jackknife_error
from biascope.support import generator
from biascope_papers.gih.averages import History, estimate, jackknife
from biascope_papers.gih.geometries import Drawn, Geometry, known_geometry
from biascope_papers.gih.networks import factory, is_a, named, scope, shape_of
from biascope_papers.gih.sets import Source, describe, two_classes
from biascope_papers.gih.tracking import Descent, common_probes, track
from biascope_papers.gih.training import Precision, mean_of, percent

NETS = ("mlp", "lenet", "resnet18", "vit")
NETS_RANDOM = ("mlp", "lenet", "vgg11", "resnet18")
LARGE = ("resnet", "vit")  # what the published code trains with a smaller rate of Adam
SHARES = (0.01, 0.03, 0.1, 0.3)  # of the dimensions, in which a change may be contained
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"nets": ("mlp", "lenet"), "source": "synthetic", "side": 16, "per_class": 60, "networks": 48, "heads": 32,
              "parts": 4, "runs": 6, "epochs": 10, "probes": 2},
    "laptop": {"nets": ("mlp", "lenet"), "side": 16, "per_class": 500, "networks": 256, "heads": 64, "parts": 4,
               "runs": 8, "epochs": 60, "probes": 8},
    "paper": {"parts": 4},
}  # fmt: skip


@dataclass(frozen=True)
class OnImages(Drawn):
    """Options of both figures, and of Conjecture 2."""

    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10"
    side: Annotated[int, "side of the images"] = 32
    per_class: Annotated[int, "training images per class"] = 5000
    runs: Annotated[int, "networks trained, for G^t"] = 25
    probes: Annotated[int, "probe inputs N(0, I), the same at all times (not stated in the paper)"] = 8
    micro: Annotated[int, "images per forward pass; sets the memory, not the result"] = 1024
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32"


TRUE_LABELS = OnImages()
RANDOM_LABELS = OnImages(nets=NETS_RANDOM)


@study("gih/fig2", sizes=SIZES)
def fig2(
    run: Run,
    *,
    options: OnImages = TRUE_LABELS,
    epochs: Annotated[int, "epochs, one step of gradient descent each"] = 100,
    lr: Annotated[float, "learning rate"] = 0.1,
    momentum: Annotated[float, "momentum"] = 0.9,
    clip_norm: Annotated[float, "largest gradient norm, 0 for none (5 in the published code)"] = 5.0,
) -> StudyResult:
    """Correlation of G^t with S and GSG on CIFAR-2."""
    descent = Descent(
        epochs, lr, 0, momentum, clip_norm=clip_norm or None, micro=options.micro, precision=options.precision
    )
    return correlations(run, NETS, options, lambda net: descent)


@study("gih/fig8", sizes=SIZES)
def fig8(
    run: Run,
    *,
    options: OnImages = RANDOM_LABELS,
    epochs: Annotated[int, "epochs, one step of Adam each"] = 100,
    lr: Annotated[float, "learning rate of Adam (its default)"] = 1e-3,
    large_lr: Annotated[float, "the same for ResNet18 and ViT; 0: lr (1e-4 in the published code)"] = 0.0,
) -> StudyResult:
    """Correlation of G^t with S and GSG on CIFAR-2 with random labels."""

    def descent(net: str) -> Descent:
        rate = large_lr or lr if is_a(net, *LARGE) else lr
        return Descent(epochs, rate, 0, optimiser="adam", micro=options.micro, precision=options.precision)

    rates = "; ".join(f"{net} {descent(net).lr:g}" for net in named(options.nets))
    how = f" Learning rates of Adam: {rates} (the text: defaults; the published code: 1e-4 for ResNet18 and ViT)."
    return correlations(run, NETS_RANDOM, options, descent, random_labels=True, how=how)


def correlations(
    run: Run,
    networks: tuple[str, ...],
    options: OnImages,
    descent_of: Callable[[str], Descent],
    random_labels: bool = False,
    how: str = "",
) -> StudyResult:
    """Both figures: train, follow G^t, correlate. `networks`: those the claim speaks of."""
    nets, side, runs = named(options.nets), options.side, options.runs
    shape = shape_of(3, side, nets)
    images, _ = two_classes(run, options.source, side, options.per_class)
    labels = images.y
    if random_labels:
        labels = torch.randint(2, labels.shape, generator=generator(run.seed, "random labels"))
    S = data_second_moment(images.x.to(run.device), normalise=True).cpu()
    points = common_probes(run, options.probes, shape)
    epochs = descent_of(nets[0]).epochs
    early = max(1, epochs // 10)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    for net in nets:
        exact, made = known_geometry(net, shape), factory(net, shape, norm=False)
        sampled: Geometry | None = None
        if exact is None:
            sampled = options.geometry(run, net, shape, norm=False)
        G = exact if sampled is None else sampled.matrix
        assert G is not None  # one of the two is there
        target = gsg(G, S)
        done = track(run, f"track {net}", made, images.x, labels, points, runs, descent_of(net))
        history = History(done.gradients)
        levels = levels_of(history, {"S": S, "GSG": target, "I": torch.eye(len(S), dtype=torch.float64), "G": G})
        flat = random_rotations(target)
        curves, found = summarise(history, levels, flat, early)
        found |= highest(history, levels, flat)
        if sampled is not None and len(sampled.groups) > 2:
            found |= with_geometry_error(found, history, levels, S, sampled, early)
        found |= contained(history, target, sorted({early, epochs}))
        found["training accuracy at the end, %"] = mean_of(percent(done.accuracy[-1]))
        found["Corr(G, S), networks apart"] = Estimate(compare(G, S).value, None, sampled.rows if sampled else None)
        found["relative error of G"] = Estimate(sampled.error if sampled else 0.0)
        numbers |= {f"{net}: {name}": value for name, value in found.items()}
        charts += [_curves(net, curves), _changes(net, history, S, target), _fitting(net, done.accuracy)]
    text = "; ".join(f"{net} {numbers[f'{net}: rise of Corr(G^t, GSG) by epoch {early}']}" for net in nets)
    return StudyResult(
        measured=f"Corr(G^t, GSG) rises by epoch {early}: {text}. {describe(options.source, side)}. The paper's level "
        "of 0.02 is that of random vectors; baselines of positive matrices are in the charts."
        f"{how}{scope(networks=(nets, networks), images=([options.source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(charts),
    )


Levels = dict[str, tuple[Tensor, float]]  # <G^t, M> per network [T, R] and ||M||, by the name of M
Curves = dict[str, tuple[Tensor, Tensor | None]]


def levels_of(history: History, matrices: Mapping[str, Tensor]) -> Levels:
    """What the correlations of G^t with these matrices need."""
    return {name: (history.energies(M), float(M.norm())) for name, M in matrices.items()}


def random_rotations(target: Tensor) -> float:
    """Corr(target, I): a randomly rotated target correlates with G^t by this times Corr(G^t, I)."""
    return float(target.trace() / (len(target) ** 0.5 * target.norm()))


def highest(history: History, levels: Levels, flat: float) -> dict[str, Estimate]:
    """Corr(G^t, GSG) at its highest after the start: its rise, beyond random rotations, and its lead over S there.

    The epoch is chosen on one half of the networks and measured on the other, both ways round, so that the choice is
    not seen in the values; errors from leaving out one network at a time.
    """
    R = history.R
    halves = torch.arange(R) % 2

    def over(name: str, w: Tensor) -> Tensor:
        return history.with_matrix(*levels[name], w)

    def measured(what: str) -> Callable[[Tensor], Tensor]:
        def one(w: Tensor) -> Tensor:
            values = []
            for half in (0, 1):
                choose, measure = w * (halves == half), w * (halves != half)
                t = 1 + int(over("GSG", choose)[1:].argmax())
                gsg_, other = over("GSG", measure), over("S" if what == "lead" else "I", measure)
                lead = gsg_[t] - other[t] if what == "lead" else gsg_[t] - gsg_[0] - flat * (other[t] - other[0])
                values.append(gsg_[t] - gsg_[0] if what == "rise" else lead)
            return torch.stack(values).mean()

        return one

    names = {
        "rise": "rise of Corr(G^t, GSG) to its highest",
        "beyond": "the same rise beyond random rotations",
        "lead": "Corr(G^t, GSG) - Corr(G^t, S) at its highest",
    }
    if R < 6 or history.times < 2:  # halves of three or more, with one left out two
        return {}
    found = {text: estimate(measured(what), R) for what, text in names.items()}
    ones = torch.ones(R, dtype=torch.float64)
    return found | {"epoch of the highest Corr(G^t, GSG)": Estimate(1 + int(over("GSG", ones)[1:].argmax()))}


def with_geometry_error(
    found: dict[str, Estimate], history: History, levels: Levels, S: Tensor, G: Geometry, early: int
) -> dict[str, Estimate]:
    """The numbers of the rules with the error of the sampled G added, from leaving out one of its groups at a time."""
    n, left = len(G.groups), list[dict[str, Estimate]]()
    for i in range(n):
        target = gsg(torch.stack([each for j, each in enumerate(G.groups) if j != i]).mean(0), S)
        these, flat = {**levels, **levels_of(history, {"GSG": target})}, random_rotations(target)
        left.append(summarise(history, these, flat, early)[1] | highest(history, these, flat))
    made = {}
    for name in left[0]:
        if found[name].standard_error is not None:
            error = jackknife_error([each[name].value for each in left])
            made[name] = replace(found[name], standard_error=math.hypot(found[name].standard_error or 0.0, error))
    return made


def summarise(history: History, levels: Levels, flat: float, early: int) -> tuple[Curves, dict[str, Estimate]]:
    """All curves with errors, and the numbers at "early"."""
    R = history.R

    def with_(name: str, w: Tensor) -> Tensor:
        return history.with_matrix(*levels[name], w)

    def rises(name: str, w: Tensor) -> Tensor:
        return with_(name, w)[early] - with_(name, w)[0]

    curves = {f"Corr(G^t, {name})": jackknife(lambda w, k=name: with_(k, w), R) for name in levels}  # type: ignore[misc]
    curves["Corr(G^t, G^0), same networks"] = jackknife(history.with_start, R)
    curves["GSG randomly rotated"] = jackknife(lambda w: flat * with_("I", w), R)
    gap, error = jackknife(lambda w: with_("GSG", w) - with_("S", w), R)
    farthest = int((gap.abs() + (0 if error is None else 2 * error)).argmax())
    found = {
        f"rise of Corr(G^t, GSG) by epoch {early}": estimate(lambda w: rises("GSG", w), R),
        "the same minus the rise under random rotations": estimate(
            lambda w: rises("GSG", w) - flat * rises("I", w), R
        ),
        f"Corr(G^t, GSG) - Corr(G^t, S) at epoch {early}": estimate(
            lambda w: with_("GSG", w)[early] - with_("S", w)[early], R
        ),
        "largest difference of the two curves": Estimate(
            float(gap[farthest]), None if error is None else float(error[farthest]), R
        ),
    }  # fmt: skip
    for name in ("S", "GSG"):
        for t in sorted({1, early}):
            found[f"signed Corr(G^{t} - G^0, {name})"] = estimate(
                lambda w, k=name, t=t: history.change_with_matrix(*levels[k], w)[t - 1],  # type: ignore[misc]
                R,
            )
    return curves, found


def contained(history: History, target: Tensor, times: Sequence[int]) -> dict[str, Estimate]:
    """Share of G^t - G^0 within the leading eigenvectors of the target at these epochs, and within random subspaces.

    Errors are a jackknife over networks; see `biascope.geometry.containment` for the random baseline, which is exact.
    """
    D = len(target)
    ks = sorted({max(1, round(share * D)) for share in SHARES})
    Q, found = psd_eigh(target.double()).vectors, dict[str, Estimate]()
    for t in times:
        pair = history.gradients[[0, t]].double().cpu()
        rows = pair.flatten(1, 2)
        change = rows[1].T @ rows[1] - rows[0].T @ rows[0]
        if not bool(change.any()):  # nothing has moved
            continue
        dense, rotated, whole = containment(change, target, ks), pair @ Q, History(pair)
        for k, random in zip(ks, dense.random):
            part = History(rotated[..., :k])
            found[f"share of G^{t} - G^0 within the first {k} eigenvectors of GSG"] = estimate(
                lambda w, p=part, h=whole: (p.moved(w)[1] / h.moved(w)[1]).sqrt(),  # type: ignore[misc]
                history.R,
            )
            found[f"share of G^{t} - G^0 within {k} random dimensions"] = Estimate(random)
    return found


def _curves(net: str, curves: Curves) -> Chart:
    solid = ("Corr(G^t, S)", "Corr(G^t, GSG)")
    series = tuple(
        Series.of(name, range(len(value)), value, error, "line" if name in solid else "dashed")
        for name, (value, error) in curves.items()
    )
    return Chart(
        f"correlation-{net}", f"What G^t resembles along training, {net}", "epoch", "correlation", series,
        "Correlation of G^t with S and GSG over epochs, and with the identity, G and G^0 as baselines.",
        "Dashed: baselines. Positive matrices correlate even when unrelated; a rise counts only beyond them.",
    )  # fmt: skip


def _changes(net: str, history: History, S: Tensor, target: Tensor) -> Chart:
    series = []
    for name, M in (("S", S), ("GSG", target)):
        energies, norm = history.energies(M), float(M.norm())
        value, error = jackknife(lambda w, e=energies, m=norm: history.change_with_matrix(e, m, w), history.R)  # type: ignore[misc]
        series.append(Series.of(f"Corr(G^t - G^0, {name})", range(1, history.times), value, error))
    return Chart(
        f"change-{net}", f"Where G^t has moved, {net}", "epoch", "signed correlation", tuple(series),
        "Signed correlation of the change of G with S and GSG over epochs.",
        "Negative: G shrinks along the data, as the theory says for the first moment of training.",
    )  # fmt: skip


def _fitting(net: str, accuracy: Tensor) -> Chart:
    return Chart(
        f"fitting-{net}", f"Training accuracy, {net}", "epoch", "training accuracy, %",
        (curve("training accuracy", range(len(accuracy)), percent(accuracy.T)),),
        "Training accuracy over epochs, mean over networks.",
    )  # fmt: skip
