"""Fig. 4.5 and 4.6, A.4 and A.5: VGG-11 and ResNet-34 on CIFAR-10, with constant and with halved learning rates.

How optimisers are compared is said in `contest`, the networks in `cifar`. The rule, fixed beforehand: the claim holds
if after the same number of epochs the training loss of every optimiser named in it is below every rival's by two
standard errors of the paired difference over the seeds. Time is reported, not judged: it depends on the machine.
"""

from typing import Annotated, Any, Literal

from biascope.studies.ekfac import cifar, contest
from biascope.studies.ekfac.contest import NAMES
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIMS = {
    "4.5": "On VGG-11 and CIFAR-10, EKFAC and EKFAC-ra reach a lower training loss per epoch than KFAC and than SGD "
    "with momentum, with or without batch normalisation.",
    "4.6": "On a ResNet-34 without normalisation, EKFAC-ra reaches a lower training loss per epoch than KFAC and than "
    "SGD with momentum and batch normalisation.",
    "A.4": "With the learning rate halved at fixed epochs, EKFAC is still ahead of KFAC and SGD on VGG-11.",
    "A.5": "With the learning rate halved at fixed epochs, EKFAC-ra is still ahead of KFAC and SGD on ResNet-34.",
}
JUDGED = {
    "4.5": (("ekfac", "ekfac-ra"), ("kfac", "sgd", "sgd-bn")),
    "4.6": (("ekfac-ra",), ("kfac", "sgd-bn")),
    "A.4": (("ekfac", "ekfac-ra"), ("kfac", "sgd", "sgd-bn")),
    "A.5": (("ekfac-ra",), ("kfac", "sgd-bn")),
}
VGG = ("ekfac", "ekfac-ra", "kfac", "sgd", "sgd-bn")
RESNET = ("ekfac-ra", "kfac", "sgd-bn")
SMOKE: dict[str, Any] = {
    "dataset": "digits",
    "n": 100,
    "width": 2,
    "epochs": 2.0,
    "size": 50,
    "plain": 50,
    "refresh": 2,
    "points": 1,
    "seeds": 1,
    "looks": 2,
}
LAPTOP: dict[str, Any] = {"n": 2000, "width": 8, "epochs": 5.0, "refresh": 10, "points": 2, "seeds": 2, "size": 100}
PAPER: dict[str, Any] = {"n": 50000, "width": 64, "refresh": 500, "points": 3, "trial": 0.1, "size": 500, "looks": 40}


def contest_of(
    run: Run,
    figure: str,
    network: cifar.Network,
    dataset: str,
    n: int,
    width: int,
    epochs: float,
    halve: float,
    size: int,
    plain: int,
    refresh: int,
    points: int,
    trial: float,
    looks: int,
    seeds: int,
    momentum: float,
    optimisers: tuple[str, ...],
    tf32: bool,
) -> StudyResult:
    """One network, one contest."""
    task = cifar.problem(run, network, dataset, n, width, momentum)
    frames = cifar.frames(optimisers, len(task.x), epochs, size, plain, refresh, looks, halve)
    with contest.tf32(tf32):
        out = contest.hold(run, task, frames, points, seeds, cifar.grid, trial)
    final = {name: Estimate.of(out.final(name)) for name in optimisers}
    numbers = {f"final training loss, {NAMES[name]}": value for name, value in final.items()}
    speed = contest.timing(out, numbers)
    won, lost = contest.compare(out, *JUDGED[figure], numbers)
    stand_in = "" if dataset == "cifar10" else f" Stand-in data: {dataset}, enlarged to 32x32."
    small = "" if width == 64 else f" Width {width} instead of 64, {n} images."
    said = [
        f"Training losses after {epochs:g} epochs: {', '.join(f'{NAMES[k]} {v}' for k, v in final.items())}.",
        contest.reached(out, "sgd-bn" if "sgd-bn" in optimisers else "sgd", numbers),
        speed,
        f"Not lower by two standard errors, or against a rival that did not learn: {'; '.join(lost)}." if lost else "",
        f"The best learning rate of {', '.join(out.edge)} is at the edge of its grid." if out.edge else "",
    ]
    verdict = ("confirmed" if not lost else "not confirmed") if (won or lost) and seeds > 1 else "not tested"
    if seeds < 2:
        said.append("One seed: no error bars, nothing tested.")
    return StudyResult(
        verdict,  # type: ignore[arg-type]
        CLAIMS[figure],
        " ".join(filter(None, said)) + small + stand_in,
        numbers,
        contest.charts(out, "cross-entropy", f"{network}, {dataset}.{small}{stand_in}"),
    )


