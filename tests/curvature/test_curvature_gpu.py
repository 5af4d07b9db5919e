"""The GPU gives the CPU's numbers."""

import pytest
import torch

import biascope as bs
from biascope.curvature.kronecker import eigh_of
from curvature.curvature_zoo import case, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["mlp", "conv2d", "norms", "words", "attention", "bare"])
@pytest.mark.parametrize(
    "representation", ["dense", "diagonal", "quasidiagonal", "kfac", "ekfac", "lowrank", "implicit"]
)
@pytest.mark.parametrize("options", [{}, {"estimator": "monte-carlo", "samples": 2}, {"likelihood": "bernoulli"}])
def test_same_as_cpu(name, representation, options):
    net, x = case(name)
    here = bs.fisher(net, x, representation, **options)
    there = bs.fisher(net.cuda(), x.cuda(), representation, **options)
    v = torch.randn(here.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative((there @ v.cuda()).cpu(), here @ v) < 1e-8
    block = torch.stack([v, v.flip(0), v.square()], 1)
    assert relative((there @ block.cuda()).cpu(), here @ block) < 1e-8
    assert relative(there.solve(v.cuda(), damping=0.3).cpu(), here.solve(v, damping=0.3)) < 1e-6
    assert relative(there.trace().cpu(), here.trace()) < 1e-9
    with pytest.raises(ValueError, match="on cuda"):
        there @ v


@pytest.mark.parametrize("representation", ["diagonal", "kfac", "ekfac", "implicit"])
def test_float32_is_full_float32_whatever_torch_allows(representation):
    """tf32, cuDNN's default for convolutions, would be off by 1e-3."""
    net, x = case("conv2d")
    exact = bs.fisher(net.double().cuda(), x.double().cuda(), representation)
    v = torch.randn(exact.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    want, trace = exact @ v, exact.trace()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rough = bs.fisher(net.float(), x.float().cuda(), representation)
        got, of_rough = rough @ v.float(), rough.trace()
        assert torch.get_float32_matmul_precision() == "high"  # the user's setting is put back
    finally:
        torch.set_float32_matmul_precision(before)
    assert abs(float(of_rough / trace) - 1) < 1e-5
    if representation in ("diagonal", "implicit"):  # products of stored factors follow the user's setting
        assert relative(got.double(), want) < 3e-5


def test_eigendecompositions_side_by_side():
    g = torch.Generator().manual_seed(0)
    stacks = []
    for groups, d in ((1, 300), (2, 40), (1, 301), (1, 3), (1, 299), (1, 150), (3, 7), (1, 80), (1, 90), (1, 100)):
        X = torch.randn(groups, 2 * d, d, generator=g)
        stacks.append(X.mT @ X / d)
    for _ in range(3):  # what one round leaves to the allocator is used by the next
        for S, (values, U) in zip(stacks, eigh_of([S.cuda() for S in stacks])):
            exact = torch.linalg.eigvalsh(S.double()).flip(-1)
            assert float((values.cpu() - exact).abs().max() / exact.max()) < 1e-5
            assert float(((U * values[:, None]) @ U.mT - S.cuda()).abs().max() / S.abs().max()) < 1e-4
