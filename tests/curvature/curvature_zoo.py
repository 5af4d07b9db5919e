"""Small networks in float64 and the slow, obvious Fisher matrix they are compared with."""

import torch
from torch import Tensor, nn


class Tokens(nn.Module):
    """[n, T, d] -> [n, 3]: a shared linear layer over positions."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)).mean(1))


class Words(nn.Module):
    """Token indices -> [n, 3], with a padding token."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)).sum(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.mix(x, x, x, need_weights=False)[0]).mean(1))


class Reused(nn.Module):
    """One linear layer used twice."""

    def __init__(self):
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Tied(nn.Module):
    """Embedding and output layer share a weight; logits [n, T, words]."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.inner(self.words(x))) @ self.words.weight.T


class Bare(nn.Module):
    """Parameters that belong to no layer, one of them used in a way no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale, self.bend, self.head = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(x * self.scale) * torch.exp(-torch.outer(x[:, 0], self.bend)))


class InputMajor(nn.Module):
    """Weights stored [d_in, d_out], as GPT-2 does."""

    def __init__(self):
        super().__init__()
        self.w, self.b, self.head = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.addmm(self.b, x, self.w)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def conv(d: int = 2) -> nn.Module:
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[d]
    return nn.Sequential(
        layer(4, 4, 3, groups=2, padding=1, stride=2),
        nn.Tanh(),
        layer(4, 2, 2, bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LayerNorm(36),
        nn.Linear(36, 3),
    )


def upsampling() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


CASES = {
    "mlp": (mlp, lambda g: torch.randn(6, 4, generator=g)),
    "conv1d": (lambda: conv(1), lambda g: torch.randn(5, 4, 7, generator=g)),
    "conv2d": (conv, lambda g: torch.randn(5, 4, 6, 6, generator=g)),
    "conv3d": (lambda: conv(3), lambda g: torch.randn(4, 4, 4, 4, 4, generator=g)),
    "norms": (norms, lambda g: torch.randn(5, 2, 5, 5, generator=g)),
    "upsampling": (upsampling, lambda g: torch.randn(5, 2, 2, 2, generator=g)),
    "tokens": (Tokens, lambda g: torch.randn(6, 3, 4, generator=g)),
    "long_tokens": (Tokens, lambda g: torch.randn(4, 24, 4, generator=g)),
    "words": (Words, lambda g: torch.randint(0, 7, (6, 4), generator=g)),
    "attention": (Attention, lambda g: torch.randn(4, 3, 4, generator=g)),
    "reused": (Reused, lambda g: torch.randn(6, 4, generator=g)),
    "tied": (Tied, lambda g: torch.randint(0, 5, (4, 2), generator=g)),
    "bare": (Bare, lambda g: torch.randn(6, 4, generator=g)),
    "input_major": (InputMajor, lambda g: torch.randn(6, 4, generator=g)),
}


def case(name: str) -> tuple[nn.Module, Tensor]:
    """A network (float64, eval mode, random normalisation statistics) and examples."""
    make, data = CASES[name]
    generator = torch.Generator().manual_seed(1)
    x = data(generator)
    x = x.double() if x.is_floating_point() else x
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double().eval()
        with torch.no_grad():
            net(x)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2.0)
                m.weight.data.normal_()
    return net, x


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """[n, c, p], one autograd call per example and output."""
    params = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for i in range(len(x)):
        out = net(x[i : i + 1]).reshape(-1)
        rows.append(
            torch.stack(
                [
                    torch.cat(
                        [
                            g.reshape(-1)
                            for g in torch.autograd.grad(
                                o, params, retain_graph=True, allow_unused=True, materialize_grads=True
                            )
                        ]
                    )
                    for o in out
                ]
            )
        )
    return torch.stack(rows)


def brute_fisher(net: nn.Module, x: Tensor, likelihood: str = "categorical", classes_last: bool = False) -> Tensor:
    """(1/n) sum_i J_i^T H_i J_i [p, p], H_i by enumerating the labels (categorical) or from its definition."""
    J = jacobian(net, x)
    with torch.no_grad():
        z = net(x)
    n, F = len(x), 0
    for i in range(n):
        if likelihood == "gaussian":
            H = torch.eye(J.shape[1], dtype=J.dtype)
        elif likelihood == "bernoulli":
            p = torch.sigmoid(z[i].reshape(-1))
            H = torch.diag(p * (1 - p))
        else:
            zi = z[i] if classes_last else z[i].movedim(0, -1)  # [*positions, c]
            index = torch.arange(z[i].numel()).reshape(z[i].shape)
            index = (index if classes_last else index.movedim(0, -1)).reshape(-1, zi.shape[-1])
            H = torch.zeros(J.shape[1], J.shape[1], dtype=J.dtype)
            for at, logits in zip(index, zi.reshape(-1, zi.shape[-1])):
                p = torch.softmax(logits, 0)
                for y in range(len(p)):
                    score = torch.eye(len(p), dtype=p.dtype)[y] - p
                    H[at[:, None], at] += p[y] * torch.outer(score, score)
        F = F + J[i].T @ H @ J[i]
    return F / n


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
