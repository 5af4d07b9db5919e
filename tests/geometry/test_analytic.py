"""G of real modules in closed form: against a slow exact sum over weights, against sampling, against Theorem 3.2."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from biascope import nets
from biascope.ensembles import record
from biascope.geometry import analytic_geometry, average_geometry
from biascope.geometry.linear_cnn import (
    dense_head,
    pool_matrix,
    pooled_cnn_geometry,
    tap_matrices,
    through_average_pool,
    through_convolution,
)
from biascope.support.errors import BiascopeError, InputError, UnsupportedError

F64 = torch.float64
Build = Callable[[], nn.Module]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def jacobian(layer: nn.Module, h: Tensor) -> Tensor:
    """[outputs, inputs] of one example at h [1, ...]."""
    found = torch.func.jacrev(lambda z: layer(z.clone()).flatten())(h)
    return found.flatten(1).detach()


def slow(network: nn.Sequential, shape: tuple[int, ...]) -> Tensor:
    """G with the whole covariance of every layer: s^2 sum_k B_k^T C B_k, B_k the layer whose one weight k is 1.

    Nothing about channels, positions or taps goes in. Weights are torch's: uniform, of variance 1 / (3 fan_in).
    """
    network, h = network.double().eval(), torch.zeros(1, *shape, dtype=F64)
    inputs = []
    for layer in network:
        inputs.append(h)
        h = torch.zeros_like(layer(h))
    C = torch.ones(1, 1, dtype=F64) if h.numel() == 1 else torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64)
    for layer, before in zip(reversed(network), reversed(inputs)):
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            variance, total = 1 / (3 * layer.weight[0].numel()), torch.zeros((), dtype=F64)
            for k in range(layer.weight.numel()):
                layer.weight.data = (
                    torch.zeros_like(layer.weight)
                    .flatten()
                    .index_fill(0, torch.tensor(k), 1.0)
                    .view(layer.weight.shape)
                )
                B = jacobian(layer, before)
                total = total + B.T @ C @ B
            C = variance * total
        else:
            B = jacobian(layer, before)
            C = B.T @ C @ B
    return C


def flat(build: Build) -> nn.Sequential:
    """Nested Sequentials as one."""
    leaves = [m for m in build().modules() if not list(m.children())]
    return nn.Sequential(*leaves)


def norm_of_gain(gain: float) -> nn.Module:
    norm = nn.BatchNorm2d(4, eps=0.3)
    nn.init.constant_(norm.weight, gain)
    return norm


SEQUENTIALS: dict[str, tuple[tuple[int, ...], Build]] = {
    "one dense layer": ((5,), lambda: nn.Linear(5, 1)),
    "dense layers, two logits": ((2, 3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2))),
    "pooled convolution": (
        (1, 6),
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 1)),
    ),
    "rectangles, strides, channels": (
        (2, 5, 6),
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0)), nn.AvgPool2d((2, 1))),
            nn.Conv2d(3, 2, (1, 2), padding="same", padding_mode="circular"),
            nn.Flatten(),
            nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 1)),
        ),
    ),
    "dilation": (
        (1, 9, 4),
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, dilation=(2, 1), padding="same"),
            nn.Conv2d(2, 1, (3, 2), dilation=(3, 2), padding="valid"),
            nn.Flatten(),
            nn.Linear(6, 1),
        ),
    ),
    "depthwise": (
        (4, 5),
        lambda: nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1, groups=4), nn.Conv1d(8, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 1)
        ),
    ),
    "pooling of any kind": (
        (1, 7, 10),
        lambda: nn.Sequential(
            nn.AvgPool2d(3, stride=(1, 2), padding=1, count_include_pad=False),
            nn.Conv2d(1, 2, 2),
            nn.AvgPool2d(2, ceil_mode=True),
            nn.AdaptiveAvgPool2d((2, 1)),
            nn.Flatten(),
            nn.Linear(4, 1),
        ),
    ),
    "padding as layers": (
        (1, 4, 5),
        lambda: nn.Sequential(
            nn.ReflectionPad2d((1, 2, 0, 1)), nn.Conv2d(1, 2, 3), nn.ZeroPad2d(1), nn.Flatten(), nn.Linear(80, 1)
        ),
    ),
    "two logits without a dense layer": (
        (2, 4, 4),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ),
    "two logits are two positions": (
        (3, 4),
        lambda: nn.Sequential(nn.Conv1d(3, 1, 3, bias=False), nn.Tanh(), nn.Flatten()),
    ),
    "two logits regrouped": (
        (1, 5),
        lambda: nn.Sequential(
            nn.Conv1d(1, 1, 2, bias=False), nn.Unflatten(2, (2, 2)), nn.Flatten(1, 2), nn.AvgPool1d(2), nn.Flatten()
        ),
    ),
    "smooth": (
        (1, 4, 6),
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, (2, 3), bias=False),
            nn.GELU(),
            nn.AvgPool2d((3, 2)),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4, 3, bias=False),
            nn.SiLU(inplace=True),
            nn.Linear(3, 2),  # behind the last activation biases do not matter
        ),
    ),
    "not 0 at 0, but last": ((3,), lambda: nn.Sequential(nn.Linear(3, 1, bias=False), nn.Sigmoid())),
    "affine": (
        (2, 3, 3),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), norm_of_gain(0.6), nn.Dropout2d(), nn.Identity(), nets.parts.Scale(0.7),
            nn.Flatten(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 1),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENTIALS)
def test_geometry_is_the_sum_over_weights(name: str) -> None:
    shape, build = SEQUENTIALS[name]
    found, exact = analytic_geometry(build, shape), slow(flat(build), shape)
    assert found.shape == (math.prod(shape), math.prod(shape))
    assert found.dtype == F64
    assert relative(found, exact) < 1e-12


def test_signs_of_all_weights() -> None:
    """Every weight enters g g^T up to its square, so the mean over all 2^14 signs is exact; GELU at x = 0."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 2, 2, bias=False), nn.GELU(), nn.Conv1d(2, 2, 2, stride=2, bias=False), nn.GELU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 1, bias=False),
        )  # fmt: skip

    network, std = build().double(), {"0.weight": 2, "2.weight": 4, "6.weight": 2}  # fan_in
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=14)), dtype=F64)
    parts = signs.split([4, 8, 2], dim=1)
    weights = {
        name: part.view(-1, *network.get_parameter(name).shape) / math.sqrt(3 * fan)
        for (name, fan), part in zip(std.items(), parts)
    }
    f = lambda w, x: functional_call(network, w, x[None, None])[0, 0]  # noqa: E731
    g = vmap(grad(f, argnums=1), in_dims=(0, None), chunk_size=4096)(weights, torch.zeros(8, dtype=F64))
    assert relative(analytic_geometry(build, (1, 8)), g.T @ g / len(g)) < 1e-12


