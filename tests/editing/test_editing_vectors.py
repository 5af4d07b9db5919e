"""Task vectors: the laws of arithmetic, tied tensors, buffers, files, and every refusal by its words."""

import copy
import doctest
import importlib
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import biascope as bs
from biascope.editing import TaskVector
from biascope.support.errors import CorruptError, InputError
from editing.editing_nets import mlp, points, random_vector

MODULES = ("vectors", "interference", "merging", "fine_tuning", "properties")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"biascope.editing.{name}"))
    assert result.failed == 0
    assert result.attempted > 0


def flat(tv: TaskVector) -> Tensor:
    return torch.cat([t.flatten() for t in tv.tensors.values()])


# --------------------------------------------------------------------------------------------------- arithmetic (E1)


def integers(net: nn.Module, seed: int) -> nn.Module:
    """Weights on which float64 is exact."""
    gen = torch.Generator().manual_seed(seed)
    net = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randint(-9, 10, p.shape, generator=gen))
    return net


def test_laws_of_arithmetic_are_exact() -> None:
    net, one, two = (integers(mlp(), seed) for seed in range(3))
    a, b = TaskVector(net, one), TaskVector(net, two)
    for tuned, tau in ((one, a), (two, b)):
        for p, q in zip(tau.apply_to(net).parameters(), tuned.parameters()):
            assert torch.equal(p, q)  # theta0 + tau = theta*
    assert torch.equal(flat(a - a), torch.zeros(a.size, dtype=torch.float64))
    back = -a
    assert torch.equal(flat(-back), flat(a))
    assert torch.equal(flat(2 * a + 0.5 * b), flat(b / 2 + a * 2))
    assert torch.equal(flat(sum([a, b, a])), flat(2 * a + b))
    assert torch.equal(flat(a - b), flat(a + (-1) * b))
    assert torch.equal(flat(np.float64(0.5) * a), flat(torch.tensor(0.5) * a))
    assert all(torch.equal(p, q) for p, q in zip((-a).apply_to(one).parameters(), net.parameters()))


def test_scale_zero_is_the_same_function_and_nothing_is_changed() -> None:
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    tau, x = random_vector(net, 1), points(5, 2)
    assert torch.equal(tau.apply_to(net, scale=0.0)(x), net(x))
    edited = tau.apply_to(net, scale=0.4)
    assert type(edited) is type(net)
    assert edited is not net
    expected = {k: p + 0.4 * tau[k] for k, p in net.named_parameters()}
    torch.testing.assert_close(dict(edited.named_parameters()), expected, rtol=0, atol=1e-15)
    assert all(p.requires_grad and p.is_leaf for p in edited.parameters())
    assert all(torch.equal(before[k], t) for k, t in net.state_dict().items())


def test_norms_and_products_against_numpy() -> None:
    net = mlp()
    a, b = random_vector(net, 1), random_vector(net, 2)
    u, v = flat(a).numpy(), flat(b).numpy()
    assert a.size == len(u) == sum(p.numel() for p in net.parameters())
    assert a.norm() == pytest.approx(np.linalg.norm(u), rel=1e-14)
    assert a.dot(b) == pytest.approx(u @ v, rel=1e-12)
    assert a.cosine(b) == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), rel=1e-12)
    assert a.rms() == pytest.approx(np.sqrt(np.mean(u**2)), rel=1e-14)
    layers = a.layer_norms()
    assert list(layers) == ["0", "2"]
    expected = math.hypot(float(a["0.weight"].norm()), float(a["0.bias"].norm()))
    assert layers["0"] == pytest.approx(expected, rel=1e-14)
    assert math.hypot(*layers.values()) == pytest.approx(a.norm(), rel=1e-14)
    assert math.isnan((0 * a).cosine(b))


def test_float32_norms_are_summed_in_float64() -> None:
    tau = TaskVector.from_tensors({"w": torch.full((30_000_000,), 0.1)})
    assert tau.norm() == pytest.approx(float(torch.tensor(0.1)) * 30_000_000**0.5, rel=1e-12)
    assert tau.dot(tau) == pytest.approx(tau.norm() ** 2, rel=1e-12)


def test_restrict_keeps_the_rest_of_the_model() -> None:
    net = mlp()
    tau = random_vector(net, 1)
    last = tau.restrict("2")
    assert list(last.tensors) == ["2.weight", "2.bias"]
    edited = last.apply_to(net)
    assert torch.equal(edited[0].weight, net[0].weight)
    assert torch.equal(edited[2].weight, net[2].weight + tau["2.weight"])
    with pytest.raises(InputError, match=r"the second task vector has no '0.weight', '0.bias': restrict both"):
        tau + last
    with pytest.raises(InputError, match=r"the first task vector has no '0.weight'"):
        last - tau


