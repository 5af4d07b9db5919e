"""A zoo of awkward modules: each entry builds (module, inputs, other inputs) with little data.

The oracle for all of them is brute-force autograd in float64, one example and one output at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ZOO: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def animal(fn: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    ZOO[fn.__name__] = fn
    return fn


def brute_force(model: nn.Module, x: Any, params: list[str] | None = None, output: Any = None) -> Tensor:
    """J [n, c, p] in float64 by autograd alone, one example at a time."""
    import copy

    model = copy.deepcopy(model).double()
    named = {
        k: p for k, p in model.named_parameters() if (params is None and p.requires_grad) or (params and k in params)
    }
    for p in named.values():
        p.requires_grad_(True)
    n = len(next(iter(x.values())) if isinstance(x, dict) else x)
    rows = []
    for i in range(n):
        one = {k: _double(v[i : i + 1]) for k, v in x.items()} if isinstance(x, dict) else _double(x[i : i + 1])
        out = model(**one) if isinstance(one, dict) else model(one)
        out = output(out) if output else out
        out = out.reshape(-1)
        per = []
        for o in out:
            grads = torch.autograd.grad(o, list(named.values()), retain_graph=True, allow_unused=True)
            per.append(
                torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, named.values())])
            )
        rows.append(torch.stack(per))
    return torch.stack(rows)


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


class Fn(nn.Module):
    """A module from a function and some parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def images(c: int = 2, s: int = 6, n: int = 4) -> Tensor:
    return torch.randn(n, c, s, s)


def conv_net(conv: nn.Module, c: int = 2, s: int = 6, **_: Any) -> tuple[nn.Module, Tensor]:
    x = images(c, s)
    with torch.no_grad():
        d = conv(x)[0].numel()
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(d, 3)), x


# ------------------------------------------------------------------------------------------------------------- linear


@animal
def linear() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(4, 5)


@animal
def linear_no_bias() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)), torch.randn(4, 5)


@animal
def linear_on_tokens() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.b(torch.tanh(m.a(x))).mean(1), a=nn.Linear(5, 4), b=nn.Linear(4, 3)), torch.randn(4, 6, 5)


@animal
def linear_on_two_leading_dims() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.a(x).tanh().sum((1, 2)), a=nn.Linear(5, 3)), torch.randn(4, 2, 3, 5)


@animal
def linear_time_major() -> tuple[nn.Module, Any]:
    """Time first inside, as nn.Transformer does by default: the batch is dimension 1."""
    return Fn(lambda m, x: m.a(x.transpose(0, 1)).tanh().sum(0), a=nn.Linear(5, 3)), torch.randn(4, 6, 5)


@animal
def linear_batch_folded() -> tuple[nn.Module, Any]:
    """[n, T, d] folded to [n * T, d]."""
    return Fn(lambda m, x: m.a(x.flatten(0, 1)).tanh().view(len(x), -1), a=nn.Linear(5, 2)), torch.randn(4, 3, 5)


