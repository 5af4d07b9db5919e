"""A module taken apart: what cannot be differentiated is refused by name."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.curvature.plan import REPRESENTATIONS
from biascope.network.door import modules_of, refuse_devices
from biascope.network.functional import functional, tensors_in
from biascope.studies import configure
from biascope.support.arguments import device_of
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import batches

X = torch.ones(4, 3)


class Shifted(nn.Module):
    """A linear layer whose input is moved by a buffer."""

    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("shift", shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2]."""
        return self.body(x + self.shift)


@pytest.mark.parametrize("ask", [bs.fisher, bs.ntk, bs.Jacobian], ids=["fisher", "ntk", "jacobian"])
def test_parameters_without_values_are_refused(ask) -> None:
    with pytest.raises(InputError, match=r"parameter '0\.weight'.*meta.*no values.*to_empty"):
        ask(nn.Sequential(nn.Linear(3, 2, device="meta"), nn.Tanh()), X)
    partly = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
    with pytest.raises(InputError, match=r"parameter '1\.weight'.*meta"):
        ask(partly, X, params="0")


@pytest.mark.parametrize("ask", [bs.fisher, bs.ntk, bs.Jacobian], ids=["fisher", "ntk", "jacobian"])
def test_buffers_without_values_are_refused(ask) -> None:
    with pytest.raises(InputError, match=r"buffer 'shift'.*meta.*no values.*to_empty"):
        ask(Shifted(torch.ones(3, device="meta")), X)


@pytest.mark.gpu
def test_buffers_elsewhere_are_refused() -> None:
    with pytest.raises(InputError, match=r"buffer 'shift' lives on cuda:0.*parameters on cpu.*model\.to"):
        bs.ntk(Shifted(torch.ones(3, device="cuda")), X)
    bs.ntk(Shifted(torch.tensor(1.0)).cuda(), X)
    number = Shifted(torch.tensor(1.0))  # torch lets a single number stay on the CPU
    number.body.cuda()
    bs.ntk(number, X)


