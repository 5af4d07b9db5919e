"""The plain rules: momentum for preconditioned and plain gradients alike, and Adam for what no factor covers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sgd(p: Tensor, d: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """As torch.optim.SGD: d + weight_decay p, momentum, a step of -lr."""
    if group["weight_decay"]:
        d = d.add(p, alpha=group["weight_decay"])
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = d.clone()
        else:
            buffer.mul_(group["momentum"]).add_(d)
        d = buffer
    p.add_(d, alpha=-float(group["lr"]))


def adam(p: Tensor, d: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """As torch.optim.Adam with betas (0.9, 0.999) and eps 1e-8."""
    if group["weight_decay"]:
        d = d.add(p, alpha=group["weight_decay"])
    if not state:
        state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    state["step"] += 1
    t = float(state["step"])
    state["exp_avg"].lerp_(d, 0.1)
    state["exp_avg_sq"].mul_(0.999).addcmul_(d, d, value=0.001)
    root = (state["exp_avg_sq"].sqrt() / (1 - 0.999**t) ** 0.5).add_(1e-8)
    p.addcdiv_(state["exp_avg"], root, value=-float(group["lr"]) / (1 - 0.9**t))


RULES = {"sgd": sgd, "adam": adam}
