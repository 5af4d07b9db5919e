"""Small networks and helpers of this room's tests."""

from typing import Any

import torch
from torch import Tensor, nn


def double(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: double(v) for k, v in x.items()}
    return x.double() if x.is_floating_point() else x


def call(model: nn.Module, x: Any) -> Tensor:
    out: Tensor = model(**x) if isinstance(x, dict) else model(x)
    return out


def displace(model: nn.Module, size: float = 0.3, seed: int = 1) -> None:
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=gen, dtype=p.dtype))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def conv_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 3)
    )
    for t in (net[1].running_mean, net[1].running_var):
        t.data.uniform_(0.5, 1.5)
    return net.double().eval()


def images(n: int = 5) -> Tensor:
    return torch.randn(n, 1, 8, 8, dtype=torch.float64)


def mlp(act: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), act or nn.Tanh(), nn.Linear(16, 2)).double()