def test_half_precision_vectors_move_by_the_rounded_sum() -> None:
    net = nn.Linear(8, 8).bfloat16()
    tuned = copy.deepcopy(net)
    with torch.no_grad():
        tuned.weight.add_(0.01 * torch.randn(8, 8))
    tau = TaskVector(net, tuned)
    assert tau["weight"].dtype == torch.bfloat16
    exact = net.weight.double() + 0.5 * tau["weight"].double()
    moved = tau.apply_to(net, 0.5).weight
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, exact.bfloat16())


# ------------------------------------------------------------------------------------------------ kinds of sources


def test_modules_and_state_dicts_give_the_same_vector() -> None:
    net, tuned = mlp(0), mlp(1)
    tau = TaskVector(net, tuned)
    for pair in ((net.state_dict(), tuned), (net, tuned.state_dict()), (net.state_dict(), tuned.state_dict())):
        assert torch.equal(flat(TaskVector(*pair)), flat(tau))
    edited = tau.apply_to(net.state_dict(), scale=0.5)
    assert isinstance(edited, dict)
    expected = tau.apply_to(net, scale=0.5).state_dict()
    assert all(torch.equal(edited[k], expected[k]) for k in expected)


def test_a_compiled_module_is_its_original() -> None:
    net, tuned = mlp(0), mlp(1)
    tau = TaskVector(torch.compile(net), torch.compile(tuned))
    assert list(tau.tensors) == [k for k, _ in net.named_parameters()]
    assert isinstance(tau.apply_to(torch.compile(net)), nn.Sequential)


def test_linearised_networks_have_the_same_names_and_no_second_copy_in_the_vector() -> None:
    net, tuned = mlp(0), mlp(1)
    lin = bs.linearize(net)
    lin.load_state_dict(tuned.state_dict())
    tau = TaskVector(net, lin)
    assert torch.equal(flat(tau), flat(TaskVector(net, tuned)))
    assert tau.size == sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(dict(tau.tensors), lin.displacement, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.embed(i))


def test_tied_tensors_count_and_move_once() -> None:
    net, tuned = Tied(), Tied()
    tau = TaskVector(net, tuned)
    assert list(tau.tensors) == ["embed.weight"]
    assert dict(tau.aliases) == {"head.weight": "embed.weight"}
    assert tau.size == 15
    assert tau["head.weight"] is tau["embed.weight"]
    edited = tau.apply_to(net)
    assert edited.head.weight is edited.embed.weight
    torch.testing.assert_close(edited.embed.weight, tuned.embed.weight)
    state = tau.apply_to(net.state_dict())
    assert state["head.weight"] is state["embed.weight"]
    torch.testing.assert_close(state["embed.weight"], tuned.embed.weight.detach())
    # a state dict that lost the tie, or one of the names, is still the same network
    for source in (
        {k: t.clone() for k, t in tuned.state_dict().items()},
        {"head.weight": tuned.head.weight},
        {"embed.weight": tuned.embed.weight},
    ):
        assert torch.equal(flat(TaskVector(net, source)), flat(tau))
    # and what is tied in the vector only is moved under both names
    apart = tau.apply_to({k: t.clone() for k, t in net.state_dict().items()})
    torch.testing.assert_close(apart["head.weight"], tuned.embed.weight.detach())
    torch.testing.assert_close(apart["embed.weight"], tuned.embed.weight.detach())


def test_tied_tensors_that_came_apart_are_refused() -> None:
    net, tuned = Tied(), Tied()
    apart = {k: t.clone() for k, t in tuned.state_dict().items()}
    apart["head.weight"] += 1
    with pytest.raises(
        InputError, match=r"'embed.weight' and 'head.weight' are tied on the other side, but differ in f"
    ):
        TaskVector(net, apart)
    two = TaskVector({k: torch.zeros(5, 3) for k in apart}, apart)
    assert two.size == 30
    with pytest.raises(InputError, match=r"are tied in the model, but the task vector moves them apart"):
        two.apply_to(net)
    with pytest.raises(InputError, match="tied in one of the two task vectors"):
        two + TaskVector(net, tuned)


def test_a_hugging_face_model_with_tied_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    net, tuned = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    tau = TaskVector(net, tuned)
    assert tau.size == sum(p.numel() for p in net.parameters())
    ids = torch.arange(6).reshape(2, 3)
    before = net(ids).logits
    edited = tau.apply_to(net)
    torch.testing.assert_close(edited(ids).logits, tuned(ids).logits)
    assert edited.lm_head.weight is edited.transformer.wte.weight
    assert torch.equal(net(ids).logits, before)


# ------------------------------------------------------------------------------------------------------- buffers


def batch_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net(torch.randn(64, 3) * (1 + seed))
    return net.eval()


