"""Fig. B.1: parameters moved along the top right singular vectors of the Jacobian, and along random directions.

J holds the gradients of all outputs on a sample; its top right singular vectors come from the small Gram matrix,
v_j = J^T u_j / sigma_j. The trained network moves by `step` times its own norm, and the change of its outputs on other
images is measured. To first order the change on the sample itself is step sigma_j along v_j, and step ||J|| / sqrt(p)
along a random direction.

A training that diverges, or that stays where it began, has no direction worth moving along (VGG-11 of full width
diverges with rates that suit narrow ones): it is tried again with a third of the learning rate, `TRIALS` times in all.
"""

import functools
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from biascope import InputError, Jacobian, ntk
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, mean_error
from biascope.support import derive, generator, progress
from biascope_papers.ekfac import cifar, contest
from biascope_papers.ekfac.common import Row, require
from biascope_papers.ekfac.contest import Problem, Setting

TRIALS = 4
LEARNED = 0.9  # of the loss of a constant prediction, below which a training must end


@study(
    "ekfac/figB.1",
    sizes={
        "smoke": {
            "dataset": "digits",
            "n": 200,
            "width": 2,
            "epochs": 10.0,
            "size": 20,
            "sample": 10,
            "directions": 5,
            "seeds": 1,
        },
        "laptop": {"n": 2000, "width": 8, "epochs": 5.0, "sample": 30, "directions": 20},
        "paper": {"n": 50000, "width": 64, "epochs": 10.0},
    },
)
def fig_b_1(
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
    outputs = 10 * sample
    require(outputs >= directions, f"directions={directions}: J has only {outputs} rows; take a larger sample")

    @functools.cache
    def data() -> Problem:
        return cifar.problem(run, "vgg11", dataset, n, width, 0.0)

    def measured(seed: int) -> dict[str, Tensor]:
        task = data()
        steps = max(1, round(epochs * len(task.x) / size))
        net, rate, loss = trained(run, task, lr, momentum, size, steps, seed)
        order = torch.randperm(len(task.x), generator=generator(run.seed, "sample", seed)).to(run.device)
        inside, outside = task.x[order[:sample]], task.x[order[sample : sample + tests]]
        V, sigma = singular_vectors(net, inside, directions)
        R = torch.randn(V.shape[0], directions, generator=generator(run.seed, "random", seed)).to(V)
        eps = step * float(torch.cat([w.detach().flatten() for w in net.parameters()]).norm())
        expected = eps * sigma / outputs**0.5
        along_random = change(net, outside, eps * R / R.norm(dim=0))
        return {"top": change(net, outside, eps * V), "random": along_random, "expected": expected,
                "ratio": change(net, inside, eps * V) / expected,
                "rate": torch.tensor(rate).double(), "loss": torch.tensor(loss / task.plateau).double()}  # fmt: skip

    rows: list[Row] = run.cached_each("seed", progress(range(seeds), "trainings"), measured)
    ratios = [float(row["top"].median() / row["random"].median()) for row in rows]
    ratio, first = Estimate.of(ratios), Estimate.of([float(row["ratio"].median()) for row in rows])
    ranks = range(1, directions + 1)
    deviates = "" if dataset == "cifar10" and width == 64 else f" Width {width}, {n} images of {dataset}."
    learned = [{key: float(row[key]) for key in ("rate", "loss")} for row in rows if "rate" in row]
    extra = {} if len(learned) < len(rows) else {
        "smallest learning rate": Estimate(min(each["rate"] for each in learned)),
        "worst final loss / plateau": Estimate(max(each["loss"] for each in learned)),
    }  # fmt: skip
    return StudyResult(
        measured=f"The median change along the top {directions} singular vectors is {ratio} times that along random "
        f"directions; on the sample the change is {first} of what first order predicts.{deviates}",
        numbers={
            "change along top / along random directions (medians)": ratio,
            "smallest change along top / along random directions": Estimate(min(ratios)),
            "change on the sample / first order": first,
            **extra,
        },
        figures=(
            Chart("change", "Change of the outputs on other images", "direction",
                  "root mean square change of the outputs",
                  (curve("top singular vectors", ranks, [row["top"] for row in rows], "points"),
                   curve("random directions", ranks, [row["random"] for row in rows], "points"),
                   Series.of("top, first order, on the sample", ranks,
                             mean_error([row["expected"] for row in rows])[0], style="dashed")),
                  alt="Changes along the top singular vectors lie far above those along random directions.",
                  caption=f"VGG-11 of width {width} on {dataset} after {epochs:g} epochs; moved by {step:g} of its "
                  "norm.", log_y=True),
        ),
    )  # fmt: skip


def trained(
    run: Run, task: Problem, lr: float, momentum: float, size: int, steps: int, seed: int
) -> tuple[nn.Module, float, float]:
    """A network trained by SGD, in evaluation mode, with the learning rate that it took and its last loss."""
    rates = [lr / 3**trial for trial in range(TRIALS)]
    for rate in rates:
        net = task.build(derive(run.seed, "init", seed), False).to(run.device)
        sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
        contest.run_steps(run, task, net, sgd, Setting("sgd", rate, momentum, size, steps, 1, steps), seed)
        loss = contest.evaluate(task, net)
        if loss < LEARNED * task.plateau:
            return net.eval(), rate, loss
        run.log(seed=seed, rate=rate, loss=loss, learned=False)
    raise InputError(
        f"VGG-11 did not learn with any learning rate of {', '.join(f'{rate:.3g}' for rate in rates)}: its loss ends "
        f"at {loss:.3g}, a constant prediction has {task.plateau:.3g}; give another lr, or more epochs"
    )


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
    out = []
    for move in moves.T:
        parts = torch.split(move, [w.numel() for w in net.parameters()])
        params = {name: w + d.view_as(w) for (name, w), d in zip(net.named_parameters(), parts)}
        out.append((functional_call(net, params, (x,)) - before).square().mean().sqrt())
    return torch.stack(out)