@study(
    "ekfac/fig4.5",
    paper="linearization",
    figure="4.5",
    claim=CLAIMS["4.5"],
    sizes={"smoke": SMOKE, "laptop": LAPTOP, "paper": PAPER | {"epochs": 20.0}},
)
def fig4_5(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    n: Annotated[int, "training images"] = 5000,
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 16,
    epochs: Annotated[float, "epochs of every training"] = 10.0,
    size: Annotated[int, "examples per batch of KFAC and EKFAC"] = 500,
    plain: Annotated[int, "examples per batch of SGD"] = 200,
    refresh: Annotated[int, "iterations between refreshes"] = 500,
    points: Annotated[int, "values of each of the two hyper-parameters"] = 2,
    trial: Annotated[float, "share of the epochs with which the grid is searched"] = 0.5,
    looks: Annotated[int, "evaluations along a training"] = 10,
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3,
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0,
    optimisers: Annotated[tuple[str, ...], "who takes part"] = VGG,
    tf32: Annotated[bool, "let the GPU use tf32"] = True,
) -> StudyResult:
    """VGG-11 on CIFAR-10: loss against epochs and time for EKFAC, EKFAC-ra, KFAC, SGD with and without BN."""
    return contest_of(
        run, "4.5", "vgg11", dataset, n, width, epochs, 0.0, size, plain, refresh, points, trial, looks, seeds,
        momentum, optimisers, tf32,
    )  # fmt: skip


@study(
    "ekfac/fig4.6",
    paper="linearization",
    figure="4.6",
    claim=CLAIMS["4.6"],
    sizes={"smoke": SMOKE, "laptop": LAPTOP | {"width": 4, "epochs": 3.0}, "paper": PAPER | {"epochs": 15.0}},
)
def fig4_6(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    n: Annotated[int, "training images"] = 5000,
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 8,
    epochs: Annotated[float, "epochs of every training"] = 10.0,
    size: Annotated[int, "examples per batch of KFAC and EKFAC"] = 500,
    plain: Annotated[int, "examples per batch of SGD"] = 200,
    refresh: Annotated[int, "iterations between refreshes"] = 500,
    points: Annotated[int, "values of each of the two hyper-parameters"] = 2,
    trial: Annotated[float, "share of the epochs with which the grid is searched"] = 0.5,
    looks: Annotated[int, "evaluations along a training"] = 10,
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3,
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0,
    optimisers: Annotated[tuple[str, ...], "who takes part"] = RESNET,
    tf32: Annotated[bool, "let the GPU use tf32"] = True,
) -> StudyResult:
    """ResNet-34 without normalisation on CIFAR-10: EKFAC-ra, KFAC, and SGD with batch normalisation."""
    return contest_of(
        run, "4.6", "resnet34", dataset, n, width, epochs, 0.0, size, plain, refresh, points, trial, looks, seeds,
        momentum, optimisers, tf32,
    )  # fmt: skip


@study(
    "ekfac/figA.4",
    paper="linearization",
    figure="A.4",
    claim=CLAIMS["A.4"],
    sizes={
        "smoke": SMOKE | {"halve": 1.0},
        "laptop": LAPTOP | {"halve": 2.0},
        "paper": PAPER | {"epochs": 60.0, "points": 2, "trial": 0.05, "seeds": 2},
    },
)
def figA_4(
    run: Run,
    *,
    network: Annotated[Literal["vgg11", "resnet34"], "A.4 is vgg11, A.5 resnet34"] = "vgg11",
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    n: Annotated[int, "training images"] = 5000,
    width: Annotated[int, "channels of the first stage; 64 in the paper"] = 16,
    epochs: Annotated[float, "epochs of every training"] = 10.0,
    halve: Annotated[float, "epochs between halvings of the learning rate"] = 20.0,
    size: Annotated[int, "examples per batch of KFAC and EKFAC"] = 500,
    plain: Annotated[int, "examples per batch of SGD"] = 200,
    refresh: Annotated[int, "iterations between refreshes"] = 500,
    points: Annotated[int, "values of each of the two hyper-parameters"] = 2,
    trial: Annotated[float, "share of the epochs with which the grid is searched"] = 0.5,
    looks: Annotated[int, "evaluations along a training"] = 10,
    seeds: Annotated[int, "initialisations the best setting is trained from"] = 3,
    momentum: Annotated[float, "of KFAC and EKFAC (the paper does not say)"] = 0.0,
    optimisers: Annotated[tuple[str, ...], "who takes part"] = (
        "ekfac",
        "ekfac-ra",
        "kfac",
        "sgd-bn",
    ),
    tf32: Annotated[bool, "let the GPU use tf32"] = True,
) -> StudyResult:
    """As Fig. 4.5 with the learning rate halved every few epochs; with network=resnet34 as Fig. 4.6: Fig. A.5."""
    figure = "A.4" if network == "vgg11" else "A.5"
    return contest_of(
        run, figure, network, dataset, n, width, epochs, halve, size, plain, refresh, points, trial, looks, seeds,
        momentum, optimisers, tf32,
    )  # fmt: skip
