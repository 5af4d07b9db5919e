"""Fig. 4.6 (also 6.6): the path complexity C(f) = sum_t ||dw_t|| ||Phi_t||_F against the generalisation gap.

Three sweeps, as in the paper: `width` of an MLP with one hidden layer on MNIST, `corruption` of the labels with 256
hidden units, and `channels` of VGG-19 on CIFAR-10. Networks train until the cross-entropy on all training images is
0.01 (looked at after every epoch, for at most `epochs`). The complexity is summed at every epoch and at iterations
spaced evenly in logarithm, with the displacement in between and ||Phi||_F on a fixed batch: coarser steps give smaller
sums, so sums are comparable only within a sweep. The gap is test error minus training error. Other measures are
reported beside it.

Verdict (fixed before running): confirmed if in every sweep asked for the rank correlation of C(f) with the gap is
positive by two standard errors over seeds. (Over corruption, C(f) should grow with the noise: reported.) A sweep in
which fewer than half of the trainings reach the loss tests nothing, nor does one seed.
"""

from typing import Annotated

from biascope.data import Dataset
from biascope.errors import InputError
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.alignment.complexity import MEASURES, Training, measure, table
from biascope.studies.estimates import above, curve, decide, spearman
from biascope.studies.function_space.setting import images
from biascope.studies.invariance.charts import restricted
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The complexity C(f) of the path taken by training follows the generalisation gap over network width, over the "
    "fraction of random labels, and over the channels of VGG-19. (That it grows with the fraction of random labels is "
    "not judged.)"
)
SWEEPS = ("width", "corruption", "channels")


@study(
    "alignment/fig4.6",
    paper="alignment",
    figure="4.6",
    claim=CLAIM,
    sizes={
        "smoke": {
            "dataset": "digits",
            "sweeps": "corruption",
            "n_train": 200,
            "n_test": 300,
            "hidden": 64,
            "corruptions": "0,0.3,0.6",
            "epochs": 120,
            "batch": 50,
            "lr": 0.1,
            "updates": 12,
            "probe_size": 40,
            "seeds": 2,
        },
        "laptop": {},
        "paper": {
            "sweeps": "width,corruption,channels",
            "n_train": 50_000,
            "n_test": 10_000,
            "widths": "8,16,32,64,128,256,512,1024,2048,4096",
            "corruptions": "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1",
            "channels": "4,8,16,24,32",
            "epochs": 150,
            "updates": 60,
            "probe_size": 100,
        },
    },
)
def fig4_6(
    run: Run,
    *,
    dataset: Annotated[str, "images of the first two sweeps: mnist, or digits as a stand-in"] = "mnist",
    sweeps: Annotated[tuple[str, ...], "width, corruption, channels"] = ("width", "corruption"),
    n_train: Annotated[int, "training images"] = 1000,
    n_test: Annotated[int, "test images"] = 2000,
    widths: Annotated[tuple[int, ...], "hidden units of the first sweep"] = (8, 32, 128, 512),
    hidden: Annotated[int, "hidden units of the second sweep"] = 256,
    corruptions: Annotated[tuple[float, ...], "fractions of random labels"] = (0.0, 0.25, 0.5, 0.75),
    channels: Annotated[tuple[int, ...], "channels of the first stage of VGG-19"] = (4, 8, 16),
    lr: Annotated[float, "learning rate; momentum is 0.9"] = 0.01,
    batch: Annotated[int, "images per step"] = 100,
    epochs: Annotated[float, "most passes over the training images"] = 200,
    stop: Annotated[float, "training cross-entropy at which to stop"] = 0.01,
    updates: Annotated[int, "log-spaced iterations at which the complexity is summed, besides every epoch"] = 30,
    probe_size: Annotated[int, "images for the norm of the tangent features"] = 50,
    seeds: Annotated[int, "initialisations"] = 3,
    precision: Annotated[str, "float32, tf32 or bf16 while training on a GPU"] = "tf32",
) -> StudyResult:
    """Complexity of the path and other measures against the generalisation gap, over three sweeps."""
    points: dict[str, tuple[float, ...]] = {"width": widths, "corruption": corruptions, "channels": channels}
    if unknown := [name for name in sweeps if name not in points]:
        raise InputError(f"no sweep is called {unknown[0]!r}; there is {', '.join(points)}")
    numbers: dict[str, Estimate] = {}
    charts, said, judged, tested = [], [], list[Estimate](), True
    for sweep in progress(sweeps, "sweeps"):
        train, test = _images(run, "cifar10" if sweep == "channels" else dataset, n_train, n_test)
        rows = []
        for seed in range(seeds):
            row = []
            for value in progress(points[sweep], sweep, leave=False):
                net = "vgg19" if sweep == "channels" else "mlp"
                width, noise = (hidden, value) if sweep == "corruption" else (int(value), 0.0)
                job = Training(net, 1, width, noise, lr, batch, epochs, stop, updates, probe_size, precision=precision)
                row.append(measure(run, job, train, test, seed))
            rows.append(row)
        gap = table(rows, "gap")
        follows = {}
        for name, label in MEASURES.items():
            values = table(rows, name)
            if bool(values.isfinite().all()):
                follows[name] = Estimate.of([spearman(v, g) for v, g in zip(values.tolist(), gap.tolist())])
                numbers[f"rank correlation of {label} and the gap, {sweep}"] = follows[name]
        grows = Estimate.of([spearman(list(points[sweep]), v) for v in table(rows, "path").tolist()])
        numbers[f"rank correlation of {sweep} and C(f)"] = grows
        numbers[f"gap at the ends of the sweep, first, {sweep}"] = Estimate.of(gap[:, 0])
        numbers[f"gap at the ends of the sweep, last, {sweep}"] = Estimate.of(gap[:, -1])
        late = int((table(rows, "loss") > stop).sum())
        judged.append(follows["path"])
        tested = tested and 2 * late <= gap.numel()
        said.append(
            f"{sweep}: C(f) and the gap {follows['path']}, C(f) and {sweep} {grows}"
            + (f" ({late} of {gap.numel()} trainings did not reach the loss)" if late else "")
        )
        charts.append(
            Chart(
                f"complexity-{sweep}",
                f"Complexity and generalisation gap over {sweep}",
                {"width": "hidden units", "corruption": "fraction of random labels"}.get(
                    sweep, "channels of the first stage"
                ),
                "relative to the largest",
                tuple(
                    curve(label, points[sweep], t / t.abs().amax(1, keepdim=True).clamp_min(1e-12))
                    for label, t in [
                        ("generalisation gap", gap),
                        *((MEASURES[name], table(rows, name)) for name in follows),
                    ]
                ),
                alt="The gap, C(f) and other measures over the sweep, each relative to its largest value.",
                caption="Mean and standard error over seeds.",
                log_x=sweep != "corruption",
            )
        )
    stand_in = "" if dataset == "mnist" else f" The digits are {dataset}, a stand-in for MNIST."
    claim, missing = restricted(CLAIM, sweeps=(sweeps, SWEEPS))
    return StudyResult(
        decide(all(map(above, judged)), judged) if tested else "not tested",
        claim,
        f"Rank correlations: {'; '.join(said)}. {n_train} training images, {seeds} seeds.{stand_in}{missing}",
        numbers,
        tuple(charts),
    )


def _images(run: Run, dataset: str, n_train: int, n_test: int) -> tuple[Dataset, Dataset]:
    train = images(dataset, "train", n_train, derive(run.seed, "images"), run.device)
    return train, images(dataset, "test", n_test, derive(run.seed, "images"), run.device, like=train)