@pytest.mark.parametrize("plain", [False, True])
def test_statistics_that_differ_must_be_spoken_about(plain: bool) -> None:
    net, tuned = batch_norm(0), batch_norm(1)
    given = (net.state_dict(), tuned.state_dict()) if plain else (net, tuned)
    with pytest.raises(InputError, match=r"the buffer '1.running_mean' .* differs: use buffers='keep', or 'move'"):
        TaskVector(*given)
    weights = sum(p.numel() for p in net.parameters())
    x = torch.randn(7, 3)

    moved = TaskVector(*given, buffers="move")
    assert moved.buffers == {"1.running_mean", "1.running_var"}
    assert moved.size == weights
    assert moved.norm() == pytest.approx(TaskVector(*given, buffers="keep").norm())
    torch.testing.assert_close(moved.apply_to(net)(x), tuned(x))
    half = moved.apply_to(net, 0.5)[1].running_var
    torch.testing.assert_close(half, (net[1].running_var + tuned[1].running_var) / 2)

    kept = TaskVector(*given, buffers="keep")
    edited = kept.apply_to(net)
    assert torch.equal(edited[1].running_mean, net[1].running_mean)
    torch.testing.assert_close(edited[0].weight, tuned[0].weight)
    with pytest.raises(InputError, match=r"scale=-100 makes the variance '1.running_var' negative"):
        moved.apply_to(net, scale=-100)


def test_statistics_that_stayed_need_no_word() -> None:
    net = batch_norm(0)
    tuned = copy.deepcopy(net)
    with torch.no_grad():
        tuned[0].weight.add_(1.0)
    tau = TaskVector(net, tuned)
    assert not tau.buffers
    assert tau.norm() == pytest.approx(12**0.5, rel=1e-6)


class Counter(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(count)))
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("scratch", torch.tensor(float(count)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def test_integers_are_never_scaled_and_scratch_buffers_not_compared() -> None:
    with pytest.raises(InputError, match=r"the buffer 'count' \(torch.int64\) differs: use buffers='keep'"):
        TaskVector(Counter(1), Counter(2))
    with pytest.raises(InputError, match=r"'count' .* differs: use buffers='keep'"):
        TaskVector(Counter(1), Counter(2), buffers="move")
    tau = TaskVector(Counter(1), Counter(2), buffers="keep")
    edited = tau.apply_to(Counter(1), scale=0.5)
    assert edited.count == 1
    assert edited.scratch == 1.0
    assert torch.equal(edited.w, torch.full((2,), 1.5))
    tracked = TaskVector(batch_norm(0), batch_norm(1), buffers="move").apply_to(batch_norm(0), 0.5)
    assert tracked[1].num_batches_tracked.dtype == torch.int64


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_named() -> None:
    one, two = {"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    with pytest.raises(InputError, match="'b' is not in pretrained"):
        TaskVector(one, two)
    with pytest.raises(InputError, match="'b' is not in finetuned"):
        TaskVector(two, one)
    assert list(TaskVector(one, two, params="w").tensors) == ["w"]
    with pytest.raises(InputError, match=r"'w' has shape \[2, 3\] in pretrained and \[3, 2\] in finetuned"):
        TaskVector(one, {"w": torch.zeros(3, 2)})
    with pytest.raises(InputError, match=r"'w' has dtype torch.float32 in pretrained and torch.float64 in finetuned"):
        TaskVector(one, {"w": torch.zeros(2, 3).double()})
    with pytest.raises(InputError, match="'w' has device cpu in pretrained and meta in finetuned"):
        TaskVector(one, {"w": torch.zeros(2, 3, device="meta")})
    with pytest.raises(InputError, match="finite floating-point numbers, not 'w'"):
        TaskVector(one, {"w": torch.full((2, 3), math.nan)})
    with pytest.raises(InputError, match=r"finetuned: 'epoch' is a int, not a tensor"):
        TaskVector(one, {"w": torch.zeros(2, 3), "epoch": 3})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"pretrained='model.pt': an nn.Module or a dict is needed"):
        TaskVector("model.pt", one)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="buffers='drop' is not known"):
        TaskVector(one, one, buffers="drop")
    with pytest.raises(InputError, match="finite floating-point numbers, not none"):
        TaskVector({"w": torch.zeros(2) * 1j}, {"w": torch.zeros(2) * 1j})
    with pytest.raises(InputError, match="finite floating-point numbers, not none"):
        TaskVector({"n": torch.tensor(1)}, {"n": torch.tensor(1)})
    with pytest.raises(InputError, match="finite floating-point numbers, not 'n'"):
        TaskVector.from_tensors({"n": torch.tensor([1])})
    with pytest.raises(InputError, match="not 'w'"):
        TaskVector.from_tensors({"w": torch.tensor([math.inf])})
    with pytest.raises(InputError, match="not none"):
        TaskVector.from_tensors({})


@pytest.mark.gpu
def test_devices_that_differ_are_named() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"'weight' has device cpu in pretrained and cuda:0 in finetuned"):
        TaskVector(net, copy.deepcopy(net).cuda())
    tau = TaskVector(net, nn.Linear(2, 2))
    with pytest.raises(InputError, match="device"):
        tau.apply_to(copy.deepcopy(net).cuda())
    assert tau.to("cuda").apply_to(copy.deepcopy(net).cuda()).weight.is_cuda