@pytest.mark.parametrize(("size", "kernel", "circular"), [((3,), 2, False), ((7,), 3, True), ((4, 6), (2, 3), False)])
def test_pooled_convolution_is_theorem_32(size: tuple[int, ...], kernel: int | tuple[int, int], circular: bool) -> None:
    """Spec 02 checks 1 and 4, from a module: example A.10 and non-square images; circular has rank 1."""
    sw, sp, n = 0.9, 0.7, 4

    def build() -> nn.Module:
        kind, pool = (nn.Conv1d, nn.AdaptiveAvgPool1d) if len(size) == 1 else (nn.Conv2d, nn.AdaptiveAvgPool2d)
        pad = {"padding": "same", "padding_mode": "circular"} if circular else {}
        net = nn.Sequential(kind(1, n, kernel, **pad), pool(1), nn.Flatten(), nn.Linear(n, 1))
        nn.init.normal_(net[0].weight, std=sp)
        nn.init.normal_(net[3].weight, std=sw)
        return net

    found = analytic_geometry(build, (1, *size))
    assert torch.allclose(
        found, pooled_cnn_geometry(tap_matrices(size, kernel, circular=circular), n, sw, sp), atol=1e-12
    )
    taps = math.prod([kernel] if isinstance(kernel, int) else kernel)
    assert int(torch.linalg.matrix_rank(found, rtol=1e-10)) == (1 if circular else taps)