@animal
def linear_time_folded() -> tuple[nn.Module, Any]:
    """[T * n, d], time-major: the layout that looks like a folded batch and is not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        n, t, d = x.shape
        return m.a(x.transpose(0, 1).reshape(t * n, d)).tanh().view(t, n, -1).sum(0)

    return Fn(forward, a=nn.Linear(5, 2)), torch.randn(4, 3, 5)


@animal
def linear_subclass() -> tuple[nn.Module, Any]:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * super().forward(x)

    return nn.Sequential(Scaled(5, 4), nn.Tanh(), Scaled(4, 2)), torch.randn(4, 5)


@animal
def functional_linear() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: F.linear(torch.tanh(F.linear(x, m.w, m.b)), m.v),
        w=nn.Parameter(torch.randn(4, 5)),
        b=nn.Parameter(torch.randn(4)),
        v=nn.Parameter(torch.randn(3, 4)),
    ), torch.randn(4, 5)


@animal
def matmul_weight() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: torch.tanh(x @ m.w) @ m.v, w=nn.Parameter(torch.randn(5, 4)), v=nn.Parameter(torch.randn(4, 3))
    ), (torch.randn(4, 5))


@animal
def transposed_weight() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: torch.tanh(x @ m.w.t()), w=nn.Parameter(torch.randn(3, 5))), torch.randn(4, 5)


@animal
def addmm_weight() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: torch.addmm(m.b, x, m.w).tanh(), w=nn.Parameter(torch.randn(5, 3)), b=nn.Parameter(torch.randn(3))
    ), torch.randn(4, 5)


@animal
def bilinear() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(4, 4, 3)), torch.randn(4, 4)


# -------------------------------------------------------------------------------------------------------- convolution


@animal
def conv1d() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)), torch.randn(4, 2, 8)


@animal
def conv2d() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, 3))


@animal
def conv2d_stride_padding() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)))


@animal
def conv2d_groups() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(4, 6, 3, groups=2, padding=1), c=4)


@animal
def conv2d_depthwise() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(3, 3, 3, groups=3), c=3)


@animal
def conv2d_dilation() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, 3, dilation=2, padding=1))


@animal
def conv2d_same() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)))


@animal
def conv2d_circular() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"))


@animal
def conv2d_reflect() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"))


@animal
def conv2d_pointwise() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(2, 5, 1))


@animal
def conv2d_wide_on_small_map() -> tuple[nn.Module, Any]:
    return conv_net(nn.Conv2d(8, 16, 2), c=8, s=3)


@animal
def conv3d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 2, 3, 4, 3)
    net(x)
    return net, x


@animal
def conv_on_video() -> tuple[nn.Module, Any]:
    """Frames folded into the batch."""
    return Fn(lambda m, x: m.a(x.flatten(0, 1)).tanh().view(len(x), -1).sum(1, keepdim=True), a=nn.Conv2d(2, 3, 3)), (
        torch.randn(3, 2, 2, 5, 5)
    )


@animal
def conv_transpose1d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(
        nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
    )
    x = torch.randn(4, 2, 5)
    net(x)
    return net, x


@animal
def conv_transpose2d() -> tuple[nn.Module, Any]:
    return conv_net(nn.ConvTranspose2d(2, 3, 3))


@animal
def conv_transpose2d_groups_dilation() -> tuple[nn.Module, Any]:
    return conv_net(
        nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), padding=1, output_padding=(1, 2), groups=2, dilation=(2, 1)),
        c=4,
        s=4,
    )


@animal
def conv_transpose3d() -> tuple[nn.Module, Any]:
    net = nn.Sequential(nn.ConvTranspose3d(2, 2, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 2, 2, 2, 2)
    net(x)
    return net, x


# ------------------------------------------------------------------------------------------------------ normalisation


def _stats(bn: Any) -> Any:
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2)
    nn.init.normal_(bn.weight)
    nn.init.normal_(bn.bias)
    return bn


@animal
def batch_norm1d_eval() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 4), _stats(nn.BatchNorm1d(4)), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.randn(
        4, 5
    )


@animal
def batch_norm2d_eval() -> tuple[nn.Module, Any]:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), _stats(nn.BatchNorm2d(3)), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    ).eval(), images()


@animal
def layer_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(4, 5)


@animal
def layer_norm_on_tokens() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)), torch.randn(
        4, 3, 5
    )


@animal
def layer_norm_two_dims_no_bias() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.LayerNorm([3, 5], bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)), torch.randn(
        4, 3, 5
    )


@animal
def group_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)), images()


@animal
def instance_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)
    ), images()


@animal
def rms_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(4, 5)


@animal
def rms_norm_by_hand() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return (m.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).tanh().sum(1)

    return Fn(forward, a=nn.Linear(5, 6), scale=nn.Parameter(torch.randn(6))), torch.randn(4, 3, 5)


@animal
def weight_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 2)
    ), torch.randn(4, 5)


# ---------------------------------------------------------------------------------------------- embeddings, attention


@animal
def embedding() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.b(m.e(x).tanh().sum(1)), e=nn.Embedding(7, 4), b=nn.Linear(4, 3)), torch.randint(7, (4, 5))


@animal
def embedding_padding() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.b(m.e(x).tanh().sum(1)), e=nn.Embedding(7, 4, padding_idx=0), b=nn.Linear(4, 3)), (
        torch.randint(3, (4, 5))
    )


@animal
def embedding_bag() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.b(m.e(x).tanh()), e=nn.EmbeddingBag(7, 4), b=nn.Linear(4, 3)), torch.randint(7, (4, 5))


@animal
def tied_embedding_and_decoder() -> tuple[nn.Module, Any]:
    e = nn.Embedding(6, 4)
    d = nn.Linear(4, 6, bias=False)
    d.weight = e.weight
    return Fn(lambda m, x: m.d(m.e(x).tanh().sum(1)), e=e, d=d), torch.randint(6, (4, 5))


class Sliced(nn.Module):
    """Reads a slice of a ParameterList, which torch makes new parameters of where tensors stand in for the old."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(1, 3))])

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights[:-1]:
            x = torch.tanh(x @ w.T)
        return x @ self.weights[-1].T


