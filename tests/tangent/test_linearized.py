"""The tangent model against its definition, brute-force Jacobians and kernel gradient descent."""

import copy
import io
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError
from biascope.tangent import Linearized, posthoc
from tangent.linearize_zoo import call, conv_net, displace, double, flat, images, mlp
from zoo import ZOO, Fn, brute_force

SKIP = {"embedding_bag", "scripted"}  # refused by name, tested below
NO_SECOND = {"prelu_and_glu"}  # torch cannot differentiate glu's forward-mode rule again


# ------------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("engine", ["vjp", "jvp"])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in SKIP])
def test_value_and_gradient_are_those_of_the_brute_force_jacobian(name: str, engine: str) -> None:
    if engine == "jvp" and name in NO_SECOND:
        pytest.skip("torch has no derivative of this forward-mode rule")
    net, x = ZOO[name]()
    net, x = net.double(), double(x)
    lin = bs.linearize(net, engine=engine)
    f0 = call(net, x).detach()
    torch.testing.assert_close(call(lin, x), f0, rtol=0, atol=1e-12)  # A1
    displace(lin)
    J = brute_force(net, x)
    out = call(lin, x)
    expected = f0 + (J @ flat(lin.displacement)).reshape(f0.shape)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)  # A3
    u = torch.randn(out.shape, dtype=out.dtype)
    grads = torch.autograd.grad(out, list(lin.parameters()), u, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(
        torch.cat([g.flatten() for g in grads]), u.reshape(-1) @ J.flatten(0, 1), rtol=1e-9, atol=1e-9
    )
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), lin.origin.values()))  # the user's model stays


def test_affine_in_theta_and_gradient_independent_of_theta() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    a, b = copy.deepcopy(lin), copy.deepcopy(lin)
    displace(a, seed=1)
    displace(b, seed=2)
    both = copy.deepcopy(lin)
    with torch.no_grad():
        for p, q, r in zip(both.parameters(), a.parameters(), b.parameters()):
            p.add_(0.5 * (q - p) - 2.0 * (r - p))
    f0 = net(x)
    torch.testing.assert_close(both(x) - f0, 0.5 * (a(x) - f0) - 2.0 * (b(x) - f0))  # A1
    grads = [torch.autograd.grad(m(x).square().sum() * 0 + m(x).sum(), list(m.parameters())) for m in (a, b)]
    assert all(torch.equal(g, h) for g, h in zip(*grads))
    assert any(g.abs().max() > 0.1 for g in grads[0])


def test_error_is_of_second_order() -> None:
    net, x = mlp(), torch.randn(6, 4, dtype=torch.float64)
    lin, moved = bs.linearize(net), copy.deepcopy(net)
    start = [p.detach().clone() for p in net.parameters()]
    tau = [torch.randn_like(p) for p in start]
    errors = []
    for a in (1e-1, 1e-2, 1e-3):
        for model in (lin, moved):
            with torch.no_grad():
                for p, p0, t in zip(model.parameters(), start, tau):
                    p.copy_(p0 + a * t)
        errors.append(float((lin(x) - moved(x)).norm().detach()))
    slopes = [math.log10(errors[i] / errors[i + 1]) for i in range(2)]
    assert slopes[1] == pytest.approx(2, abs=0.05)  # A2 and check 17


def test_a_model_linear_in_its_parameters_is_its_own_linearisation() -> None:
    net, x = nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64)
    lin, moved = bs.linearize(net), copy.deepcopy(net)
    displace(lin, 10.0)
    displace(moved, 10.0)
    torch.testing.assert_close(lin(x), moved(x))