def test_applying_elsewhere_is_refused_by_name() -> None:
    net = mlp()
    tau = random_vector(net, 1)
    with pytest.raises(InputError, match=r"the model has no '2.weight', '2.bias', which the task vector moves"):
        tau.apply_to(net[:1])
    with pytest.raises(InputError, match=r"'0.weight' has dtype torch.float64 in the task vector and torch.float32"):
        tau.apply_to(copy.deepcopy(net).float())
    with pytest.raises(InputError, match=r"'0.weight' has shape \[6, 4\] in the task vector and \[6, 5\]"):
        tau.apply_to(mlp(inputs=5))
    assert tau.to(dtype=torch.float32).apply_to(copy.deepcopy(net).float())[0].weight.dtype == torch.float32
    with pytest.raises(InputError, match="scale=nan: a finite number is needed"):
        tau.apply_to(net, scale=math.nan)
    with pytest.raises(InputError, match="scale='1': one number is needed"):
        tau.apply_to(net, scale="1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="divided by zero"):
        tau / 0
    for wrong in (lambda: tau * tau, lambda: tau + 1, lambda: tau - 1, lambda: tau / tau, lambda: torch.ones(2) * tau):
        with pytest.raises(TypeError):
            wrong()


def test_constants_of_a_linearised_network_do_not_move_silently() -> None:
    net = mlp()
    tau, x = random_vector(net, 1), points(5, 2)
    with pytest.raises(InputError, match=r"moves '0.weight', not linearised: use restrict\(...\)"):
        tau.apply_to(bs.linearize(net, params="2"))
    last = tau.restrict("2").apply_to(bs.linearize(net, params="2"))
    expected = bs.tangent.posthoc(net, {**net.state_dict(), **tau.restrict("2").apply_to(net.state_dict())})
    torch.testing.assert_close(last(x), expected(x), rtol=0, atol=1e-12)
    norm, other = batch_norm(0), batch_norm(1)
    with pytest.raises(InputError, match=r"moves '1.running_mean', not linearised: use .* buffers='keep'"):
        TaskVector(norm, other, buffers="move").apply_to(bs.linearize(norm))


# ------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path: Path, dtype: torch.dtype) -> None:
    net, tuned = (batch_norm(seed).to(dtype) for seed in (0, 1))
    tau = TaskVector(net, tuned, buffers="move")
    path = tau.save(tmp_path / "deep" / "tau.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["tau.safetensors"]
    again = TaskVector.load(path)
    assert again.buffers == tau.buffers
    assert list(again.tensors) == list(tau.tensors)
    assert all(torch.equal(again[k], tau[k]) and again[k].dtype == dtype for k in tau.tensors)
    assert set(load_file(path)) == set(tau.tensors)  # anybody can read it
    ties = TaskVector(Tied(), Tied())
    assert dict(TaskVector.load(ties.save(tmp_path / "ties")).aliases) == dict(ties.aliases)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    tau = TaskVector.from_tensors({"w": torch.arange(1000.0)})
    path = tau.save(tmp_path / "tau.safetensors")
    whole = path.read_bytes()
    with pytest.raises(CorruptError, match="is missing"):
        TaskVector.load(tmp_path / "other")
    path.write_bytes(whole[:-100])
    with pytest.raises(CorruptError, match="not a whole safetensors file"):
        TaskVector.load(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptError, match="'w' is not what was saved"):
        TaskVector.load(path)
    path.write_bytes(whole.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    with pytest.raises(CorruptError, match="not a task vector saved by biascope in format 1"):
        TaskVector.load(path)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(CorruptError, match="not a task vector saved by biascope"):
        TaskVector.load(path)


def test_readable() -> None:
    net = nn.Sequential(OrderedDict(body=nn.Linear(2, 2), head=nn.Linear(2, 1)))
    tau = TaskVector.from_tensors({k: torch.ones_like(p) for k, p in net.named_parameters()})
    assert repr(tau) == "TaskVector(9 weights, norm 3, float32, cpu)"
    assert "<td>body</td><td>2.449</td>" in tau._repr_html_()
    assert "body.weight" in tau
    assert "body" not in tau
