"""The step of KFAC and EKFAC without a damping: natural directions, Adam's lengths, and a trust region around them.

Along the natural gradient d (with momentum m) of a layer the step is

    dW = -lr * stretch * m ||a|| / ||m||,    a: the step that Adam would take with lr = 1 (betas 0.9, 0.999)

so that a learning rate means what it means for Adam, whatever the scale of the loss and of the metric. How far a
direction can be trusted is measured by the next gradient, which is of other examples: where it still points down along
the last step, cos = -<g, dW> / (||g|| ||dW||) > 0, the step was too short. With c the running mean of cos,

    stretch *= exp(0.1 clip(5 c, -1, 1)),    three times as fast downwards, from 0.03 to 30, at first 0.3

one of two quantities that adapt. The other is the damping, which follows the curvature: it is `damping` (1) times the
mean scaling of the layer. Both were chosen by measurement (docs/howto/natural-gradient.md): a relative damping from 1
to 10 gives the same accuracies, 0.1 falls behind in the first epochs; without the stretch a deep auto-encoder is slower
than with Adam, with it faster. Levenberg-Marquardt's ratio needs the loss at the new parameters on the same examples,
which costs another forward pass, and torch optimisers do not see the loss.
"""

import math
from typing import Any

import torch
from torch import Tensor

FIRST, SHORTEST, LONGEST = 0.3, 0.03, 30.0  # stretches
GAIN, DOWN, EARLY = 0.1, 3.0, 2.0  # its rate, how much faster it shrinks, and by how much more in the first steps
SLOPE, MEMORY = 5.0, 0.5  # from cos to -1 .. 1, and the running mean
BETAS, EPS = (0.9, 0.999), 1e-8
State = dict[str, Any]


def fresh(p: Tensor) -> State:
    """The state of a parameter before its first step."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return {"step": 0, **{name: torch.zeros_like(p, dtype=dtype) for name in names}}


def adams(grads: list[Tensor], states: list[State]) -> list[Tensor]:
    """The steps of Adam with lr = 1, and its moments moved on."""
    means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_lerp_(means, grads, 1 - BETAS[0])
    torch._foreach_mul_(squares, BETAS[1])
    torch._foreach_addcmul_(squares, grads, grads, value=1 - BETAS[1])
    for state in states:
        state["step"] += 1
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [math.sqrt(1 - BETAS[1] ** s["step"]) for s in states])
    torch._foreach_add_(roots, EPS)
    steps = torch._foreach_div(means, roots)
    torch._foreach_div_(steps, [1 - BETAS[0] ** s["step"] for s in states])
    return list(steps)


def stretched(group: dict[str, Any], grads: list[Tensor], states: list[State]) -> Tensor:
    """The group's stretch after it has seen the gradients where the last step ended."""
    stretch, trust = (torch.as_tensor(group[name], device=grads[0].device) for name in ("stretch", "trust"))
    known = [(g, s["momentum_buffer"], s["ratio"]) for g, s in zip(grads, states) if "ratio" in s]
    if not known:
        return stretch
    seen, buffers = [g for g, _, _ in known], [m for _, m, _ in known]  # buffers and ratios are those of the last step
    ratios = torch.stack([r for _, _, r in known])
    down = torch.stack([torch.dot(g.flatten(), m.flatten()) for g, m in zip(seen, buffers)]) @ ratios
    step, slope = (norms(buffers) * ratios).norm(), norms(seen).norm()
    trust = MEMORY * trust + (1 - MEMORY) * torch.nan_to_num(down / (step * slope))
    rate = (SLOPE * trust).clamp(-1, 1)
    gain = GAIN * (1 + EARLY * math.exp(-states[0]["step"] / 20))
    stretch = (stretch * (gain * torch.where(rate < 0, DOWN * rate, rate)).exp()).clamp(SHORTEST, LONGEST)
    group["stretch"], group["trust"] = stretch, trust
    return stretch


def norms(tensors: list[Tensor]) -> Tensor:
    """Lengths [k] of k tensors, in one precision."""
    return torch.stack(torch._foreach_norm(tensors))


def take(
    parameters: list[Tensor],
    directions: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    layers: list[int],
) -> None:
    """One step of `parameters`, whose natural gradients are given.

    Those with the same number in `layers` share a length. Weight decay is apart from the gradient, as in AdamW.
    """
    for p, state in zip(parameters, states):
        if "exp_avg" not in state or "momentum_buffer" not in state:
            state |= fresh(p)
    means = [state["exp_avg"] for state in states]
    grads = [p.grad.to(m.dtype) for p, m in zip(parameters, means) if p.grad is not None]
    stretch, lr = stretched(group, grads, states), float(group["lr"])
    wanted, buffers = norms(adams(grads, states)), [state["momentum_buffer"] for state in states]
    torch._foreach_lerp_(buffers, [d.to(m.dtype) for d, m in zip(directions, buffers)], 1 - group["momentum"])
    number = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
    own = torch.tensor([number[layer] for layer in layers], device=wanted.device)
    a, m = (each.new_zeros(len(number)).index_add(0, own, each.square()) for each in (wanted, norms(buffers)))
    ratios = torch.where(m > 0, a / m, 0.0).sqrt()[own]
    for state, ratio in zip(states, ratios.unbind()):
        state["ratio"] = ratio
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_sub_(parameters, torch._foreach_mul(buffers, list((ratios * stretch * lr).unbind())))