def test_without_pooling_pixels_count_their_patches() -> None:
    """Spec 02 check 6: coverage 1 2 3 ... 3 2 1 without padding, c I with circular padding."""

    def build(circular: bool = False) -> nn.Module:
        mode = {"padding": 1, "padding_mode": "circular"} if circular else {}
        return nn.Sequential(nn.Conv1d(1, 4, 3, **mode), nn.Flatten(), nn.Linear(36 if circular else 28, 1))

    coverage = torch.tensor([1, 2, 3, 3, 3, 3, 3, 2, 1], dtype=F64)
    found = analytic_geometry(build, (1, 9))
    assert torch.allclose(found, torch.diag(coverage) * 4 / (9 * 84), atol=1e-15)
    assert torch.allclose(analytic_geometry(lambda: build(True), (1, 9)), torch.eye(9, dtype=F64) * 12 / (9 * 108))


def without_bias(name: str, **options: object) -> nn.Module:
    network = nets.build(name, **options)
    for parameter, value in network.named_parameters():
        if parameter.endswith("bias"):
            nn.init.zeros_(value)
    return network


def small_lenet() -> nn.Module:
    return without_bias("lenet-avg", image_size=16, hidden=(8,), activation="gelu")


def linear_net() -> nn.Module:
    """Biases and all."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1, padding_mode="circular"),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.Linear(5, 2),
    )


class OwnForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(12, 1), nn.Conv1d(1, 3, 3, bias=False)
        self.act = nn.GELU()
        nn.init.normal_(self.body.weight, std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.body(x[:, None])).flatten(1)).squeeze(1)


@pytest.mark.parametrize(
    ("build", "shape", "networks", "error"),
    [
        (linear_net, (2, 4, 4), 20_000, 0.04),
        (small_lenet, (1, 16, 16), 4_000, 0.12),
        (OwnForward, (6,), 20_000, 0.03),
        (lambda: without_bias("mlp", in_features=6, hidden=(8, 5), activation="tanh"), (6,), 20_000, 0.03),
    ],
)
def test_sampled_geometry_tends_to_it(build: Build, shape: tuple[int, ...], networks: int, error: float) -> None:
    """Spec 02 check 8: within 4 of its standard errors, at probes of any size if linear, of size 1e-4 if smooth."""
    probe = 1.0 if build is linear_net else 1e-4
    G = average_geometry(build, shape, networks, probe_std=probe, dtype=F64, seed=1)
    found = analytic_geometry(build, shape)
    assert relative(G.matrix, found) < 4 * G.relative_error < 4 * error
    assert abs(G.trace() / float(found.trace()) - 1) < error


def test_lenet_is_its_recursion_by_hand() -> None:
    """With the scale; the module's forward flattens by itself."""
    cov = dense_head(1, [1 / (3 * 16), 1 / (3 * 8)], widths=[8], gain=0.25)
    for outer, inner, filters, fan in ((6, 2, 16, 150), (16, 12, 6, 25)):
        cov = through_average_pool(cov, pool_matrix((inner, inner), 2)) / 4
        cov = through_convolution(cov, tap_matrices((outer, outer), 5), filters, 1 / (3 * fan))
    assert relative(analytic_geometry(small_lenet, (1, 16, 16)), cov) < 1e-12


class OneActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, k, bias=False) for k in (4, 4, 1))
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))


