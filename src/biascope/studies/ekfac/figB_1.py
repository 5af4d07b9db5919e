"""Fig. B.1: parameters moved along the top right singular vectors of the Jacobian, and along random directions.

J holds the gradients of all outputs on a sample; its top right singular vectors come from the small Gram matrix,
v_j = J^T u_j / sigma_j. The trained network moves by `step` times its own norm, and the change of its outputs on other
images is measured. To first order the change on the sample itself is step sigma_j along v_j, and step ||J|| / sqrt(p)
along a random direction. The rule, fixed beforehand: the claim holds if from every seed the median change along the top
directions is at least ten times the median along random ones. One seed tests nothing (it had been enough at first).
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from biascope.errors import InputError
from biascope.jacobian import Jacobian
from biascope.kernels import ntk
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.ekfac import cifar, contest
from biascope.studies.ekfac.contest import Problem, Setting
from biascope.studies.estimates import curve, decide, mean_error
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "Of a trained network's parameter directions only the top singular vectors of the Jacobian change the function."


@study(
    "ekfac/figB.1",
    paper="linearization",
    figure="B.1",
    claim=CLAIM,
    sizes={
        "smoke": {"dataset": "digits", "n": 200, "width": 2, "epochs": 2.0, "sample": 10, "directions": 5, "seeds": 1},
        "laptop": {"n": 2000, "width": 8, "epochs": 5.0, "sample": 30, "directions": 20},
        "paper": {"n": 50000, "width": 64, "epochs": 10.0},
    },
)
def figB_1(
    run: Run,
    *,
    dataset: Annotated[Literal["digits", "cifar10"], "images to classify"] = "cifar10",
    n: Annotated[int, "training images"] = 5000,
    width: Annotated[int, "channels of VGG-11's first stage; 64 in the paper"] = 16,
    epochs: Annotated[float, "epochs of training by SGD"] = 10.0,
    lr: Annotated[float, "learning rate (not in the paper)"] = 0.03,
    momentum: Annotated[float, "momentum (not in the paper)"] = 0.9,
    size: Annotated[int, "examples per batch"] = 100,
    sample: Annotated[int, "images on which J is taken"] = 100,
    tests: Annotated[int, "other images on which the function's change is measured"] = 200,
    directions: Annotated[int, "top singular vectors, and as many random directions"] = 50,
    step: Annotated[float, "length of the move, relative to the norm of the parameters (not in the paper)"] = 1e-3,
    seeds: Annotated[int, "trainings"] = 3,
) -> StudyResult:
    """Change of the function along top singular vectors of J and along random directions."""
    if sample * 10 < directions:
        raise InputError(f"directions={directions}: J has only {sample * 10} rows; take a larger sample")
    task = cifar.problem(run, "vgg11", dataset, n, width, 0.0)
    steps = max(1, round(epochs * len(task.x) / size))
    setting = Setting("sgd", lr, momentum, size, steps, 1, steps)

    def measured(seed: int) -> dict[str, Value]:
        return _seed(run, task, setting, seed, sample, tests, directions, step)

    rows = run.cached_each("seed", progress(range(seeds), "trainings"), measured)
    each = {key: [row[key] for row in rows] for key in ("top", "random", "expected")}
    ranks = range(1, directions + 1)
    ratios = [float(torch.as_tensor(r["top"]).median() / torch.as_tensor(r["random"]).median()) for r in rows]
    first = [float(torch.as_tensor(r["ratio"]).median()) for r in rows]
    ratio = Estimate.of(ratios)
    chart = Chart(
        "change",
        "Change of the outputs on other images",
        "direction",
        "root mean square change of the outputs",
        (
            curve("top singular vectors", ranks, each["top"], "points"),
            curve("random directions", ranks, each["random"], "points"),
            Series.of("top, first order, on the sample", ranks, mean_error(each["expected"])[0], style="dashed"),
        ),
        alt="Changes along the top singular vectors lie far above those along random directions.",
        caption=f"VGG-11 of width {width} on {dataset} after {epochs:g} epochs; moved by {step:g} of its norm.",
        log_y=True,
    )
    deviates = "" if dataset == "cifar10" and width == 64 else f" Width {width}, {n} images of {dataset}."
    return StudyResult(
        decide(min(ratios) >= 10, [ratio]),
        CLAIM,
        f"The median change along the top {directions} singular vectors is {ratio} times that along random directions; "
        f"on the sample the change is {Estimate.of(first)} of what first order predicts." + deviates,
        {
            "change along top / along random directions (medians)": ratio,
            "change on the sample / first order": Estimate.of(first),
        },
        (chart,),
    )


def _seed(
    run: Run, task: Problem, setting: Setting, seed: int, sample: int, tests: int, directions: int, step: float
) -> dict[str, Value]:
    net = trained(run, task, setting, seed)
    chosen = torch.randperm(len(task.x), generator=generator(run.seed, "sample", seed))[: sample + tests].to(run.device)
    inside, outside = task.x[chosen[:sample]], task.x[chosen[sample:]]
    V, sigma = singular_vectors(net, inside, directions)
    p = V.shape[0]
    R = torch.randn(p, directions, generator=generator(run.seed, "random", seed)).to(V)
    eps = step * float(torch.cat([w.detach().flatten() for w in net.parameters()]).norm())
    top, on_sample = (change(net, x, eps * V) for x in (outside, inside))
    return {
        "top": top,
        "random": change(net, outside, eps * R / R.norm(dim=0)),
        "expected": eps * sigma / (sample * 10) ** 0.5,
        "ratio": on_sample / (eps * sigma / (sample * 10) ** 0.5),
    }


def trained(run: Run, task: Problem, setting: Setting, seed: int) -> nn.Module:
    """VGG-11 after training by SGD."""
    net = task.build(derive(run.seed, "init", seed), False).to(run.device)
    sgd = torch.optim.SGD(net.parameters(), lr=setting.lr, momentum=setting.second)
    contest.run_steps(run, task, net, sgd, setting, seed)
    return net.eval()


def singular_vectors(net: nn.Module, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top k right singular vectors [p, k] and singular values [k] of J on x, through the Gram matrix."""
    K = ntk(net, x).tensor.double()
    n, c = K.shape[:2]
    values, U = torch.linalg.eigh(K.reshape(n * c, n * c))
    values, U = values.flip(0)[:k].clamp_min(0.0).sqrt(), U.flip(1)[:, :k]
    J = Jacobian(net, x)
    columns = [J.T @ u.reshape(n, c).to(x.dtype) for u in U.T]
    V = torch.stack([F.normalize(torch.as_tensor(v), dim=0) for v in columns], 1)
    return V, values.to(x.dtype)


@torch.no_grad()
def change(net: nn.Module, x: Tensor, moves: Tensor) -> Tensor:
    """Root mean square change of the outputs on x for each column of moves [p, k]: [k]."""
    before = net(x)
    names = [name for name, _ in net.named_parameters()]
    out = []
    for move in moves.T:
        parts = torch.split(move, [w.numel() for w in net.parameters()])
        params = {name: w + d.view_as(w) for name, w, d in zip(names, net.parameters(), parts)}
        out.append((functional_call(net, params, (x,)) - before).square().mean().sqrt())
    return torch.stack(out)
