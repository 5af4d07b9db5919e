"""Sparse, conjugate and oddly strided tensors in the hashes of kernels."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.kernels.fingerprint import fingerprint


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