@animal
def slice_of_a_parameter_list() -> tuple[nn.Module, Any]:
    return Sliced(), torch.randn(4, 3)


@animal
def multihead_attention() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: m.b(m.a(x, x, x)[0].tanh().mean(1)),
        a=nn.MultiheadAttention(6, 2, batch_first=True),
        b=nn.Linear(6, 3),
    ), torch.randn(4, 5, 6)


@animal
def cross_attention_time_major_masked() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        t = x.transpose(0, 1)
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return m.a(t, t.tanh(), t.sin(), attn_mask=mask, need_weights=False)[0].sum(0)

    return Fn(forward, a=nn.MultiheadAttention(6, 3)), torch.randn(4, 5, 6)


@animal
def attention_other_sizes() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: m.a(x, x[..., :3].tanh(), x[..., :4])[0].sum(1),
        a=nn.MultiheadAttention(6, 2, kdim=3, vdim=4, batch_first=True),
    ), torch.randn(4, 5, 6)


@animal
def attention_bias_kv() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: m.a(x, x, x)[0].sum(1),
        a=nn.MultiheadAttention(6, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ), torch.randn(4, 5, 6)


@animal
def sdpa_attention() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(len(x), 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)

    return Fn(forward, qkv=nn.Linear(6, 18), o=nn.Linear(6, 3)), torch.randn(4, 5, 6)


@animal
def transformer_encoder_layer() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.a(x).mean(1), a=nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)).eval(), torch.randn(
        3, 4, 6
    )


@animal
def transformer_decoder_time_major() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: m.a(x.transpose(0, 1), x.transpose(0, 1).tanh()).sum(0),
        a=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0),
    ), torch.randn(3, 4, 4)


@animal
def vit_like() -> tuple[nn.Module, Any]:
    """Class token, positions, layer scale: parameters spread over the examples."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.patch(x).flatten(2).mT
        h = torch.cat([m.cls.expand(len(h), -1, -1), h], 1) + m.pos
        h = h + m.gamma * m.mlp(m.norm(h))
        return m.head(h[:, 0])

    return Fn(
        forward,
        patch=nn.Conv2d(2, 4, 3, stride=3),
        cls=nn.Parameter(torch.randn(1, 1, 4)),
        pos=nn.Parameter(torch.randn(1, 5, 4)),
        gamma=nn.Parameter(torch.randn(4)),
        norm=nn.LayerNorm(4),
        mlp=nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        head=nn.Linear(4, 3),
    ), images()


# ----------------------------------------------------------------------------------------------------------- recurrent


@animal
def gru() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.r(x)[0][:, -1], r=nn.GRU(3, 4, batch_first=True)), torch.randn(3, 5, 3)


@animal
def lstm_two_layers_bidirectional() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.r(x.transpose(0, 1))[0][-1], r=nn.LSTM(3, 2, num_layers=2, bidirectional=True)), (
        torch.randn(3, 4, 3)
    )


@animal
def rnn_cell_by_hand() -> tuple[nn.Module, Any]:
    """One weight used at every time step."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = torch.tanh(m.i(x[:, t]) + m.h(h))
        return h

    return Fn(forward, i=nn.Linear(3, 4), h=nn.Linear(4, 4)), torch.randn(4, 3, 3)


# ------------------------------------------------------------------------------------------------- sharing, odd wiring


@animal
def layer_called_twice() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.b(m.a(m.a(x).tanh()).tanh()), a=nn.Linear(5, 5), b=nn.Linear(5, 2)), torch.randn(4, 5)


@animal
def conv_called_twice_at_two_scales() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: torch.cat([m.a(x).tanh().flatten(1), m.a(x[:, :, ::2, ::2]).flatten(1)], 1).sum(1, keepdim=True),
        a=nn.Conv2d(2, 3, 2),
    ), images()


