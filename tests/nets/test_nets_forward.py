"""Every network of the registry runs forward and backward, and does nothing behind the user's back."""

import copy
import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch.func import functional_call

from biascope import nets
from biascope.nets.coordinates import FourierFeatures

# one pass of these takes seconds or gigabytes at full size; test_full_size_on_meta covers that
SMALLER = {
    "vgg11-nopool": {"image_size": 8, "width": 16},
    "densenet121-nopool": {"image_size": 8},
    "mobilenet-v2": {"image_size": 32},
}
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def example(name, n=2, **options):
    """An eval-mode net and a batch for it."""
    options = {**SMALLER.get(name, {}), **options}
    net = nets.build(name, seed=0, **options).eval()
    shape = nets.info(name).input_shape
    if "image_size" in options:
        shape = (shape[0], options["image_size"], options["image_size"])
    return net, torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))


def out_features(name, options):
    if name == "autoencoder":
        return 784
    return 1 if name == "linear-pooling" else options["outputs"]


def meta(name, **options):
    with torch.device("meta"):
        return nets.build(name, **options)


@pytest.mark.parametrize("name", nets.names())
def test_forward_backward(name):
    options = {"outputs": 3} if "outputs" in nets.info(name).defaults else {}
    net, x = example(name, **options)
    kept, x0 = copy.deepcopy(net.state_dict()), x.clone()
    x.requires_grad_()
    y = net(x)
    assert y.shape == (2, out_features(name, options))
    assert y.isfinite().all()
    assert y.std() > 0
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        # a key bias shifts all scores of a query alike, and softmax does not see it: only rounding noise there
        assert parameter.grad.any() or key.endswith("key.bias"), key
    assert x.grad.any()
    # the input, the weights and the statistics are as before, and a second pass says the same
    assert torch.equal(x.detach(), x0)
    assert all(torch.equal(value, kept[key]) for key, value in net.state_dict().items())
    assert torch.equal(net(x0), y)


@pytest.mark.parametrize("name", nets.names())
def test_full_size_on_meta(name):
    net = meta(name).eval()
    x = torch.empty(2, *nets.info(name).input_shape, device="meta")
    y = net(x)
    y.sum().backward()
    assert y.shape == (2, out_features(name, nets.info(name).defaults))
    assert all(p.grad.shape == p.shape for p in net.parameters())


@pytest.mark.parametrize("name", nets.names())
def test_state_dict_round_trip(name, tmp_path):
    net, x = example(name)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = nets.build(name, seed=1, **SMALLER.get(name, {})).eval()
    assert not torch.equal(other(x), net(x))
    other.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize("name", nets.names())
def test_functional_call(name):
    """The parameters handed in are the ones used: all of them, and none is left behind in the module."""
    net, x = example(name)
    other = nets.build(name, seed=1, **SMALLER.get(name, {})).eval()
    buffers = dict(net.named_buffers())
    parameters = {k: v.detach() for k, v in net.named_parameters()}
    torch.testing.assert_close(functional_call(other, {**parameters, **buffers}, (x,)), net(x))


@pytest.mark.parametrize("name", nets.names())
def test_no_module_is_shared_and_nothing_is_in_place(name):
    net = meta(name)
    paths = [path for path, _ in net.named_modules(remove_duplicate=False)]
    assert len(paths) == len(list(net.modules()))
    assert not any(getattr(m, "inplace", False) for m in net.modules())


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "densenet121"])
def test_no_norm_means_no_norm(name):
    assert any(isinstance(m, NORMS) for m in meta(name).modules())
    net = meta(name, norm="none")
    assert not any(isinstance(m, NORMS) for m in net.modules())
    assert all(m.bias is not None for m in net.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("name", ["resnet18-nobn", "vgg11-nobn", "vit-nonorm", "vgg19"])
def test_names_without_norm(name):
    net = meta(name)
    assert not any(isinstance(m, NORMS) for m in net.modules())
    assert not list(net.buffers())


PLACES = {
    "mlp": 3, "mlp-ntk": 3, "lenet": 4, "lenet-avg": 4, "lenet-small": 4, "lenet-nopool": 4, "vgg11": 10,
    "vgg11-nobn": 10, "vgg11-nopool": 10, "vgg19": 16, "resnet18": 17, "resnet18-nobn": 17, "resnet18-nopool": 17,
    "resnet34": 33, "densenet121": 120, "densenet121-nopool": 120, "vit": 9, "vit-nonorm": 9, "ffn": 3,
    "relu-coords": 4, "autoencoder": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in nets.names() if "activation" in nets.info(n).defaults])
@pytest.mark.parametrize(("activation", "kind"), [("softplus", nn.Softplus), (nn.Mish, nn.Mish)])
def test_activation_reaches_every_place(name, activation, kind):
    default = {nn.ReLU, nn.GELU, nn.Sigmoid}
    net = meta(name, activation=activation)
    assert sum(isinstance(m, kind) for m in net.modules()) == PLACES[name]
    assert not any(type(m) in default for m in net.modules())
    # and each of them is called
    called = []
    for module in net.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda m, *_: called.append(m))
    net(torch.empty(1, *nets.info(name).input_shape, device="meta"))
    assert len(called) == len(set(called)) == PLACES[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"width": 4, "norm": "none"}),
        ("densenet121", {"blocks": (2, 2), "growth": 4, "norm": "none"}),
        ("vgg11", {"width": 4, "norm": "none", "pool": "avg"}),
        ("lenet-avg", {}),
    ],
)
def test_linear_with_identity_activations(name, options):
    """With identity activations and no norm the whole network is affine: no hidden nonlinearity is left."""
    net, x = example(name, n=3, activation="identity", **options)
    net, x = net.double(), x.double()
    a, b = x[:1], x[1:2]
    torch.testing.assert_close(net(0.3 * a + 0.7 * b), 0.3 * net(a) + 0.7 * net(b))


