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
from biascope.kernels.fingerprint import checksum, fingerprint, module_fingerprint

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


def test_checksums_of_single_words_differ() -> None:
    """The mixing of a word can be undone; with shifts that repeat the sign, these two words gave one sum."""
    assert int(checksum(torch.tensor([1]))) != int(checksum(torch.tensor([1018231460777725122])))


def in_python(words: list[int]) -> int:
    """The same sum by whole numbers of any size."""
    a, b, c = -7046029254386353131, -4417276706812531889, -7723592293110705685
    total = 0
    for place, word in enumerate(words, start=1):
        mixed = ((word * a) ^ (place * b)) % 2**64
        mixed = (mixed ^ (mixed >> 31)) * c % 2**64
        total += mixed ^ (mixed >> 29)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def test_checksums_against_whole_numbers() -> None:
    words = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).view(torch.int64)
    assert int(checksum(words, piece=7)) == in_python(words.tolist())


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

    for hashed in (lambda t: fingerprint({"": t}), lambda t: int(checksum(t))):
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
        assert int(checksum(view)) == int(checksum(plain))
    assert fingerprint({"": z.conj()}) != fingerprint({"": z})
    assert int(checksum(z.conj())) != int(checksum(z))
    x = torch.tensor([[2.0, 0.0, 0.0, 0.0]])[:, ::4]  # one example of one entry
    assert float(bs.ntk(nn.Linear(1, 1), x).matrix()) == pytest.approx(5.0)
