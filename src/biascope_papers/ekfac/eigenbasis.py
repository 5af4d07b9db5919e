"""Figs. 4.2 and 4.4c: how the Kronecker eigenbasis (KFE) fits the gradients, and how a metric in it ages.

Fig. 4.2: no dense matrix is formed: ||F|| is the norm of a Gram matrix, and in the basis only the diagonal of F
matters. Fig. 4.4c: the l2 distance between sorted eigenvalues of the true second moment of one layer's gradients, and
KFAC's S_A S_B (as old as the basis), EKFAC's scalings of now, and EKFAC-ra's running average. The text defines the
latter by the squared mean gradient; the authors' program, and this library, multiply it by the batch size m, without
which it is no estimate of single gradients: the claim is judged with the factor, the other variant is shown too.
"""

from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.autograd import backward
from torch.nn import functional as F

from biascope import nets
from biascope.optim import EKFACPreconditioner
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.ekfac.common import Row, batch, glorot, images, reconstruction, require

UNIT = "layers.fc2.weight"  # of Fig. 4.2
LABELS = ("KFAC", "EKFAC", "EKFAC-ra", "EKFAC-ra times m")  # of Fig. 4.4c
REFRESHED = ("KFAC, refreshed", "EKFAC, refreshed")


def flow(watch: Any, unit: str) -> tuple[Tensor, Tensor]:
    """Homogeneous inputs [n, i + 1] and output gradients [n, o] of the individual (mean) losses, of a linear layer that
    an `EKFACPreconditioner` watches.
    """
    found = next(u for u in watch.units if u.name == unit)
    call = watch.watcher.records[found.module].calls[0]
    a = torch.cat([call.input, call.input.new_ones(len(call.input), 1)], 1)
    return a.double(), call.grad.double() * len(a)


def gram(a: Tensor, g: Tensor) -> Tensor:
    """K [n, n] with the eigenvalues of the layer's second moment F = (1/n) sum vec(g a^T) vec(g a^T)^T."""
    return (a @ a.T) * (g @ g.T) / len(a)


def relative_error(K: Tensor, true: Tensor, used: Tensor) -> float:
    """||F - Q diag(used) Q^T|| / ||F|| where `true` is the diagonal of F in the basis Q, and ||F|| = ||K||."""
    norm = K.square().sum()
    squared = norm - 2 * (true.double() * used.double()).sum() + used.double().square().sum()
    return float((squared.clamp_min(0.0) / norm).sqrt())


def kfac_scalings(E: Any) -> Tensor:
    """S_B S_A [g, e, o, i], the scalings that KFAC uses in the basis of one of `watch.pieces()`."""
    scalings: Tensor = (E.s_B[:, :, None] * E.s_A[:, None, :])[:, None].expand_as(E.s)
    return scalings


