"""Every awkward module, against brute-force autograd in float64: J, J v, J^T u, and every kernel by every strategy."""

from typing import Any

import pytest
import torch
from torch import Tensor

import biascope as bs
from zoo import ZOO, brute_force


def build(name: str) -> tuple[torch.nn.Module, Any, Tensor]:
    torch.manual_seed(sum(map(ord, name)))
    model, x = ZOO[name]()
    return model, x, brute_force(model, x)


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-300))


def tolerance(name: str) -> float:
    # TorchScript's own fuser is only accurate to 1e-8 in float64; everything else is held to 1e-10
    return 1e-6 if name == "scripted" else 1e-10


def halves(x: Any) -> tuple[Any, slice]:
    s = slice(0, 2)
    return ({k: v[s] for k, v in x.items()} if isinstance(x, dict) else x[s]), s


def test_the_zoo_is_large() -> None:
    assert len(ZOO) >= 60


@pytest.mark.parametrize("name", ZOO)
def test_jacobian(name: str) -> None:
    model, x, J0 = build(name)
    J = bs.Jacobian(model, x, precision="float64")
    assert error(J.to_dense(), J0) < tolerance(name)
    v = torch.randn(J.p, dtype=torch.float64)
    assert error(J @ v, J0 @ v) < tolerance(name)
    u = torch.randn(J0.shape[:2], dtype=torch.float64)
    assert error((J.T @ u).as_subclass(Tensor), torch.einsum("nc,ncp->p", u, J0)) < tolerance(name)
    covered = {r.parameter for r in J.coverage().rows}
    assert covered == {k for k, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ZOO)
def test_kernels(name: str) -> None:
    model, x, J = build(name)
    full = torch.einsum("iap,jbp->iajb", J, J)
    expected = {
        "full": full,
        "trace": full.diagonal(dim1=1, dim2=3).sum(-1),
        "diagonal": full.diagonal(dim1=1, dim2=3).movedim(-1, 0),
        "sum": full.sum((1, 3)),
        0: full[:, 0, :, 0],
    }
    for strategy in ("auto", "gram", "contract"):
        for outputs, value in expected.items():
            K = bs.ntk(model, x, outputs=outputs, strategy=strategy, precision="float64")
            assert error(K.tensor, value) < tolerance(name), (strategy, outputs)
    x2, s = halves(x)
    for outputs in ("full", "trace", "diagonal"):
        cross = bs.ntk(model, x, x2, outputs=outputs, precision="float64").tensor
        want = expected[outputs][:, :, s] if outputs != "trace" else expected[outputs][:, s]
        assert error(cross, want) < tolerance(name), outputs


@pytest.mark.parametrize(
    "name", ["conv2d_groups", "vit_like", "gru", "tied_embedding_and_decoder", "layer_called_twice"]
)
def test_products_are_an_independent_route(name: str) -> None:
    model, x, J = build(name)
    K = bs.ntk(model, x, strategy="products", precision="float64")
    assert error(K.tensor, torch.einsum("iap,jbp->iajb", J, J)) < 1e-10


@pytest.mark.parametrize("name", ZOO)
def test_layers_sum_to_the_kernel(name: str) -> None:
    model, x, J = build(name)
    K = bs.ntk(model, x, outputs="trace", precision="float64", by_layer=True)
    parts = K.by_layer()
    assert error(torch.stack([k.tensor for k in parts.values()]).sum(0), K.tensor) < 1e-12
    columns = 0
    by_name: dict[str, Tensor] = {}
    owner = {name: b.block.layer for b in K.plan.blocks for name in b.block.names}
    for key, p in model.named_parameters():
        layer = owner[key]
        Jl = J[..., columns : columns + p.numel()]
        by_name[layer] = by_name.get(layer, torch.zeros(())) + torch.einsum("iap,jap->ij", Jl, Jl)
        columns += p.numel()
    assert set(parts) == set(by_name)
    for layer, kernel in parts.items():
        assert float((kernel.tensor - by_name[layer]).norm()) <= tolerance(name) * float(K.tensor.norm()), layer


def test_the_module_is_left_alone() -> None:
    for name in ("batch_norm2d_eval", "transformer_encoder_layer", "tied_linear_weights"):
        model, x, _ = build(name)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
        attributes = {n: set(vars(m)) for n, m in model.named_modules()}
        rng = torch.random.get_rng_state()
        bs.ntk(model, x)
        bs.Jacobian(model, x).to_dense()
        assert torch.equal(rng, torch.random.get_rng_state())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert flags == [(p.requires_grad, p.grad is None) for p in model.parameters()]
        assert attributes == {n: set(vars(m)) for n, m in model.named_modules()}
        assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("name", ZOO)
def test_single_backward_passes_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vmap cannot (or memory is short), k single backward passes replace the batched one."""
    from biascope.network.functional import _CERTIFICATES
    from biascope.network.layers import pilot

    model, x, J0 = build(name)
    if name in {"linear", "conv2d_groups", "vit_like", "layer_norm", "embedding", "conv_transpose2d"}:
        assert bs.Jacobian(model, x).anatomy.batched
    _CERTIFICATES.clear()
    monkeypatch.setattr(pilot, "_can_batch", lambda *given: False)
    J = bs.Jacobian(model, x, precision="float64")
    assert not J.anatomy.batched
    assert error(J.to_dense(), J0) < tolerance(name)
    K = bs.ntk(model, x, precision="float64")
    assert error(K.tensor, torch.einsum("iap,jbp->iajb", J0, J0)) < tolerance(name)
    _CERTIFICATES.clear()