@pytest.mark.parametrize("device", ["mps", "meta", "meta:0", "xpu", torch.device("meta")])
def test_nothing_is_computed_on_devices_that_the_command_refuses(device: str | torch.device, tmp_path: Path) -> None:
    message = f"device '{device}' is not supported here; use cpu, cuda or cuda:0"
    vector = bs.editing.TaskVector({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    vector.save(tmp_path / "v.safetensors")
    bs.fisher(nn.Linear(3, 2), X, "kfac").save(tmp_path / "f.safetensors")
    asks: list[Callable[[], object]] = [
        lambda: device_of(device),
        lambda: vector.to(device),
        lambda: bs.editing.TaskVector.load(tmp_path / "v.safetensors", device),
        lambda: bs.load_curvature(tmp_path / "f.safetensors", device),
        lambda: bs.nads(lambda: nn.Linear(4, 1), (4,), 4, device=device),
        lambda: bs.average_geometry(lambda: nn.Linear(4, 1), (4,), 4, device=device),
        lambda: bs.ensembles.record(lambda: nn.Linear(4, 1)).draw(0, 0, 2, device=device),
        lambda: bs.spectral.perturb.high_frequency_volume((1, 4, 1), 1.0, 0.1, (1,), samples=2, device=device),
        lambda: configure("nad/fig4a", device=str(device)),
    ]
    for ask in asks:
        with pytest.raises(InputError, match=message):
            ask()


@pytest.mark.parametrize("device", ["", "gpu", 1.5, "cuda:x"])
def test_what_names_no_device_is_refused(device: Any) -> None:
    with pytest.raises(InputError, match=f"device {device!r} is not a torch device"):
        device_of(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(each).index for each in ("cuda", "cuda:1", torch.device("cuda", 1))] == [None, 1, 1]
    with pytest.raises(InputError, match=r"device 'cuda:2': torch sees 2 CUDA device\(s\), the first is cuda:0"):
        device_of("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees no CUDA device here; use cpu"):
        device_of("cuda")


def test_buffers_elsewhere_are_refused_without_a_gpu() -> None:
    cpu, far = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(InputError, match=r"buffer 'shift' lives on cpu.*parameters on cuda:1.*model\.to\('cuda:1'\)"):
        refuse_devices({"w": _On(far, "cuda:1")}, {"shift": cpu})
    refuse_devices({"w": _On(far, "cuda:1")}, {"shift": torch.tensor(1.0)})  # a single number may stay on the CPU
    refuse_devices({"w": cpu}, {"shift": cpu})


class _On:
    """Stands for a tensor on a device that is not here."""

    def __init__(self, t: torch.Tensor, device: str) -> None:
        self.device, self._t = torch.device(device), t

    def dim(self) -> int:
        """As the tensor's."""
        return self._t.dim()


ASKS = {"ntk": lambda net, x: bs.ntk(net, x).tensor, "jacobian": lambda net, x: bs.Jacobian(net, x).to_dense()} | {
    name: lambda net, x, name=name: bs.fisher(net, x, representation=name) @ torch.ones(26) for name in REPRESENTATIONS
}


@pytest.fixture
def net() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return made


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_derivatives_do_not_depend_on_no_grad(ask, net: nn.Module) -> None:
    with torch.no_grad():
        within = ask(net, X)
    torch.testing.assert_close(within, ask(net, X), rtol=0, atol=0)
    assert within.abs().max() > 0


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_inference_mode_is_refused_by_name(ask, net: nn.Module) -> None:
    with torch.inference_mode(), pytest.raises(InputError, match=r"inference_mode is on.*no_grad"):
        ask(net, X)


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_inputs_made_in_inference_mode_serve(ask, net: nn.Module) -> None:
    with torch.inference_mode():
        x = X + 0
    torch.testing.assert_close(ask(net, x), ask(net, X), rtol=0, atol=0)


def test_parameters_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        made = nn.Linear(3, 2)
    with pytest.raises(InputError, match=r"parameter 'weight' was made under torch\.inference_mode"):
        bs.ntk(made, X)


@pytest.mark.parametrize("ask", [bs.fisher, bs.ntk, bs.Jacobian], ids=["fisher", "ntk", "jacobian"])
def test_data_parallel_is_refused_by_name(ask, net: nn.Module) -> None:
    with pytest.raises(InputError, match=r"DataParallel copies the network.*pass net\.module"):
        ask(nn.DataParallel(net), X)
    with pytest.raises(InputError, match=r"DataParallel '1' copies.*1\.module in its place"):
        ask(nn.Sequential(net, nn.DataParallel(nn.Linear(2, 2))), X)


class Knot(nn.Module):
    """A shared module, a tied weight, an absent bias, a cycle, and buffers of which one is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.first = nn.Linear(3, 3, bias=False)
        self.again = nn.ModuleList([self.first, nn.Linear(3, 3), None, nn.BatchNorm1d(3)])
        self.again[1].weight = self.first.weight
        self.register_buffer("mean", self.again[3].running_mean)
        self.register_module("missing", None)
        object.__setattr__(self.first, "_modules", {"back": self})


def test_one_walk_finds_what_torch_finds() -> None:
    net = Knot()
    parts = modules_of(net)
    assert [(name, m) for m, name in parts.items()] == list(net.named_modules())
    for kind, want in (("_parameters", net.named_parameters()), ("_buffers", net.named_buffers())):
        got = tensors_in(parts, kind)
        for (name, t), (want_name, want_t) in zip(got.items(), want, strict=True):
            assert name == want_name
            assert t is want_t


def test_what_is_frozen_and_what_is_not() -> None:
    net = Shifted(torch.ones(3))
    f = functional(net, params="body.bias", precision="float64")
    assert list(f.params) == ["body.bias"]
    assert list(f.frozen) == ["body.weight", "shift"]
    assert {t.dtype for t in (*f.params.values(), *f.frozen.values())} == {torch.float64}
    net.body.weight.requires_grad_(False)
    assert list(functional(net).params) == ["body.bias"]


class Secretive(nn.Sequential):
    """Hides its biases."""

    def named_parameters(self, *args, **kwargs):
        """Weights only."""
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if "weight" in name)


def test_parameters_that_a_class_hides_stay_hidden() -> None:
    net = Secretive(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert list(functional(net).params) == ["0.weight", "2.weight"]
    assert bs.fisher(net, X, "kfac").shape == (20, 20)


def test_inputs_are_refused_for_what_is_no_number_and_not_for_large_sums() -> None:
    huge = torch.full((4, 3), 3e38)  # their sum is infinite, they are not
    assert next(batches(huge))[0] is huge
    for bad, values in ((2, (float("inf"),)), (1, (float("nan"),)), (0, (float("inf"), float("-inf")))):
        x = X.clone()
        x[bad, : len(values)] = torch.tensor(values)
        with pytest.raises(InputError, match=f"x has a NaN or infinity, first in example {bad}"):
            next(batches(x))


WRAPPED = """
import copy, sys, torch, biascope as bs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from biascope.support.errors import UnsupportedError
torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
torch.testing.assert_close(bs.ntk(nn.parallel.DistributedDataParallel(net), x).tensor, bs.ntk(net, x).tensor)
old = FullyShardedDataParallel(copy.deepcopy(net), device_id=torch.device("cpu"), use_orig_params=True)
new = fully_shard(copy.deepcopy(net), mesh=init_device_mesh("cpu", (1,)))
asks = [lambda m: bs.ntk(m, x), lambda m: bs.Jacobian(m, x), lambda m: bs.fisher(m, x), bs.linearize]
for sharded in (old, new, nn.Sequential(new)):
    if sharded is not old:  # on one process, every parameter is whole
        torch.testing.assert_close(bs.fisher(sharded, x).trace(), bs.fisher(net, x).trace())
    some = [ask for ask in asks if ask is not asks[2] or sharded is old]
    for ask in (*some, lambda m: bs.Probe(m, x, torch.arange(5) % 2)):
        try:
            ask(sharded)
        except UnsupportedError as error:
            assert "spreads every parameter over the processes" in str(error), error
        else:
            raise AssertionError("not refused")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_ddp_is_seen_through_and_shards_are_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRAPPED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused_with_two_ways_out() -> None:
    plain, x = nn.Linear(3, 2), torch.randn(4, 3)
    for scripted in (torch.jit.script(plain), torch.jit.trace(plain, x)):
        with pytest.raises(UnsupportedError, match=r"TorchScript.*nn\.Sequential\(it\)"):
            functional(scripted)
        f = functional(nn.Sequential(scripted))
        assert torch.equal(f(f.params, x), plain(x))


class Checked(nn.Module):
    """Raises what torch does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 3:
            raise KeyError("three channels")
        return self.head(self.body(x))


@pytest.mark.parametrize(
    "call", [bs.ntk, bs.Jacobian, bs.fisher, lambda net, x: bs.hessian(net, (x, torch.zeros(len(x))))]
)
def test_the_layer_that_cannot_take_its_input_is_named(call) -> None:  # type: ignore[no-untyped-def]
    match = r"Checked cannot take inputs \[n, 3\]: its layer 'body.1', Linear\(in_features=5.*got \[n, 4\]"
    with pytest.raises(InputError, match=match) as raised:
        call(Checked(), torch.ones(4, 3))
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(KeyError, match="three channels"):  # the user's own word stands
        call(Checked(), torch.ones(4, 2))