def test_jvp_agrees_with_central_differences() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net, centered=True)
    displace(lin)
    v, h = lin.displacement, 1e-5
    ends = [
        torch.func.functional_call(net, {k: p + s * h * v[k] for k, p in net.named_parameters()}, (x,)) for s in (1, -1)
    ]
    torch.testing.assert_close(lin(x), (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["vjp", "jvp"])
def test_training_is_kernel_gradient_descent(engine: str) -> None:
    net, x, new = conv_net(), images(6), images(4)
    y = torch.randn(6, 3, dtype=torch.float64)
    K = bs.ntk(net, x)
    lr = 1.0 / float(torch.linalg.eigvalsh(K.matrix())[-1])
    lin = bs.linearize(net, engine=engine)
    sgd = torch.optim.SGD(lin.parameters(), lr)
    for _ in range(20):
        sgd.zero_grad()
        (0.5 * (lin(x) - y).square().sum()).backward()
        sgd.step()
    predicted = bs.gradient_descent(
        K, y, 20, lr, K_test=bs.ntk(net, new, x), f0_train=net(x).detach(), f0_test=net(new).detach()
    )
    torch.testing.assert_close(lin(x).detach(), predicted.train[-1].reshape(6, 3), rtol=0, atol=1e-8)
    assert predicted.test is not None
    torch.testing.assert_close(lin(new).detach(), predicted.test[-1].reshape(4, 3), rtol=0, atol=1e-8)


def test_its_tangent_kernel_is_the_network_s_wherever_theta_is() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    displace(lin, 1.0)
    torch.testing.assert_close(bs.ntk(lin, x).matrix(), bs.ntk(net, x).matrix())


# -------------------------------------------------------------------------------------------------------- variants


def test_centred_starts_at_zero_and_differs_by_f0() -> None:
    net, x = conv_net(), images()
    centred, full = bs.linearize(net, centered=True), bs.linearize(net)
    assert not centred(x).any()
    for m in (centred, full):
        displace(m)
    torch.testing.assert_close(full(x) - centred(x), net(x))


def test_posthoc_is_the_jvp_at_the_pretrained_point() -> None:
    net, x = conv_net(), images()
    tuned = copy.deepcopy(net)
    displace(tuned)
    tuned[1].running_mean.add_(1.0)  # fine-tuning moved the statistics as well: they belong to the expansion point
    tau = {k: p.detach() - q for (k, p), q in zip(tuned.named_parameters(), net.parameters())}
    expected = net(x) + bs.Jacobian(net, x, precision="float64") @ tau
    for lin in (posthoc(net, tuned), posthoc(net, tuned.state_dict()), bs.tangent.posthoc(net, tuned)):
        torch.testing.assert_close(lin(x), expected)
    loaded = bs.linearize(net)
    loaded.load_state_dict(tuned.state_dict())
    torch.testing.assert_close(loaded(x), expected)
    with pytest.raises(InputError, match=r"finetuned: the model has no 'other'; .* not given: '0\.weight'"):
        posthoc(net, {"other": torch.ones(1)})


def test_kernel_swap_expands_at_a_later_checkpoint_and_counts_from_the_start() -> None:
    net, x = conv_net(), images()
    later = copy.deepcopy(net)
    displace(later)
    lin = bs.linearize(net, at=later, centered=True)
    assert not lin(x).any()
    displace(lin, seed=3)
    torch.testing.assert_close(lin(x), bs.Jacobian(later, x, precision="float64") @ lin.displacement)
    full = bs.linearize(net, at=dict(later.named_parameters()))
    torch.testing.assert_close(full(x), later(x))
    with pytest.raises(InputError, match=r"at: '0\.weight' has shape \[2\]"):
        bs.linearize(net, at={"0.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"at: no parameter is called '0\.bias'"):
        bs.linearize(net, at={"0.weight": later[0].weight})


def test_some_parameters_only() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net, params="5")
    assert lin.linearized == ("5.weight", "5.bias")
    lin(x).sum().backward()
    assert lin.get_parameter("0.weight").grad is None
    assert lin.get_parameter("5.weight").grad is not None
    state = lin.state_dict()
    state["0.weight"] = state["0.weight"] + 1
    with pytest.raises(InputError, match=r"moves '0\.weight', which is not linearised"):
        lin.load_state_dict(state)
    lin = bs.linearize(net, params="5")
    lin.get_parameter("0.weight").requires_grad_(True)
    with pytest.raises(InputError, match=r"'0\.weight' requires a gradient but is not linearised"):
        lin(x)


# --------------------------------------------------------------------------------------------------- a real module


def test_names_and_states_are_those_of_the_network() -> None:
    for net in (conv_net(), ZOO["tied_embedding_and_decoder"]()[0], ZOO["weight_norm"]()[0]):
        lin = bs.linearize(net)
        assert [k for k, _ in lin.named_parameters()] == [k for k, _ in net.named_parameters()]
        assert [k for k, _ in lin.named_buffers()] == [k for k, _ in net.named_buffers()]
        assert list(lin.state_dict()) == list(net.state_dict())
        displace(lin)
        net.load_state_dict(lin.state_dict(), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), lin.state_dict().values()))
        displace(net)
        lin.load_state_dict(net.state_dict(), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), lin.parameters()))
    inside = nn.Sequential(bs.linearize(conv_net()), nn.Softmax(-1))
    other = nn.Sequential(conv_net(), nn.Softmax(-1))
    other.load_state_dict(inside.state_dict(), strict=True)
    inside.load_state_dict(other.state_dict(), strict=True)


def test_copies_pickles_and_saves() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    displace(lin)
    for twin in (copy.deepcopy(lin), pickle.loads(pickle.dumps(lin))):
        torch.testing.assert_close(twin(x), lin(x))
        displace(twin)
        assert not torch.allclose(twin(x), lin(x))  # its parameters are its own and are the ones it uses
    buffer = io.BytesIO()
    torch.save(lin.state_dict(), buffer)
    buffer.seek(0)
    again = bs.linearize(net)
    again.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(again(x), lin(x))


