"""KFAC and EKFAC from their definitions, slowly and densely, example by example."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def seeded(make, dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


def mlp():
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    )


def conv():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 3, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(12, 3),
        )
    )


def mlp_data(n=7, dtype=torch.float64, seed=0):
    return torch.randn(n, 4, generator=rng(seed), dtype=dtype), torch.randint(3, (n,), generator=rng(seed + 1))


def conv_data(n=5):
    return torch.randn(n, 2, 6, 6, generator=rng(2), dtype=torch.float64), torch.randint(3, (n,), generator=rng(3))


def backward(net, x, y):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss


def per_example(net, x, y):
    """Gradients of the individual losses {name: [n, *shape]}."""
    rows = {name: [] for name, _ in net.named_parameters()}
    for i in range(len(x)):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        for name, g in zip(rows, torch.autograd.grad(loss, list(net.parameters()))):
            rows[name].append(g)
    return {name: torch.stack(g) for name, g in rows.items()}


def flows(net, x, y):
    """Per layer: inputs A [n, groups, d_in (+1), T] and gradients G [n, groups, d_out, T] of the individual losses."""
    net = deepcopy(net)
    for m in net.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False
    seen, handles = {}, []
    for name, m in net.named_modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            handles.append(
                m.register_forward_hook(lambda m, i, o, name=name: seen.update({name: (m, i[0].detach(), o)}))
            )
    loss = F.cross_entropy(net(x), y, reduction="sum")
    outs = torch.autograd.grad(loss, [o for _, _, o in seen.values()])
    result = {}
    for (name, (m, a, _)), g in zip(seen.items(), outs):
        n = len(a)
        if isinstance(m, nn.Linear):
            A, G = a.reshape(n, 1, -1, 1), g.reshape(n, 1, -1, 1)
        else:
            patches = F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride)
            A, G = patches.reshape(n, m.groups, -1, patches.shape[-1]), g.reshape(n, m.groups, -1, patches.shape[-1])
        if m.bias is not None:
            A = torch.cat([A, A.new_ones(n, A.shape[1], 1, A.shape[3])], 2)
        result[name] = (A, G)
    return result


def homogeneous(net, grads, layer):
    """Gradients {name: [..., *shape]} of a layer as V [..., groups, d_out, d_in (+1)]."""
    m = net.get_submodule(layer)
    groups = getattr(m, "groups", 1)
    W = grads[f"{layer}.weight"]
    lead = W.shape[: W.dim() - m.weight.dim()]
    V = W.reshape(*lead, groups, m.weight.shape[0] // groups, -1)
    if m.bias is None:
        return V
    return torch.cat([V, grads[f"{layer}.bias"].reshape(*lead, groups, -1, 1)], -1)


def factors(net, x, y):
    """{layer: (A [g, i, i] summed over positions, B [g, o, o] averaged over positions)}."""
    out = {}
    for layer, (A, G) in flows(net, x, y).items():
        n, _, _, T = A.shape
        out[layer] = (torch.einsum("ngit,ngjt->gij", A, A) / n, torch.einsum("ngot,ngpt->gop", G, G) / (n * T))
    return out


def dense_steps(net, x, y, kind, damping, mode="plain", basis_from=None):
    """{layer: direction V [g, o, i]} of (F + damping)^-1 grad with F assembled as a dense matrix per group."""
    rows = per_example(net, x, y)
    out = {}
    for layer, (A, B) in (basis_from or factors(net, x, y)).items():
        g = homogeneous(net, rows, layer)  # [n, groups, o, i]
        parts = []
        for k in range(g.shape[1]):
            flat = g[:, k].flatten(1)
            mean = flat.mean(0)
            a, U_A = torch.linalg.eigh(A[k])
            b, U_B = torch.linalg.eigh(B[k])
            a, b = a.clamp_min(0), b.clamp_min(0)
            Q = torch.kron(U_B, U_A)
            if kind == "ekfac":
                s = (flat @ Q).square().mean(0)
                extra = (
                    damping if mode == "plain" else (torch.kron(b + damping**0.5, a + damping**0.5) - torch.kron(b, a))
                )
                M = Q @ torch.diag(s + extra) @ Q.T
            elif mode == "exact":
                M = torch.kron(B[k], A[k]) + damping * torch.eye(len(mean), dtype=mean.dtype)
            else:
                pi = (A[k].trace() / len(A[k]) / (B[k].trace() / len(B[k]))).sqrt()
                I_A, I_B = torch.eye(len(A[k]), dtype=A.dtype), torch.eye(len(B[k]), dtype=A.dtype)
                M = torch.kron(B[k] + damping**0.5 / pi * I_B, A[k] + damping**0.5 * pi * I_A)
            parts.append(torch.linalg.solve(M, mean).reshape(g.shape[2:]))
        out[layer] = torch.stack(parts)
    return out


def moved(net, before, lr):
    """What a step subtracted, divided by lr, as gradients {name: tensor}."""
    return {name: (before[name] - p.detach()) / lr for name, p in net.named_parameters()}


def snapshot(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def error(a, b):
    return float(((a - b).norm() / b.norm()).detach())
