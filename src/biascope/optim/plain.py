"""The plain rules, for all parameters of a group at once: momentum for preconditioned and plain gradients alike, and
Adam for what no factor covers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def sgd(parameters: list[Tensor], d: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """As torch.optim.SGD: d + weight_decay p, momentum, a step of -lr."""
    if group["weight_decay"]:
        d = list(torch._foreach_add(d, parameters, alpha=group["weight_decay"]))
    if group["momentum"]:
        moving = [(state["momentum_buffer"], x) for state, x in zip(states, d) if "momentum_buffer" in state]
        if moving:
            buffers, new = map(list, zip(*moving))
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, new)
        for state, x in zip(states, d):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = x.clone()
        d = [state["momentum_buffer"] for state in states]
    torch._foreach_add_(parameters, d, alpha=-float(group["lr"]))


def adam(parameters: list[Tensor], d: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """As torch.optim.Adam with betas (0.9, 0.999) and eps 1e-8."""
    if group["weight_decay"]:
        d = list(torch._foreach_add(d, parameters, alpha=group["weight_decay"]))
    for p, state in zip(parameters, states):
        if "step" not in state:  # a covered parameter may have a momentum there
            state |= {
                "step": torch.tensor(0.0, device="cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        state["step"] += 1
    times = [float(state["step"]) for state in states]
    means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    torch._foreach_lerp_(means, d, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, d, d, value=0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - 0.999**t) ** 0.5 for t in times])
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, means, roots, [-float(group["lr"]) / (1 - 0.9**t) for t in times])


RULES = {"sgd": sgd, "adam": adam}
