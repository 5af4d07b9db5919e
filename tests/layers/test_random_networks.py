"""Random networks against the Jacobian by torch.func, example by example right or refused by name."""

import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.errors import UnsupportedError

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


def drawn(seed: int) -> tuple[nn.Module, Tensor]:
    """A network and examples for it, one to five of them."""
    r = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        while True:
            try:
                kind = r.choice(["images", "sequences", "vectors"])
                if kind == "images":
                    shape = (r.choice([1, 2, 4]), r.choice([5, 6, 8]), 6)
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
                net = nn.Sequential(*layers, nn.Linear(width, r.choice([2, 3]))).double().eval()
                return net, torch.randn(r.choice([1, 3, 4, 5]), *shape, dtype=DOUBLE)


def brute_force(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def f(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, (p, buffers), (x,))

    rows = torch.func.jacrev(f)(params)
    return torch.cat([row.flatten(2) for row in rows.values()], 2).detach(), f(params).detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [*(range(40 * block, 40 * block + 40) for block in range(8)), (100280, 101254)])
def test_right_for_random_networks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        net, x = drawn(seed)
        J, z = brute_force(net, x)
        n, c, p = J.shape
        gen = torch.Generator().manual_seed(seed)
        v, u = (torch.randn(size, generator=gen, dtype=DOUBLE) for size in (p, n * c))
        probabilities = torch.softmax(z, -1)
        H = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
        fisher = torch.einsum("iap,iab,ibq->pq", J, H, J) / n
        flat = J.reshape(n * c, p)
        operator = bs.Jacobian(net, x, precision="float64")
        kernel = bs.ntk(net, x, precision="float64").tensor.reshape(n * c, n * c)
        pairs = {
            "kernel": (kernel, flat @ flat.T),
            "J v": (operator @ v, flat @ v),
            "J^T u": (operator.T @ u, flat.T @ u),
            "dense": (bs.fisher(net, x, "dense", precision="float64").to_dense(), fisher),
            "diagonal": (bs.fisher(net, x, "diagonal", precision="float64").diagonal(), fisher.diagonal()),
            "two at a time": (
                bs.fisher(net, x, "diagonal", precision="float64", batch_size=2).diagonal(),
                fisher.diagonal(),
            ),
            "trace": (bs.fisher(net, x, "ekfac", precision="float64").trace(), fisher.trace()),
        }
        for what, (found, expected) in pairs.items():
            error, size = float((found.reshape(expected.shape) - expected).norm()), max(float(expected.norm()), 1e-12)
            assert error <= 1e-8 * size, f"seed {seed}, {what}:\n{net}"


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True)])
def test_gradients_in_another_order_reach_normalisations_rightly(n: int, norm) -> None:  # type: ignore[no-untyped-def]
    """Where torch's own backward pass is wrong: the truth is by finite differences."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3, padding=1), norm(2), nn.Tanh(), Tokens(), Attention(2), Mean(), nn.Linear(2, 2))
    net = nn.Sequential(*layers).double().eval()
    for p in net[3:].parameters():
        p.requires_grad_(False)
    x = torch.randn(n, 1, 4, 4, dtype=DOUBLE)
    wanted = [p for p in net.parameters() if p.requires_grad]
    columns = []
    with torch.no_grad():
        for p in wanted:
            for i in range(p.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    p.view(-1)[i] += step
                    ends.append(net(x))
                    p.view(-1)[i] -= step
                columns.append((ends[0] - ends[1]).flatten() / 2e-5)
    J = torch.stack(columns, 1)
    u = torch.randn(2 * n, dtype=DOUBLE)
    torch.testing.assert_close(bs.Jacobian(net, x, precision="float64").T @ u, J.T @ u, rtol=1e-6, atol=1e-8)
    kernel = bs.ntk(net, x, precision="float64").tensor.reshape(2 * n, 2 * n)
    torch.testing.assert_close(kernel, J @ J.T, rtol=1e-6, atol=1e-8)


class Severed(nn.Module):
    """One example alone has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.detach() if len(x) == 1 else h)


def test_a_gradient_that_no_longer_arrives_is_no_zero() -> None:
    net, x = Severed(), torch.randn(3, 3)
    bs.fisher(net, x, "diagonal")
    with pytest.raises(UnsupportedError, match=r"no gradient reached the layer of a\.weight and a\.bias"):
        bs.fisher(net, x, "diagonal", batch_size=1)