def test_both_attention_kernels_agree():
    explicit, x = example("vit", depth=2)
    fused, _ = example("vit", depth=2, attention="fused")
    torch.testing.assert_close(fused.double()(x.double()), explicit.double()(x.double()))


def test_attention_is_torchs_multihead_attention():
    ours = nets.build("vit", seed=0, depth=1).blocks[0].attention.double()
    torchs = nn.MultiheadAttention(192, 12, batch_first=True, dtype=torch.float64)
    parts = (ours.query, ours.key, ours.value)
    torchs.load_state_dict(
        {
            "in_proj_weight": torch.cat([p.weight for p in parts]),
            "in_proj_bias": torch.cat([p.bias for p in parts]),
            "out_proj.weight": ours.out.weight,
            "out_proj.bias": ours.out.bias,
        }
    )
    x = torch.randn(2, 5, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), torchs(x, x, x)[0])


@pytest.mark.parametrize("name", ["vit", "resnet18-nobn", "siren"])
def test_forward_mode_and_second_derivatives(name):
    """jvp equals a finite difference, and the mixed derivative exists (linearisation and NADs need both)."""
    options = {"vit": {"depth": 2}, "resnet18-nobn": {"width": 4, "activation": "tanh"}}.get(name, {})
    net, x = example(name, **options)
    net, x = net.double(), x.double()
    p = {k: v.detach() for k, v in net.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    v = {k: 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for k, t in p.items()}
    _, tangent = torch.func.jvp(lambda q: functional_call(net, q, (x,)), (p,), (v,))
    h = 1e-5
    plus, minus = (functional_call(net, {k: p[k] + s * h * v[k] for k in p}, (x,)) for s in (1, -1))
    torch.testing.assert_close(tangent, (plus - minus) / (2 * h), rtol=1e-5, atol=1e-7)
    (g,) = torch.autograd.grad(net(x.requires_grad_()).sum(), x, create_graph=True)
    mixed = torch.autograd.grad(g.pow(2).sum(), list(net.parameters()), allow_unused=True)
    assert any(m is not None and m.any() for m in mixed)


@pytest.mark.parametrize("name", ["siren", "ffn", "relu-coords"])
def test_coordinate_nets_take_grids(name):
    net, _ = example(name, outputs=3)
    grid = torch.rand(4, 5, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(grid).flatten(0, 1), net(grid.flatten(0, 1)))


def test_siren_is_the_formula():
    net = nets.build("siren", seed=0, hidden=(8, 8), w0=20.0, w_h=10.0, output_offset=0.5).double()
    r = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fc = [m for m in net.modules() if isinstance(m, nn.Linear)]
    z = torch.sin(20 * (r @ fc[0].weight.T + fc[0].bias))
    z = torch.sin(10 * (z @ fc[1].weight.T + fc[1].bias))
    torch.testing.assert_close(net(r), z @ fc[2].weight.T + fc[2].bias + 0.5)


def test_fourier_features_are_the_formula():
    frequencies = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=torch.float64)
    r = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phase = 2 * torch.pi * (r[:, None, :] * frequencies).sum(-1)
    torch.testing.assert_close(FourierFeatures(frequencies)(r), torch.cat([phase.sin(), phase.cos()], 1))


def test_single_frequency_mapping_is_periodic():
    """f0 = 1 makes the network periodic with period 1 in each coordinate, whatever its weights."""
    net = nets.build("ffn", seed=0, frequencies=torch.eye(2)).double()
    r = torch.rand(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(r + torch.tensor([1.0, -2.0])), net(r))
    assert not torch.allclose(net(r + 0.5), net(r))


def test_octaves_are_powers_of_two_per_coordinate():
    rows = nets.build("ffn", mapping="octaves", octaves=3).features.frequencies
    assert rows.tolist() == [[0.5, 0], [0, 0.5], [1, 0], [0, 1], [2, 0], [0, 2]]


def test_autoencoder_activations():
    net = nets.build("autoencoder", seed=0, hidden=(20, 5), in_features=12, output_activation="sigmoid")
    x = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    assert ((net(x) > 0) & (net(x) < 1)).all()
    code = nets.build("autoencoder", seed=0, hidden=(20, 5), in_features=12, code_activation="identity").encoder(x)
    torch.testing.assert_close(code.sigmoid(), net.encoder(x))


def test_dropout_only_in_train_mode():
    net, x = example("vgg11", width=4)
    assert sum(isinstance(m, nn.Dropout) for m in net.modules()) == 2
    assert not any(isinstance(m, nn.Dropout) for m in meta("vgg11", dropout=0.0).modules())
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize("file", [m.name for m in pkgutil.iter_modules(nets.__path__)])
def test_docstring_examples(file):
    result = doctest.testmod(importlib.import_module(f"biascope.nets.{file}"))
    assert result.failed == 0


@pytest.mark.parametrize(("stages", "channels"), [(4, 64), (5, 96), (7, 1280)])
def test_mobilenet_cut_short(stages, channels):
    """The stages that are left keep their names, so that weights of the whole network can be loaded."""
    whole, cut = meta("mobilenet-v2").state_dict(), meta("mobilenet-v2", stages=stages)
    assert cut.classifier[1].in_features == channels
    names = [name for name in cut.state_dict() if not name.startswith("classifier")]
    assert all(cut.state_dict()[name].shape == whole[name].shape for name in names)
    assert names == [name for name in whole if name in names]
    assert whole["features.18.1.running_var"].shape == (1280,)
    assert "features.0.0.weight" in names
