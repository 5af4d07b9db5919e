"""Sec. 6.5: what a linearised vision transformer costs beside the plain one; its weights do not matter."""

import time
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import linearize, nets
from biascope.studies import Estimate, Run, StudyResult, study
from biascope.support import derive, generator

CLIP = {"patch": 32, "width": 768, "mlp": 3072, "depth": 12}  # ViT-B/32


@study("editing/costs", sizes={"smoke": {"side": 32, "batch": 2, "rounds": 3}, "laptop": {"batch": 2}, "paper": {}})
def costs(
    run: Run,
    *,
    side: Annotated[int, "of the images: 224 for CLIP's ViT-B/32, 32 for a small one"] = 224,
    batch: Annotated[int, "images at a time"] = 128,
    rounds: Annotated[int, "of measurements, plain and linearised in turn"] = 10,
) -> StudyResult:
    """Time and memory of a linearised vision transformer over those of the plain one."""
    shape: dict[str, Any] = {"in_channels": 3, "outputs": 10, "image_size": side} | (CLIP if side == 224 else {})
    plain = nets.build("vit", seed=0, **shape).eval().to(run.device)
    pair = plain, linearize(plain)
    with torch.no_grad():  # away from where both are equal
        for p in pair[1].parameters():
            p.mul_(1.001)
    x = torch.randn(batch, 3, side, side, generator=generator(derive(run.seed, "x"))).to(run.device)
    found = [[[measured(net, x, learn) for net in pair] for learn in (False, True)] for _ in range(rounds + 1)]
    rows = torch.tensor(found)[1:]  # the first round warms up; [rounds, learn, net, what]
    (outputs, gradients), (_, held) = (rows[:, :, 1] / rows[:, :, 0]).permute(2, 1, 0)
    numbers = {
        "time of outputs, linearised over plain": Estimate.of(outputs),
        "time of gradients, linearised over plain": Estimate.of(gradients),
    }
    if x.is_cuda:
        numbers["kept for the backward pass, linearised over plain"] = Estimate.of(held)
    text = "; ".join(f"{name} {value}" for name, value in numbers.items())
    return StudyResult(measured=f"{text[0].upper()}{text[1:]}. {batch} images on {run.device}.", numbers=numbers)


def measured(net: nn.Module, x: Tensor, learn: bool) -> tuple[float, float]:
    """Seconds of one batch, on a CPU of its own process alone; and bytes left on a GPU by the forward pass."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    began, before = clock(), torch.cuda.memory_allocated() if x.is_cuda else 0
    with torch.set_grad_enabled(learn):
        out = net(x)
    left = torch.cuda.memory_allocated() - before if x.is_cuda else 0
    if learn:
        torch.autograd.grad(out.square().sum(), [p for p in net.parameters() if p.requires_grad])
    if x.is_cuda:
        torch.cuda.synchronize()
    return clock() - began, float(left)