@animal
def tied_linear_weights() -> tuple[nn.Module, Any]:
    a, b = nn.Linear(5, 5), nn.Linear(5, 5)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b, nn.Tanh(), nn.Linear(5, 2)), torch.randn(4, 5)


@animal
def tied_transposed_autoencoder() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.t()), w=nn.Parameter(torch.randn(3, 5))), torch.randn(
        4, 5
    )


@animal
def module_and_raw_use() -> tuple[nn.Module, Any]:
    """A module's weight also used raw."""
    return Fn(lambda m, x: m.a(x).tanh() + m.a.weight.pow(2).sum() * x[:, :3], a=nn.Linear(5, 3)), torch.randn(4, 5)


@animal
def bias_shared_by_two_layers() -> tuple[nn.Module, Any]:
    a, b = nn.Linear(5, 5), nn.Linear(5, 5)
    b.bias = a.bias
    return nn.Sequential(a, nn.Tanh(), b), torch.randn(4, 5)


@animal
def linear_and_matmul_same_weight() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: F.linear(x, m.w).tanh() @ m.w, w=nn.Parameter(torch.randn(4, 4))), torch.randn(4, 4)


@animal
def bare_parameters() -> tuple[nn.Module, Any]:
    return Fn(
        lambda m, x: (x * m.scale + m.shift - m.offset).tanh() / m.temperature,
        scale=nn.Parameter(torch.randn(5)),
        shift=nn.Parameter(torch.randn(1, 5)),
        offset=nn.Parameter(torch.randn(())),
        temperature=nn.Parameter(torch.rand(5) + 1),
    ), torch.randn(4, 5)


@animal
def constant_branch() -> tuple[nn.Module, Any]:
    """A layer applied to something that has no example dimension."""
    return Fn(
        lambda m, x: m.a(x) * m.g(m.code).sigmoid(),
        a=nn.Linear(5, 3),
        g=nn.Linear(2, 3),
        code=nn.Parameter(torch.randn(2)),
    ), torch.randn(4, 5)


@animal
def residual() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: x + m.b(m.a(x).relu()), a=nn.Linear(5, 6), b=nn.Linear(6, 5)), torch.randn(4, 5)


@animal
def in_place_relu() -> tuple[nn.Module, Any]:
    return nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    ), (torch.randn(4, 5))


@animal
def in_place_chunks() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h[:, :3].mul_(2.0)
        h += x
        return m.b(h.tanh())

    return Fn(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 2)), torch.randn(4, 5)


@animal
def unused_parameter() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.a(x).tanh(), a=nn.Linear(5, 3), spare=nn.Linear(2, 2)), torch.randn(4, 5)


@animal
def detached_branch() -> tuple[nn.Module, Any]:
    return Fn(lambda m, x: m.a(x).tanh() + m.b(x).detach(), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), torch.randn(4, 5)


@animal
def prelu_and_glu() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.GLU(), nn.Linear(4, 2)), torch.randn(4, 5)


@animal
def one_output_vector() -> tuple[nn.Module, Any]:
    """Returns [n], not [n, 1]."""
    return Fn(lambda m, x: m.a(x).tanh().sum(1), a=nn.Linear(5, 3)), torch.randn(4, 5)


@animal
def image_output() -> tuple[nn.Module, Any]:
    """Returns [n, c, h, w], as segmentation does."""
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2)), images(s=5, n=3)


@animal
def batch_as_large_as_time() -> tuple[nn.Module, Any]:
    """n equals T, so sizes alone cannot tell the batch from the time axis."""
    return Fn(lambda m, x: m.a(x.transpose(0, 1)).tanh().sum(0), a=nn.Linear(5, 3)), torch.randn(4, 4, 5)


@animal
def scripted() -> tuple[nn.Module, Any]:
    """TorchScript hides its operations from every recorder."""
    inner = torch.jit.script(nn.Sequential(nn.Linear(5, 4), nn.Tanh()))
    return nn.Sequential(inner, nn.Linear(4, 2)), torch.randn(4, 5)


@animal
def single_example() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(1, 5)


@animal
def keyword_inputs() -> tuple[nn.Module, Any]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Embedding(4, 3)

        def forward(self, image: Tensor, token: Tensor) -> Tensor:
            return (self.a(image) + self.b(token)).tanh()

    return Two(), {"image": torch.randn(4, 5), "token": torch.randint(4, (4,))}
