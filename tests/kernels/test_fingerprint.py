"""Scripted and traced modules, whose code and attributes lie outside of Python, in the hashes of kernels."""

import io
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.errors import InputError
from biascope.kernels.fingerprint import checksum, module_fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def tripled(x: Tensor) -> Tensor:
    return 3 * x


class Scaled(nn.Module):
    scale: float

    def __init__(self, scale: float = 1.0, act: nn.Module | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 3), act or nn.ReLU()])
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.scale + torch.tensor([1.0, 2.0, 3.0])


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return tripled(x)


def traced(net: nn.Module) -> nn.Module:
    return torch.jit.trace(net, torch.ones(1, 2))


@pytest.mark.parametrize("make", [torch.jit.script, traced])
def test_scripted_modules_count_by_code_and_attributes(make: Callable[[nn.Module], nn.Module]) -> None:
    one = module_fingerprint(make(Scaled()))
    assert one == module_fingerprint(make(Scaled()))  # other weights: values are hashed beside
    assert one != module_fingerprint(make(Scaled(scale=2.0)))
    assert one != module_fingerprint(make(Scaled(act=nn.Tanh())))
    assert (one != module_fingerprint(make(Scaled()).eval())) == (make is not traced)  # traces have no modes
    assert one != module_fingerprint(Scaled())


def test_functions_called_by_a_scripted_module_count() -> None:
    first, second = Doubled(), Tripled()
    second.__class__.__name__ = "Doubled"
    assert module_fingerprint(torch.jit.script(first)) != module_fingerprint(torch.jit.script(second))


def test_frozen_modules_count_by_their_constants() -> None:
    def frozen(seed: int) -> nn.Module:
        net = Scaled().eval()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        return torch.jit.freeze(torch.jit.script(net))

    assert module_fingerprint(frozen(0)) == module_fingerprint(frozen(0))
    assert module_fingerprint(frozen(0)) != module_fingerprint(frozen(1))


def test_saved_modules_keep_their_hash_in_another_process() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Scaled()), buffer)
    code = (
        "import io, sys, torch; from biascope.kernels.fingerprint import module_fingerprint as f;"
        "print(f(torch.jit.load(io.BytesIO(sys.stdin.buffer.read()))))"
    )
    said = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], input=buffer.getvalue(), capture_output=True)
        for _ in range(2)
    ]
    assert said[0].returncode == 0, said[0].stderr.decode()
    assert said[0].stdout == said[1].stdout


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.complex64]
)
def test_checksums_notice_a_bit_a_place_and_nothing_else(dtype: torch.dtype) -> None:
    a = (torch.arange(1, 301) % 250).reshape(20, 15).to(dtype)
    same = int(checksum(a))
    assert int(checksum(a.clone())) == same
    assert int(checksum(a.T.contiguous().T)) == same  # the same values in another memory order
    assert int(checksum(a, piece=7)) == same
    changed = {same}
    for i in range(300):
        b = a.clone().reshape(-1)
        b.view(torch.uint8)[i * a.element_size()] ^= 1  # the last bit of one element
        changed.add(int(checksum(b)))
        c = a.clone().reshape(-1)
        c[[i, (i + 1) % 300]] = c[[(i + 1) % 300, i]]
        changed.add(int(checksum(c)))
    assert len(changed) == 601


def test_checksums_of_zeros_and_of_opposite_changes() -> None:
    assert int(checksum(torch.zeros(3))) != int(checksum(torch.zeros(4)))
    assert int(checksum(torch.zeros(3))) != int(checksum(-torch.zeros(3)))
    a = torch.arange(100)
    sums = {int(checksum(a + torch.roll(torch.tensor([1, -2, 1] + [0] * 97), i))) for i in range(98)}
    assert len(sums) == 98  # sums weighted by the place alone would all be that of a
    assert int(checksum(a)) not in sums


def test_kernels_of_scripted_modules_notice_a_changed_attribute() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(Scaled(act=nn.Tanh()))
    net = nn.Sequential(script)
    K = bs.ntk(net, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(sum(k.tensor for k in K.by_layer().values()), K.tensor, rtol=1e-5)
    K = bs.ntk(net, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    script.scale = 3.0
    with pytest.raises(InputError, match="changed since"):
        K.by_layer()