def test_moves_between_precisions_together_with_the_frozen_state() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    displace(lin)
    expected = lin(x)
    lin.float()
    assert {t.dtype for t in lin.origin.values() if t.is_floating_point()} == {torch.float32}
    assert lin.point["0.weight"] is lin.origin["0.weight"]
    torch.testing.assert_close(lin(x.float()), expected.float(), rtol=1e-4, atol=1e-4)
    assert lin.double()(x).dtype == torch.float64
    assert {str(t.device) for t in lin.to("meta").origin.values()} == {"meta"}


def test_train_mode_does_not_reach_the_layers() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    before = lin(x)
    assert lin.train().training
    assert not any(m.training for m in lin.children())
    assert torch.equal(lin(x), before)
    assert torch.equal(lin.point["1.running_mean"], net[1].running_mean)


def test_gradients_reach_the_inputs_too() -> None:
    net, x = mlp(), torch.randn(5, 4, dtype=torch.float64)
    lin = bs.linearize(net)
    displace(lin)
    x.requires_grad_()
    (got,) = torch.autograd.grad(lin(x).sum(), x)
    h = 1e-6
    for j in range(4):
        e = h * torch.eye(4, dtype=torch.float64)[j]
        with torch.no_grad():
            slope = (lin(x + e) - lin(x - e)).sum(1) / (2 * h)
        torch.testing.assert_close(got[:, j], slope, rtol=1e-6, atol=1e-6)


def test_double_backward_through_the_gradient_is_that_of_a_linear_model() -> None:
    lin, x = bs.linearize(mlp()), torch.randn(5, 4, dtype=torch.float64)
    displace(lin)
    (g,) = torch.autograd.grad(lin(x).square().sum(), lin.get_parameter("2.bias"), create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), lin.get_parameter("2.bias"))
    torch.testing.assert_close(h, torch.full_like(h, 2.0 * 5))  # d^2/db^2 of sum (f + b)^2


def test_autocast_runs_forward_and_backward_in_half_precision() -> None:
    net, x = conv_net().float(), images().float()
    lin = bs.linearize(net)
    displace(lin, 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        out = lin(x)
        plain = net(x)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), lin(x), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    got = [p.grad.clone() for p in lin.parameters() if p.grad is not None]
    lin.zero_grad()
    lin(x).sum().backward()
    for a, p in zip(got, lin.parameters()):
        assert p.grad is not None
        assert (a - p.grad).norm() <= 0.03 * p.grad.norm() + 0.03
        assert a.dtype == torch.float32


@pytest.mark.slow
def test_torch_compile_falls_back_to_eager_inside() -> None:
    net, x = mlp(), torch.randn(5, 4, dtype=torch.float64)
    lin = bs.linearize(net)
    displace(lin)
    compiled = torch.compile(lin, backend="eager")
    torch.testing.assert_close(compiled(x), lin(x))
    compiled(x).sum().backward()
    assert lin.get_parameter("0.weight").grad is not None
    frames = torch._dynamo.utils.counters["frames"]
    before = dict(frames)
    compiled(x)
    assert dict(frames) == before  # nothing is compiled anew


def test_the_compiler_is_not_imported_by_those_who_do_not_use_it() -> None:
    code = "import sys, torch, biascope as bs; bs.linearize(torch.nn.Linear(2, 1))(torch.ones(1, 2)); "
    code += "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_attention_settings_are_restored() -> None:
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    net, x = ZOO["transformer_encoder_layer"]()
    bs.linearize(net)(x)
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


