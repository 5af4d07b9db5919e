"""Scripted and traced modules, whose code and attributes lie outside of Python, in the hashes of kernels."""

import io
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.kernels.fingerprint import fingerprint, module_fingerprint

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


class Graph(nn.Module):
    """A linear layer on the neighbours of nodes."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("adjacency", adjacency)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer((self.adjacency @ x.T).T)
        return out


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
@pytest.mark.filterwarnings("ignore:Sparse C")
def test_sparse_tensors(layout: str) -> None:
    """Their values, places and layout count; kernels of networks with such buffers are those of dense ones."""
    A = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])

    def sparse(t: Tensor) -> Tensor:
        return t.to_sparse(layout=getattr(torch, layout))

    for hashed in (lambda t: fingerprint({"": t}),):
        same = [hashed(sparse(A)), hashed(sparse(A.clone()))]
        others = [hashed(A), hashed(sparse(A.T)), hashed(sparse(2 * A)), hashed(sparse(A.flip(0)))]
        assert same[0] == same[1]
        assert len({same[0], *others}) == 5
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected, found = bs.ntk(Graph(A), x), bs.ntk(Graph(sparse(A)), x)
    torch.testing.assert_close(found.tensor, expected.tensor, rtol=1e-5, atol=1e-6)


def test_views_that_are_conjugate_negative_or_of_one_strided_entry() -> None:
    z = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    for view in (z.conj(), z.conj().imag, z[:1].conj().imag, torch.ones(1, 4)[:, ::4]):
        plain = view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert fingerprint({"": view}) == fingerprint({"": plain})
    assert fingerprint({"": z.conj()}) != fingerprint({"": z})
    x = torch.tensor([[2.0, 0.0, 0.0, 0.0]])[:, ::4]  # one example of one entry
    assert float(bs.ntk(nn.Linear(1, 1), x).matrix()) == pytest.approx(5.0)
