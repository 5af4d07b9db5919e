"""Networks put together at random by hypothesis, against brute-force autograd in float64."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import biascope as bs
from zoo import brute_force

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class Net(nn.Module):
    """Layers applied in turn; some are applied again at the end, some inside a residual sum."""

    def __init__(self, layers: list[nn.Module], again: list[int], head: nn.Module) -> None:
        super().__init__()
        self.layers, self.again, self.head = nn.ModuleList(layers), again, head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = h + x if h.shape == x.shape else h
        for i in self.again:
            h = self.layers[i](x) if _fits(self.layers[i], x) else x
            x = h.tanh()
        return self.head(x.flatten(1))


def _fits(layer: nn.Module, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            return layer(x).shape[1:] == x.shape[1:]
    except RuntimeError:
        return False


@st.composite
def conv_nets(draw: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    nd = draw(st.integers(1, 2))
    size, c = draw(st.integers(4, 7)), draw(st.sampled_from([2, 4]))
    x = torch.randn(draw(st.integers(1, 4)), c, *[size] * nd)
    layers: list[nn.Module] = []
    h = x
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["conv", "conv", "transpose", "norm", "act"]))
        channels, width = h.shape[1], min(h.shape[2:])
        k = draw(st.integers(1, min(3, width)))
        groups = draw(st.sampled_from([1, 2]))
        out = draw(st.sampled_from([2, 4]))
        bias = draw(st.booleans())
        if kind == "conv":
            conv = [nn.Conv1d, nn.Conv2d][nd - 1]
            mode = draw(st.sampled_from(["zeros", "circular"]))
            new: nn.Module = conv(
                channels,
                out,
                k,
                stride=draw(st.integers(1, 2)),
                padding=k // 2,
                groups=groups,
                bias=bias,
                padding_mode=mode,
            )
        elif kind == "transpose":
            conv = [nn.ConvTranspose1d, nn.ConvTranspose2d][nd - 1]
            new = conv(channels, out, k, groups=groups, bias=bias)
        elif kind == "norm":
            new = nn.GroupNorm(draw(st.sampled_from([1, 2])), channels)
        else:
            new = draw(st.sampled_from([nn.ReLU(inplace=False), nn.GELU(), nn.Tanh()]))
        layers.append(new)
        with torch.no_grad():
            g = new(h)
            h = g + h if g.shape == h.shape else g
    again = draw(st.lists(st.integers(0, len(layers) - 1), max_size=2))
    return Net(layers, again, nn.Linear(h[0].numel(), draw(st.integers(1, 3)))), x


@st.composite
def token_nets(draw: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    d, t = draw(st.sampled_from([4, 6])), draw(st.integers(1, 4))
    x = torch.randn(draw(st.integers(1, 4)), t, d)
    makers = {
        "linear": lambda: nn.Linear(d, d, bias=draw(st.booleans())),
        "norm": lambda: nn.LayerNorm(d),
        "rms": lambda: nn.RMSNorm(d),
        "mlp": lambda: nn.Sequential(nn.Linear(d, 5), nn.GELU(), nn.Linear(5, d)),
        "layer": lambda: nn.TransformerEncoderLayer(
            d, 2, 5, dropout=0.0, batch_first=True, norm_first=draw(st.booleans())
        ),
    }
    layers = [makers[draw(st.sampled_from(sorted(makers)))]() for _ in range(draw(st.integers(1, 3)))]
    again = draw(st.lists(st.integers(0, len(layers) - 1), max_size=2))
    return Net(layers, again, nn.Linear(t * d, draw(st.integers(1, 3)))), x


def check(net: nn.Module, x: Tensor) -> None:
    J = brute_force(net, x)
    full = torch.einsum("iap,jbp->iajb", J, J)
    scale = full.norm().clamp_min(1e-300)
    for strategy in ("auto", "gram", "contract"):
        K = bs.ntk(net, x, strategy=strategy, precision="float64")
        assert float((K.tensor - full).norm() / scale) < 1e-10
    trace = bs.ntk(net, x, outputs="trace", precision="float64", max_memory="3MB").tensor
    assert float((trace - full.diagonal(dim1=1, dim2=3).sum(-1)).norm() / scale) < 1e-10


@SETTINGS
@given(conv_nets())
def test_random_convolutional_networks(case: tuple[nn.Module, Tensor]) -> None:
    check(*case)


@SETTINGS
@given(token_nets())
def test_random_token_networks(case: tuple[nn.Module, Tensor]) -> None:
    check(*case)