def test_straight_through_and_embedding_padding_follow_the_training_gradient() -> None:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return torch.zeros_like(t)

    net = Fn(lambda m, x: m.b(Round.apply(m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)).double()  # type: ignore[no-untyped-call]
    x = torch.randn(3, 4, dtype=torch.float64)
    lin = bs.linearize(net)
    displace(lin)
    expected = net(x) + (brute_force(net, x) @ flat(lin.displacement)).reshape(3, 2)
    torch.testing.assert_close(lin(x), expected)


def test_a_function_with_a_forward_derivative_of_its_own_uses_torch_s_forward_mode() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 3 * ctx.saved_tensors[0] ** 2  # type: ignore[no-any-return]

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return t * 3 * ctx.saved_tensors[0] ** 2  # type: ignore[no-any-return]

    net = Fn(lambda m, x: m.b(Cube.apply(m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)).double()  # type: ignore[no-untyped-call]
    x = torch.randn(3, 4, dtype=torch.float64)
    lin = bs.linearize(net)
    displace(lin)
    expected = net(x) + (brute_force(net, x) @ flat(lin.displacement)).reshape(3, 2)
    torch.testing.assert_close(lin(x), expected)
    assert list(lin._forward_mode.values()) == ["torch"]


def test_a_flag_that_leads_into_other_code_is_tried_by_itself() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0].cos()  # type: ignore[no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, own: bool = False) -> Tensor:
            return self.b(Sine.apply(self.a(x)) if own else self.a(x).sin())  # type: ignore[no-any-return, no-untyped-call]

    lin = bs.linearize(Net().double())
    displace(lin)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(lin(x, own=True), lin(x))
    torch.testing.assert_close(lin(x, True), lin(x))  # after a call without it
    assert len(lin._forward_mode) == 3


def test_inside_torch_func_as_in_the_calls_before() -> None:
    net = mlp()
    lin = bs.linearize(net)
    displace(lin)
    x = torch.randn(3, 4, dtype=torch.float64)
    params = {k: p.detach() for k, p in lin.named_parameters()}

    def one(params: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(lin, params, (row[None],))
        return out[0]

    def jacobian() -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.func.vmap(torch.func.jacrev(one), (None, 0))(params, x)
        return found

    with pytest.raises(UnsupportedError, match="call it once before"):
        jacobian()
    lin(x)
    found = torch.cat([jacobian()[k].flatten(2) for k in params], 2)
    torch.testing.assert_close(found, brute_force(net, x))


def test_activation_checkpoints_run_again_at_the_expansion_point() -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(checkpoint(m.a, x, use_reentrant=False))  # type: ignore[no-any-return, operator]

    block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
    net = Fn(forward, a=block, b=nn.Linear(3, 2)).double()
    x, u = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    lin = bs.linearize(net)
    displace(lin)  # the parameters are elsewhere when the backward pass runs the block again
    J = brute_force(net, x)
    torch.testing.assert_close(lin(x), net(x) + (J @ flat(lin.displacement)).reshape(3, 2))
    (lin(x) * u).sum().backward()
    found = flat({k: p.grad for k, p in lin.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found, (J * u[..., None]).sum((0, 1)))
    with pytest.raises(UnsupportedError, match="activation checkpoints"):
        bs.linearize(net, engine="jvp")(x)


def test_inference_mode_keeps_the_tangents() -> None:
    net = conv_net()
    for first in (True, False):
        lin = bs.linearize(net)
        displace(lin)
        if not first:
            lin(images())
        with torch.inference_mode():
            x = images()
            inside = lin(x)
        torch.testing.assert_close(inside, lin(x.clone()).detach())
        assert not torch.allclose(inside, net(x.clone()))


# ------------------------------------------------------------------------------------------------------- refusals


def test_refusals_name_the_culprit() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedError, match="BatchNorm1d '1' is in train mode"):
        bs.linearize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(UnsupportedError, match="Dropout '1' is active"):
        bs.linearize(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    with pytest.raises(InputError, match="has no parameters"):
        bs.linearize(nn.ReLU())
    with pytest.raises(InputError, match="got builtin_function_or_method"):
        bs.linearize(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'weight' is an uninitialized parameter of a lazy layer: run a batch"):
        bs.linearize(nn.LazyLinear(3))
    with pytest.raises(InputError, match="is Linearized already"):
        bs.linearize(bs.linearize(nn.Linear(4, 3)))
    with pytest.raises(InputError, match="engine='magic'"):
        bs.linearize(nn.Linear(4, 3), engine="magic")
    with pytest.raises(InputError, match="looks like a loss"):
        bs.linearize(Fn(lambda m, x: m.a(x).sum(), a=nn.Linear(4, 3)))(x)
    with pytest.raises(InputError, match="no floating-point tensor"):
        bs.linearize(Fn(lambda m, x: m.a(x).argmax(1), a=nn.Linear(4, 3)))(x)
    bag, tokens = ZOO["embedding_bag"]()
    with pytest.raises(UnsupportedError, match=r"_embedding_bag_backward"):
        bs.linearize(bag)(tokens)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        bs.linearize(ZOO["scripted"]()[0])
    lin = bs.linearize(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval())
    lin.get_submodule("1").train()
    with pytest.raises(UnsupportedError, match="Dropout '1' is active"):
        lin(x)


def test_a_bad_input_does_not_change_how_later_ones_are_handled() -> None:
    lin = bs.linearize(conv_net())
    with pytest.raises(RuntimeError, match="channels"):
        lin(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    lin(images())
    assert list(lin._forward_mode.values()) == ["by hand"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    net, x = conv_net(), images()
    lin = bs.linearize(net)
    displace(lin)
    expected = lin(x)
    there: Linearized = lin.cuda()
    torch.testing.assert_close(there(x.cuda()).cpu(), expected)
