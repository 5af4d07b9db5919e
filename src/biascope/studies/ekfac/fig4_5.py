"""Fig. 4.5 and 4.6, A.4 and A.5: VGG-11 and ResNet-34 on CIFAR-10, with constant and with halved learning rates.

How optimisers are compared is said in `contest`, the networks in `cifar`. The rule, fixed beforehand: the claim holds
if after the same number of epochs the training loss of every optimiser named in it is below every rival's by two
standard errors of the paired difference over the seeds. Time is reported, not judged: it depends on the machine.
(Changed after the first run of Fig. 4.6 at laptop size, 3 epochs of 2000 images, where SGD had 30 steps and neither it
nor KFAC left the plateau: 6 epochs of 1000 images in smaller batches. The kept runs at the paper's size have 4 and 3
epochs. In Fig. 4.5 the trials were raised from 14 to 20, since 14 had surrounded no best setting; EKFAC-ra, better
after half the training, then ended at 0.133 instead of 0.095, and the verdict is the same. At laptop size the verdict
of Fig. 4.5 turns on what the search finds for KFAC, which rounding decides: its loss was 0.632 and 0.467 in two runs,
0.27 and 0.06 +- 0.03 above that of EKFAC. The later one is kept.)
"""

from dataclasses import dataclass
from typing import Annotated, Any

from biascope.studies.ekfac import cifar, contest, standing
from biascope.studies.ekfac.contest import NAMES
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIMS = {
    "4.5": "On VGG-11 and CIFAR-10, EKFAC and EKFAC-ra reach a lower training loss per epoch than KFAC and than SGD "
    "with momentum, with or without batch normalisation. (KFAC at the smaller batches of SGD does not take part.)",
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
    "trials": 1,
    "seeds": 1,
    "looks": 2,
}
LAPTOP: dict[str, Any] = {
    "n": 2000,
    "width": 8,
    "epochs": 5.0,
    "refresh": 10,
    "trials": 20,
    "seeds": 2,
    "size": 100,
    "looks": 5,
}
RESNET_LAPTOP = LAPTOP | {"n": 1000, "width": 4, "epochs": 6.0, "looks": 6, "size": 50, "plain": 50}
RESNET_LAPTOP |= {"trials": 14, "trial": 0.33}
PAPER: dict[str, Any] = {"n": 50000, "width": 64, "refresh": 500, "trials": 14, "trial": 0.1, "size": 500, "looks": 40}


@dataclass(frozen=True)
class Contest(cifar.OnCifar):
    """Options of the contests with one batch size for the KFAC family and one for SGD."""

    size: Annotated[int, "examples per batch of KFAC and EKFAC"] = 500
    plain: Annotated[int, "examples per batch of SGD"] = 200
    optimisers: Annotated[tuple[str, ...], "who takes part"] = VGG


ON_VGG = Contest()
ON_RESNET = Contest(width=8, optimisers=RESNET)
HALVED = Contest(optimisers=("ekfac", "ekfac-ra", "kfac", "sgd-bn"))


def contest_of(run: Run, figure: str, network: str, options: Contest, halve: float = 0.0) -> StudyResult:
    """One network, one contest."""
    task, optimisers = options.problem(run, network), options.optimisers
    out = options.hold(run, task, optimisers, options.size, options.plain, halve)
    final = {name: Estimate.of(out.final(name)) for name in optimisers}
    numbers = {f"final training loss, {NAMES[name]}": value for name, value in final.items()}
    speed = contest.timing(out, numbers)
    found = standing.compare(out, *JUDGED[figure], numbers)
    stand_in = "" if options.dataset == "cifar10" else f" Stand-in data: {options.dataset}, enlarged to 32x32."
    small = "" if options.width == 64 else f" Width {options.width} instead of 64, {options.n} images."
    said = [
        f"Training losses after {options.epochs:g} epochs: {', '.join(f'{NAMES[k]} {v}' for k, v in final.items())}.",
        contest.reached(out, "sgd-bn" if "sgd-bn" in optimisers else "sgd", numbers),
        speed,
        str(found),
        *standing.remarks(out),
    ]
    verdict = found.verdict if options.seeds > 1 else "not tested"
    if options.seeds < 2:
        said.append("One seed: no error bars, nothing tested.")
    return StudyResult(
        verdict,
        CLAIMS[figure],
        " ".join(filter(None, said)) + small + stand_in,
        numbers,
        contest.charts(out, "cross-entropy", f"{network}, {options.dataset}.{small}{stand_in}"),
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
    options: Contest = ON_VGG,
) -> StudyResult:
    """VGG-11 on CIFAR-10: loss against epochs and time for EKFAC, EKFAC-ra, KFAC, SGD with and without BN."""
    return contest_of(run, "4.5", "vgg11", options)


@study(
    "ekfac/fig4.6",
    paper="linearization",
    figure="4.6",
    claim=CLAIMS["4.6"],
    sizes={"smoke": SMOKE, "laptop": RESNET_LAPTOP, "paper": PAPER | {"epochs": 15.0}},
)
def fig4_6(
    run: Run,
    *,
    options: Contest = ON_RESNET,
) -> StudyResult:
    """ResNet-34 without normalisation on CIFAR-10: EKFAC-ra, KFAC, and SGD with batch normalisation."""
    return contest_of(run, "4.6", "resnet34", options)


@study(
    "ekfac/figA.4",
    paper="linearization",
    figure="A.4",
    claim=CLAIMS["A.4"],
    sizes={
        "smoke": SMOKE | {"halve": 1.0},
        "laptop": LAPTOP | {"halve": 2.0},
        "paper": PAPER | {"epochs": 60.0, "trial": 0.05, "seeds": 2},
    },
)
def figA_4(
    run: Run,
    *,
    network: Annotated[cifar.Network, "A.4 is vgg11, A.5 resnet34"] = "vgg11",
    halve: Annotated[float, "epochs between halvings of the learning rate"] = 20.0,
    options: Contest = HALVED,
) -> StudyResult:
    """As Fig. 4.5 with the learning rate halved every few epochs; with network=resnet34 as Fig. 4.6: Fig. A.5."""
    figure = "A.4" if network == "vgg11" else "A.5"
    return contest_of(run, figure, network, options, halve)
