"""Fig. B.5 and B.6: alignment of the tangent kernel with test labels, centred and not, for three networks.

MLP (6 hidden layers of 80) on MNIST, VGG-19 and ResNet-18 on CIFAR-10. ResNet-18 trains with batch norm; its kernels
are those of the network in eval mode, with the running statistics of the moment.

Verdict: confirmed if for every network the alignment at the last probe exceeds that at the first, centred (Fig. B.5)
and uncentred (Fig. B.6), by two standard errors over seeds, or with one seed over its probe batches, which the text
says. (Changed after the first run: errors had pooled seeds and batches.)
"""

from typing import Annotated

from biascope.errors import InputError
from biascope.progress import progress
from biascope.studies.alignment.tracking import Probing, Setting, iterations, repeats
from biascope.studies.estimates import above, curve, decide
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The alignment of the tangent kernel with the labels of held-out images increases during training for MLP, VGG-19 "
    "and ResNet-18, whether or not the kernel is centred."
)
NETS = {"mlp": ("mnist", 80, 0.02), "vgg19": ("cifar10", 64, 0.01), "resnet18": ("cifar10", 64, 0.01)}
PROBES = Probing(probes=7, probe_sets=3)


@study(
    "alignment/figB.5",
    paper="alignment",
    figure="B.5",
    claim=CLAIM,
    sizes={
        "smoke": {
            "nets": "mlp",
            "digits": True,
            "n_train": 300,
            "n_test": 100,
            "batch": 50,
            "epochs": 20,
            "probes": 5,
            "probe_size": 20,
        },
        "laptop": {},
        "paper": {"narrow": 1, "n_train": 50_000, "n_test": 10_000, "epochs": 40, "probes": 25, "probe_size": 100},
    },
)
def fig_b5(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "mlp, vgg19, resnet18"] = ("mlp", "vgg19", "resnet18"),
    digits: Annotated[bool, "use the 8 x 8 digits instead of MNIST and CIFAR-10 (mlp only)"] = False,
    narrow: Annotated[int, "divide the channels of the convolutional networks by this"] = 8,
    epochs: Annotated[float, "passes over the training images"] = 20,
    probing: Probing = PROBES,
) -> StudyResult:
    """Alignment with test labels during training, centred and uncentred, for three networks."""
    if digits and set(nets) != {"mlp"}:
        raise InputError("digits=true is for nets=mlp: the convolutional networks need images of side 32")
    numbers: dict[str, Estimate] = {}
    curves: dict[str, list[Series]] = {"cka": [], "uncentred": []}
    said, judged = [], list[Estimate]()
    for net in progress(nets, "networks"):
        if net not in NETS:
            raise InputError(f"no network is called {net!r} here; there is {', '.join(NETS)}")
        dataset, width, lr = NETS[net]
        setting = Setting(
            dataset="digits" if digits else dataset,
            net=net,
            width=width if net == "mlp" else max(1, width // narrow),
            lr=lr,
            epochs=epochs,
        )
        found = probing.trainings(run, setting)
        steps = iterations(found)
        rises = []
        for statistic, name in (("cka", "centred"), ("uncentred", "uncentred")):
            rows = repeats(found, "test", statistic)
            rise = Estimate.of(rows[:, -1] - rows[:, 0])
            numbers[f"rise of the {name} alignment, {net}"] = rise
            numbers[f"final {name} alignment, {net}"] = Estimate.of(rows[:, -1])
            curves[statistic].append(curve(net, steps, rows))
            rises.append(rise)
        numbers[f"test accuracy, {net}"] = Estimate.of([float(f["test_accuracy"][-1]) for f in found])
        judged += rises
        said.append(f"{net}: rises by {rises[0]} centred, {rises[1]} uncentred")
    charts = tuple(
        Chart(
            name,
            f"Alignment with test labels, {name}",
            "iteration",
            "alignment",
            tuple(curves[statistic]),
            alt="Alignment with the labels of test images over iterations, one curve per network.",
            caption="Iteration 0 is drawn at 1. Mean and standard error, over seeds or over batches of one.",
            log_x=True,
        )
        for statistic, name in (("cka", "centred"), ("uncentred", "uncentred"))
    )
    changed = " The images are the 8 x 8 digits, a stand-in." if digits else ""
    changed += (
        f" Convolutional networks have 1/{narrow} of the published channels." if narrow > 1 and not digits else ""
    )
    return StudyResult(
        decide(all(map(above, judged)), judged),
        CLAIM,
        f"{'; '.join(said)}. {probing.n_train} images, {epochs:g} epochs, {probing}.{changed}",
        numbers,
        charts,
    )