@study(
    "ekfac/fig4.2",
    sizes={
        "smoke": {"n": 256, "steps": 200, "refresh": 100, "hidden": (24, 20, 16, 12), "seeds": 2},
        "laptop": {},
        "paper": {"dataset": "mnist", "n": 5000, "steps": 1000, "hidden": (200, 100, 60, 30), "seeds": 5},
    },
)
def fig4_2(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "mnist"], "images to classify"] = "digits",
    n: Annotated[int, "examples that define the metric"] = 1000,
    hidden: Annotated[tuple[int, ...], "widths of the sigmoid layers"] = (60, 50, 40, 30),
    steps: Annotated[int, "training steps"] = 400,
    refresh: Annotated[int, "steps between refreshes"] = 100,
    every: Annotated[int, "steps between measurements"] = 10,
    lr: Annotated[float, "learning rate of Adam, which trains (not in the paper)"] = 3e-3,
    size: Annotated[int, "examples per batch"] = 100,
    components: Annotated[int, "gradient components to correlate"] = 250,
    seeds: Annotated[int, "trainings"] = 3,
) -> StudyResult:
    """Correlation of gradients in two bases, and the age of a metric."""
    multiple = refresh % every == 0 and refresh > every
    require(multiple, f"refresh={refresh} must be a multiple of every={every}, and larger")
    x, y = images(dataset, n, run)

    def train(seed: int) -> Row:
        shape: dict[str, Any] = {"in_features": x.shape[1], "hidden": hidden, "outputs": 10, "activation": "sigmoid"}
        net = nets.build("mlp", seed=derive(run.seed, "init", seed), **shape).to(run.device)
        adam = torch.optim.Adam(net.parameters(), lr=lr)
        errors: dict[str, list[float]] = {"ekfac": [], "kfac": []}
        with EKFACPreconditioner(net, damping=1.0, refresh_every=max(1, refresh // every)) as watch:
            for step in range(steps):
                if step % every == 0:
                    net.zero_grad()
                    backward(F.cross_entropy(net(x), y))
                    a, g = flow(watch, UNIT)
                    watch.directions(lambda unit: 1.0)
                    net.zero_grad()
                    E: Any = watch.pieces()[UNIT]
                    for name, scalings in (("ekfac", E.s), ("kfac", kfac_scalings(E))):
                        errors[name].append(relative_error(gram(a, g), E.s, scalings))
                watch.watcher.capture = False
                i = batch(run, seed, step, len(x), size)
                adam.zero_grad()
                backward(F.cross_entropy(net(x[i]), y[i]))
                adam.step()
                adam.zero_grad()
                watch.watcher.clear()
                watch.watcher.capture = True
            rotated = (a @ E.U_A[0].double(), g @ E.U_B[0].double()) if E.U_A is not None else (a, g)
        result: Row = {name: torch.tensor(values) for name, values in errors.items()}
        with torch.no_grad():
            result["accuracy"] = float((net(x).argmax(1) == y).double().mean())
        rng = generator(run.seed, "components", seed)
        chosen = torch.randperm(a.shape[1] * g.shape[1], generator=rng)[:components].to(run.device)
        for name, (u, v) in {"plain": (a, g), "kfe": rotated}.items():
            rows = (v[:, :, None] * u[:, None, :]).flatten(1)[:, chosen]
            rows = rows[:, rows.std(0) > 1e-10 * rows.std()]  # pixels that are always black have no gradient
            C = torch.corrcoef(rows.T).abs()
            off = C[~torch.eye(len(C), dtype=torch.bool, device=C.device)]
            result |= {name: float(off.mean()), f"{name}_histogram": torch.histc(off.cpu(), 40, 0, 1) / len(off)}
        return result

    rows: list[Row] = run.cached_each("seed", progress(range(seeds), "trainings"), train)
    ratio = Estimate.of([row["kfe"] / row["plain"] for row in rows])
    gap = Estimate.of([float((row["kfac"] - row["ekfac"]).mean()) for row in rows])
    ours, theirs = ([drift(row[name], refresh // every) for row in rows] for name in ("ekfac", "kfac"))
    smallest = min(float((row["kfac"] - row["ekfac"]).min()) for row in rows)
    accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
    learnt = {"lowest training accuracy": Estimate(min(accuracies))} if accuracies else {}
    middle = (torch.arange(40) + 0.5) / 40
    bases = {"parameter basis": "plain_histogram", "Kronecker eigenbasis": "kfe_histogram"}
    return StudyResult(
        measured=f"Mean |correlation| in the KFE is {ratio} of that in the parameter basis; the error of KFAC exceeds "
        f"EKFAC's by {gap}.",
        numbers={
            "mean |correlation|, KFE / parameter basis": ratio,
            "error of KFAC minus EKFAC": gap,
            "error of KFAC minus EKFAC, smallest": Estimate(smallest),
            "drift between refreshes, KFAC": Estimate.of(theirs),
            "drift between refreshes, KFAC minus EKFAC": Estimate.of([b - a for a, b in zip(ours, theirs)]),
            "smallest drift of KFAC between refreshes": Estimate(min(theirs)),
            **learnt,
            **{
                f"mean |correlation|, {name}": Estimate.of([row[key] for row in rows])
                for name, key in {"parameter basis": "plain", "KFE": "kfe"}.items()
            },
        },
        figures=(
            Chart("correlation", "Absolute correlations between gradient components of layer 2", "|correlation|",
                  "share of pairs", tuple(Series.of(label, middle, rows[0][key]) for label, key in bases.items()),
                  alt="Two histograms: in the eigenbasis the correlations are concentrated near zero."),
            Chart("error", f"Relative error of the metric of layer 2, refreshed every {refresh} steps",
                  "training step", "||F - F~|| / ||F||",
                  tuple(curve(k.upper(), range(0, steps, every), [row[k] for row in rows]) for k in ("kfac", "ekfac")),
                  alt="Saw-tooth curves: both errors are reset at every refresh and grow in between; EKFAC's is lower.",
                  caption=f"Mean over {seeds} trainings, band: one standard error. Sigmoid network {hidden} on "
                  f"{dataset}."),
        ),
    )  # fmt: skip


def drift(values: Tensor, period: int) -> float:
    """Mean growth of a curve from just after a refresh to just before the next."""
    whole = values[: len(values) // period * period].reshape(-1, period)
    return float((whole[:, -1] - whole[:, 0]).mean())


@study(
    "ekfac/fig4.4c",
    sizes={
        "smoke": {"n": 256, "hidden": (32, 24, 16, 8), "steps": 100, "seeds": 2, "init": "glorot"},
        "laptop": {"init": "glorot", "seeds": 5},
        "paper": {"dataset": "mnist", "hidden": (1000, 500, 250, 30), "steps": 2000, "every": 20}
        | {"refresh": 100, "init": "glorot", "seeds": 5},
    },
)
def fig4_4c(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "mnist"], "images to encode"] = "digits",
    n: Annotated[int, "examples that define the metric"] = 1000,
    hidden: Annotated[tuple[int, ...], "widths of the encoder; its last layer is measured"] = (100, 60, 40, 10),
    steps: Annotated[int, "training steps"] = 400,
    every: Annotated[int, "steps between measurements"] = 10,
    refresh: Annotated[int, "steps between refreshes of the basis that is not frozen"] = 50,
    lr: Annotated[float, "learning rate of Adam, which trains (not in the paper)"] = 1e-3,
    size: Annotated[int, "examples per batch"] = 200,
    init: Annotated[Literal["torch", "glorot"], "how weights begin (not in the paper)"] = "torch",
    seeds: Annotated[int, "trainings"] = 3,
) -> StudyResult:
    """Distance of spectra with a frozen eigenbasis, and with one that is refreshed."""
    require(refresh % every == 0, f"refresh={refresh} must be a multiple of every={every}")
    x, _ = images(dataset, n, run)

    def train(seed: int) -> dict[str, Tensor]:
        unit, never = f"encoder.fc{len(hidden)}.weight", steps + 1
        net = nets.build("autoencoder", seed=derive(run.seed, "init", seed), in_features=x.shape[1], hidden=hidden)
        if init == "glorot":
            glorot(net, generator(run.seed, "glorot", seed))
        net = net.to(run.device)
        own = [p for name, p in net.named_parameters() if name.startswith(unit.removesuffix("weight"))]
        adam = torch.optim.Adam(net.parameters(), lr=lr)
        losses: list[float] = []
        distances: dict[str, list[float]] = {label.lower(): [] for label in LABELS + REFRESHED}
        # these two see all examples, and only when something is measured: their steps are measurements
        whole = [EKFACPreconditioner(net, damping=1.0, params=own, refresh_every=k) for k in (never, refresh // every)]
        running = [
            EKFACPreconditioner(
                net, damping=1.0, params=own, refresh_every=never, scalings="running", rescale_by_batch=times_m
            )
            for times_m in (False, True)
        ]
        with whole[0], whole[1], running[0], running[1]:
            for step in range(steps):
                if step % every == 0:
                    net.zero_grad()
                    loss = reconstruction(net, x)
                    losses.append(float(loss.detach()))
                    backward(loss)
                    a, g = flow(whole[0], unit)
                    for each in whole + (running if step == 0 else []):  # at first: the same data, the same basis
                        each.directions(lambda unit: 1.0)
                    net.zero_grad()
                    frozen, fresh = (each.pieces()[unit] for each in whole)
                    spectra = [kfac_scalings(frozen), frozen.s, *(each.pieces()[unit].s for each in running)]
                    spectra += [kfac_scalings(fresh), fresh.s]
                    true = torch.linalg.eigvalsh(gram(a, g)).flip(0).clamp_min(0.0)
                    for label, s in zip(LABELS + REFRESHED, spectra):
                        distances[label.lower()].append(_distance(s, true))
                for each in whole:
                    each.watcher.capture = False
                adam.zero_grad()
                backward(reconstruction(net, x[batch(run, seed, step, len(x), size)]))
                for each in running:
                    each.directions(lambda unit: 1.0)
                adam.step()
                adam.zero_grad()
                for each in whole:
                    each.watcher.clear()
                    each.watcher.capture = True
        return {name: torch.tensor(values) for name, values in {**distances, "loss": losses}.items()}

    each_seed = progress(range(seeds), "trainings")
    rows: list[Row] = [run.cached(f"seed {seed} refresh {refresh}", partial(train, seed)) for seed in each_seed]
    late = slice(steps // every // 2, None)  # the second half of training
    ratios = {
        label: Estimate.of([float(row[label.lower()][late].mean() / row["kfac"][late].mean()) for row in rows])
        for label in LABELS[1:]
    }
    ends = {label: Estimate.of([float(row[label.lower()][-1]) for row in rows]) for label in LABELS}
    curves = tuple(
        curve(label, range(0, steps, every), [row[label.lower()] for row in rows],
              "dashed" if label in REFRESHED else "line")
        for label in LABELS + REFRESHED
    )  # fmt: skip

    gaps = {
        label: Estimate.of([float((row["kfac"][late] - row[label.lower()][late]).mean()) for row in rows])
        for label in LABELS[1:]
    }
    plateau = float(F.binary_cross_entropy(x.mean(0).expand_as(x), x, reduction="sum")) / len(x)
    known = [float(row["loss"][-1]) for row in rows if "loss" in row]
    gate = {"worst loss / plateau": Estimate(max(known) / plateau)} if len(known) == len(rows) else {}

    shown = ", ".join(f"{label} {value}" for label, value in ratios.items())
    return StudyResult(
        measured=f"In the second half of training the distances, as multiples of KFAC's, are {shown}.",
        numbers={
            **{f"distance of {label} / KFAC, second half": value for label, value in ratios.items()},
            **{f"distance of KFAC minus {label}, second half": value for label, value in gaps.items()},
            **gate,
            **{f"relative distance of {label} at the end": value for label, value in ends.items()},
        },
        figures=(
            Chart("distance", f"Distance of the spectra of layer {len(hidden)}, basis frozen at the start or refreshed",
                  "training step", "||eigenvalues - true ones|| / ||true ones||", curves, log_y=True,
                  alt="KFAC's distance grows with training, those of EKFAC and EKFAC-ra stay lower.",
                  caption=f"Mean over {seeds} trainings of a sigmoid auto-encoder on {dataset}, band: one standard "
                  "error."),
        ),
    )  # fmt: skip


def _distance(s: Tensor, true: Tensor) -> float:
    """Relative l2 distance of sorted spectra; the shorter one is filled up with zeros."""
    s = s.flatten().double().sort(descending=True).values
    length = max(len(s), len(true))
    return float((F.pad(s, (0, length - len(s))) - F.pad(true, (0, length - len(true)))).norm() / true.norm())
