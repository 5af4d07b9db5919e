"""Small networks, batches, and the slow obvious float64 versions of what probes compute."""

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def mlp(*widths: int, act: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([act()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers).double()


def moved(net: nn.Module, size: float = 0.3, seed: int = 1) -> nn.Module:
    other = copy.deepcopy(net)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn(p.shape, generator=gen, dtype=torch.float64))
    return other


def batch(n: int = 7, d: int = 3, c: int = 2, seed: int = 2) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=gen, dtype=torch.float64)
    return x, torch.arange(n) % c


def jacobian_rows(net: nn.Module, x: Tensor, prefix: str = "") -> Tensor:
    """J [n * c, p], examples major, parameters whose name starts with `prefix`."""
    params = {k: p.detach() for k, p in net.named_parameters()}
    J = jacrev(lambda p: functional_call(net, p, (x,)))(params)
    rows = [J[k].reshape(-1, p.numel()) for k, p in params.items() if k.startswith(prefix)]
    return torch.cat(rows, 1).detach()


def centre_rows(J: Tensor, n: int) -> Tensor:
    """Features [n * c, p] minus the mean over examples, for each output."""
    F = J.reshape(n, -1, J.shape[1])
    return (F - F.mean(0)).reshape(J.shape)


def cosine(A: Tensor, B: Tensor) -> float:
    return float((A * B).sum() / (A.norm() * B.norm()))