def test_an_activation_may_serve_twice() -> None:
    """Three layers of fan 4: 16 units' ways, variances 1/12, gains 1/4."""
    exact = 16 / 12**3 / 16 * torch.eye(4, dtype=F64)
    assert relative(analytic_geometry(OneActivation, (4,)), exact) < 1e-14


def test_nothing_is_left_behind() -> None:
    recorded = record(linear_net)
    before = {name: value.clone() for name, value in recorded.template.state_dict().items()}
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        found, again = analytic_geometry(recorded, (2, 4, 4)), analytic_geometry(linear_net, (2, 4, 4))
    assert torch.equal(found, again)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in recorded.template.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in recorded.template.modules())


# ------------------------------------------------------------ what is refused


class Forward(nn.Module):
    """Two dense layers and what a test does with them."""

    def __init__(self, forward: Callable[["Forward", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4, bias=False), nn.Linear(4, 1), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def between(change: Callable[[Tensor], Tensor]) -> Build:
    return lambda: Forward(lambda m, x: m.b(change(m.a(x))))


def squared(x: Tensor) -> Tensor:
    return x.square_()


FORWARDS: dict[str, Build] = {
    "functional activation": between(lambda h: nn.functional.gelu(h)),
    "in place": between(squared),
    "scaled": between(lambda h: 2 * h),
    "permuted": between(lambda h: h.flip(1)),
    "transposed memory": between(lambda h: h.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)),
    "examples mixed": between(lambda h: h.view(4, 2).view(-1, 4)[: len(h)].clone()),
    "residual": lambda: Forward(lambda m, x: m.b(x + m.a(x))),
    "skipped": lambda: Forward(lambda m, x: m.b(x) + 0 * m.a(x).sum()),
    "input changed": lambda: Forward(lambda m, x: m.b(m.a(x - 1))),
    "output changed": lambda: Forward(lambda m, x: m.b(m.a(x)).exp()),
    "output of an inner layer": lambda: Forward(lambda m, x: (m.b(m.a(x)), m.a.weight.sum() + x[:, :1])[1]),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_forward_does_between_layers_is_seen(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Forward does something between its layers"):
        analytic_geometry(FORWARDS[name], (4,))


class Transposed(nn.Module):
    """The memory of the layer before, in another order and without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(1, 3, 1), nn.Conv1d(3, 1, 1), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).transpose(1, 2)).mean(2, keepdim=True))


def test_another_order_of_the_same_memory_is_seen() -> None:
    with pytest.raises(UnsupportedError, match=r"the input of 'b' \(Conv1d\) is not the output of 'a' \(Conv1d\)"):
        analytic_geometry(Transposed, (1, 3))


def test_a_layer_that_runs_twice_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'a' runs twice"):
        analytic_geometry(lambda: Forward(lambda m, x: m.b(m.a(m.a(x)))), (4,))


def dense(*between: nn.Module, bias: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=bias), *between, nn.Linear(4, 1))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    net[1].weight = net[0].weight
    return net


def made(change: Callable[[nn.Module], object]) -> Build:
    def build() -> nn.Module:
        net = dense(nn.BatchNorm1d(4))
        change(net)
        return net

    return build


def copied(net: nn.Module) -> None:
    net[2].bias.data.copy_(net[0].weight.data[0, :1])


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(4)


def shifted(layer: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.ones_(net[layer].bias)  # type: ignore[arg-type]
    return net


LINE = (1, 8)
REFUSED: dict[str, tuple[Build, tuple[int, ...], type[BiascopeError], str]] = {
    "ReLU": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(6, 1)),
        LINE, UnsupportedError, r"'1' \(ReLU\) has no slope at 0, and",
    ),
    "ReLU of the input": (
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 1)), (4,), UnsupportedError, "on and off equally often",
    ),
    "ReLU of a GELU": (lambda: dense(nn.GELU(), nn.ReLU()), (4,), UnsupportedError, "on and off equally often"),
    "ReLU of a fixed bias": (lambda: shifted(0), (4,), UnsupportedError, "on and off equally often"),
    "ReLU of a shifted norm": (lambda: shifted(1), (4,), UnsupportedError, "on and off equally often"),
    "ReLU6": (lambda: dense(nn.ReLU6()), (4,), UnsupportedError, "ReLU6.* has no slope at 0; use nn.GELU"),
    "kinked ELU": (lambda: dense(nn.ELU(alpha=2.0)), (4,), UnsupportedError, "ELU.* has no slope at 0"),
    "PReLU": (lambda: dense(nn.PReLU()), (4,), UnsupportedError, r"PReLU.* input \['n', 4\] is not known"),
    "flat": (lambda: dense(nn.Tanhshrink()), (4,), InputError, "Tanhshrink.* has slope 0 at 0"),
    "bias": (
        lambda: dense(nn.GELU(), bias=True), (4,), UnsupportedError,
        r"'0' \(Linear\) does not give 0 at x = 0 because of its bias, so '1' \(GELU\).*bias=False",
    ),
    "value at 0": (
        lambda: dense(nn.Sigmoid(), nn.Linear(4, 4, bias=False), nn.Tanh()), (4,), UnsupportedError,
        r"'1' \(Sigmoid\) does not give 0 at x = 0 because of its value at 0, so '3' \(Tanh\)",
    ),
    "lenet": (
        lambda: nets.build("lenet-avg", activation="gelu"), (1, 32, 32), UnsupportedError,
        r"'features.conv1' \(Conv2d\) does not give 0",
    ),
    "resnet": (lambda: nets.build("resnet18"), (1, 32, 32), UnsupportedError, r"the input of 'stages\.0\.0\.shortcut'"),
    "a norm of its own": (lambda: dense(OwnNorm(4)), (4,), UnsupportedError, r"'1' \(OwnNorm\).*not known"),
    "softmax": (lambda: dense(nn.Softmax(1)), (4,), UnsupportedError, "Softmax.*not known in closed form"),
    "layer norm": (lambda: dense(nn.LayerNorm(4)), (4,), UnsupportedError, "LayerNorm.*not known"),
    "plain layer norm": (
        lambda: dense(nn.LayerNorm(4, elementwise_affine=False)), (4,), UnsupportedError, "LayerNorm.*not known"
    ),
    "entries mixed": (lambda: dense(Centred()), (4,), UnsupportedError, r"'1' \(Centred\).*not known"),
    "entries told apart": (lambda: dense(Masked()), (4,), UnsupportedError, r"'1' \(Masked\).*not known"),
    "max pooling": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(6, 1)), LINE,
        UnsupportedError, r"'1' \(MaxPool1d\).*not known",
    ),
    "dense layer over positions": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Flatten(), nn.Linear(4, 1)), LINE, UnsupportedError,
        r"'0' \(Linear\) with an input \['n', 1, 8\]",
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(1, 2, 2), nn.Flatten(), nn.Linear(18, 1)), LINE, UnsupportedError,
        "ConvTranspose1d.*not known",
    ),
    "reflect": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(16, 1)),
        LINE, UnsupportedError, "padding_mode='reflect': put nn.ReflectionPad1d before",
    ),
    "grouped logits": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 3, groups=2), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (2, 5),
        UnsupportedError, r"'0' \(Conv1d\) has groups=2 over channels",
    ),
    "regrouped": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Unflatten(1, (3, 4)), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(6, 1)
        ), LINE, UnsupportedError, "are put together to others",
    ),
    "orthogonal": (
        made(lambda net: nn.init.orthogonal_(net[0].weight)), (4,), UnsupportedError,
        r"'0' \(Linear\): its weights are not drawn independently",
    ),
    "not centred": (
        made(lambda net: nn.init.uniform_(net[2].weight)), (4,), UnsupportedError, r"mean zero \(uniform_\(\)\)"
    ),
    "cast": (lambda: nn.Linear(4, 1).double(), (4,), UnsupportedError, "let the factory leave its dtype as it is"),
    "constant": (made(lambda net: nn.init.zeros_(net[2].weight)), (4,), UnsupportedError, "not drawn independently"),
    "random norm": (
        made(lambda net: nn.init.normal_(net[1].weight)), (4,), UnsupportedError, r"'1' \(BatchNorm1d\): its weights"
    ),
    "unequal norm": (
        made(lambda net: net[1].running_var.copy_(torch.arange(4.0))), (4,), UnsupportedError, "differ between channels"
    ),
    "made of others": (made(copied), (4,), UnsupportedError, r"'0' \(Linear\).*others are made of them"),
    "hooked": (
        made(lambda net: net[0].register_forward_hook(lambda *_: None)), (4,), UnsupportedError,
        r"'0' \(Linear\) has hooks",
    ),
    "tied": (tied, (4,), UnsupportedError, r"'1' \(Linear\) shares its weights"),
    "many outputs": (lambda: nn.Linear(4, 10), (4,), InputError, "Linear has 10 outputs; build it with one"),
    "wrong shape": (lambda: nn.Linear(4, 1), (5,), InputError, r"cannot take inputs \[n, 5\]"),
    "no shape": (lambda: nn.Linear(4, 1), 4, InputError, r"pass \(4,\)"),  # type: ignore[dict-item]
}  # fmt: skip


def test_one_network_is_drawn_again() -> None:
    with pytest.warns(UserWarning, match="initialisations are drawn by every layer's reset_parameters"):
        G = analytic_geometry(nn.Linear(4, 1), (4,))
    assert relative(G, torch.eye(4, dtype=F64) / 12) < 1e-12  # the variance of U(-1/2, 1/2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    build, shape, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        analytic_geometry(build, shape)


def test_matrices_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedError, match=r"size 1024 need about 32.0 MiB and 1.0 MiB are there"):
        analytic_geometry(small_lenet_32, (1, 32, 32), max_memory="1MB")


def small_lenet_32() -> nn.Module:
    return without_bias("lenet-avg", hidden=(), activation="gelu")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_relu_mlps_are_isotropic(depth: int) -> None:
    """Thm A.2 with torch's variances: (1 / 3 D) 6^-L I, whatever the widths and the biases."""

    def build() -> nn.Module:
        widths = (5, 3, 7, 2)[: depth + 1]
        hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(widths[-1], 1))

    G = analytic_geometry(build, (5,))
    torch.testing.assert_close(G, torch.eye(5, dtype=F64) / (15 * 6**depth))


def test_relu_convolution_counts_patches() -> None:
    """1 2 3 3 3 3 3 2 1 (spec 02, 2.7), times half of n s_w^2 s_p^2."""
    G = analytic_geometry(lambda: nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28, 1)), (1, 9))
    counts = torch.tensor([1.0, 2, 3, 3, 3, 3, 3, 2, 1], dtype=F64)
    torch.testing.assert_close(G, torch.diag(counts) * 4 / 2 / (3 * 28) / (3 * 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.3)])
def test_relu_geometry_is_sampled_at_any_input(activation: Callable[[], nn.Module], bias: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 3, 3, padding=1, bias=bias), nn.BatchNorm1d(3), nn.AvgPool1d(2), activation(),
            nn.Conv1d(3, 2, 2, stride=2, bias=bias), activation(), nn.Flatten(),
            nn.Linear(4, 4, bias=bias), activation(), nn.Dropout(), nn.Linear(4, 2),
        )  # fmt: skip

    x = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(3))
    sampled = average_geometry(build, (1, 8), n_networks=20_000, probes=x, seed=0)
    exact = analytic_geometry(build, (1, 8))
    assert relative(sampled.matrix, exact) < 2 * sampled.relative_error < 0.1
