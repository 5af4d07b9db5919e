"""Networks of many kinds, drawn at random: what a user might write, small enough for brute force."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DOUBLE = torch.float64


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(1 + 0.5 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Shift(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


class Einsum(nn.Module):
    def __init__(self, d: int, out: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(out, d) / d**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,n...i->n...o", self.w, x)


class Product(Einsum):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T


class Residual(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.tanh(self.f(x)))


class TimeMajor(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(x.transpose(0, 1)).transpose(0, 1)


class Folded(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(x.reshape(-1, x.shape[-1])).view(*x.shape[:2], -1)


class Tied(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class TiedTransposed(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a = nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.a(x)), self.a.weight.T)


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.m = nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x, x, x, need_weights=False)[0]


class Gate(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.sigmoid(self.g(x))


class Bilinear(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.b = nn.Bilinear(d, d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x, torch.tanh(x))


class Masked(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.c = nn.Conv2d(c, c, 3, padding=1)
        self.register_buffer("mask", (torch.rand_like(self.c.weight) > 0.4).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.c.weight * self.mask, self.c.bias, padding=1)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def activation(r: random.Random) -> nn.Module:
    kinds = (nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.Sigmoid, nn.PReLU, nn.Identity, lambda: nn.ELU(inplace=True))
    return r.choice(kinds)()


def convolution(r: random.Random, c: int) -> nn.Module:
    out, k = r.choice([2, 4, 6]), r.choice([1, 2, 3])
    groups = r.choice([g for g in (1, 2) if c % g == 0])
    stride, dilation = r.choice([1, 1, 2]), r.choice([1, 1, 2]) if k > 1 else 1
    padding = "same" if stride == 1 and r.random() < 0.15 else r.choice([0, 1])
    mode = r.choice(["zeros", "circular", "reflect", "replicate"])
    return nn.Conv2d(c, out, k, stride, padding, dilation, groups, bias=r.random() < 0.7, padding_mode=mode)


def normalised(c: int) -> nn.Module:
    norm = nn.BatchNorm2d(c)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def image_layer(r: random.Random, c: int, image: list[int]) -> nn.Module:
    kinds = (
        lambda: convolution(r, c),
        lambda: convolution(r, c),
        lambda: nn.Conv2d(c, c, 3, padding=1, groups=c),
        lambda: nn.ConvTranspose2d(c, r.choice([2, 3]), r.choice([2, 3]), r.choice([1, 2])),
        lambda: nn.GroupNorm(r.choice([g for g in (1, 2) if c % g == 0]), c),
        lambda: nn.InstanceNorm2d(c, affine=True),
        lambda: normalised(c),
        lambda: Scale(c, 1, 1),
        lambda: Shift(c, *image),
        lambda: r.choice([nn.AvgPool2d(2, ceil_mode=True), nn.MaxPool2d(2, ceil_mode=True)]),
        lambda: nn.PReLU(c),
        lambda: Residual(nn.Conv2d(c, c, 3, padding=1)),
        lambda: Twice(nn.Conv2d(c, c, 3, padding=1)),
        lambda: Masked(c),
        lambda: nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear"])),
        lambda: nn.LayerNorm(image),
    )
    return r.choice(kinds)()


def on_images(r: random.Random, shape: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(r.randint(1, 4)):
        c, *image = nn.Sequential(*layers).double().eval()(torch.zeros(2, *shape, dtype=DOUBLE)).shape[1:]
        layers += [image_layer(r, c, image), activation(r)]
    if r.random() < 0.5:
        c = nn.Sequential(*layers).double().eval()(torch.zeros(2, *shape, dtype=DOUBLE)).shape[1]
        layers += [Tokens(), *([Attention(c)] if c % 2 == 0 else []), r.choice([Mean, nn.Flatten])()]
    return [*layers, nn.Flatten()]


def on_sequences(r: random.Random, d: int, t: int) -> list[nn.Module]:
    kinds = (
        lambda: nn.Linear(d, d),
        lambda: Attention(d),
        lambda: nn.LayerNorm(d),
        lambda: Folded(nn.Linear(d, d)),
        lambda: TimeMajor(nn.Linear(d, d)),
        lambda: Einsum(d, d),
        lambda: Product(d, d),
        lambda: nn.Conv1d(t, t, 3, padding=1),
        lambda: Residual(nn.Linear(d, d)),
        lambda: nn.TransformerEncoderLayer(d, 2, 5, dropout=0.0, batch_first=True, norm_first=r.random() < 0.5),
    )
    return [layer for _ in range(r.randint(1, 3)) for layer in (r.choice(kinds)(), activation(r))] + [nn.Flatten()]


def on_vectors(r: random.Random, d: int) -> list[nn.Module]:
    kinds = (
        lambda: nn.Linear(d, d, bias=r.random() < 0.7),
        lambda: Tied(d),
        lambda: TiedTransposed(d),
        lambda: Scale(d),
        lambda: Einsum(d, d),
        lambda: Product(d, d),
        lambda: Gate(d),
        lambda: Bilinear(d),
        lambda: nn.BatchNorm1d(d),
        lambda: nn.LayerNorm(d),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(d, d)),
        lambda: Twice(nn.Linear(d, d)),
        lambda: Residual(nn.Linear(d, d)),
    )
    return [layer for _ in range(r.randint(1, 4)) for layer in (r.choice(kinds)(), activation(r))]


def network(r: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """A network, and the shape of one example for it: structure by `r`, weights by torch's global state."""
    while True:
        try:
            kind = r.choice(["images", "sequences", "vectors"])
            if kind == "images":
                shape: tuple[int, ...] = (r.choice([1, 2, 4]), r.choice([5, 6, 8]), 6)
                layers = on_images(r, shape)
            elif kind == "sequences":
                shape = (r.choice([2, 3]), r.choice([2, 4]))
                layers = on_sequences(r, shape[1], shape[0])
            else:
                shape = (r.choice([3, 4]),)
                layers = on_vectors(r, shape[0])
            width = nn.Sequential(*layers).double().eval()(torch.zeros(2, *shape, dtype=DOUBLE)).shape[1]
        except (RuntimeError, ValueError):  # an image that became too small
            continue
        if width <= 200:
            return nn.Sequential(*layers, nn.Linear(width, r.choice([2, 3]))).double().eval(), shape


def drawn(seed: int) -> tuple[nn.Module, Tensor]:
    """A network and examples for it, one to five of them."""
    r = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net, shape = network(r)
        return net, torch.randn(r.choice([1, 3, 4, 5]), *shape, dtype=DOUBLE)
