"""A pair of Kronecker factors per expert, from whole gradients, against their definition in float64."""

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature import plan
from biascope.curvature.plan import matrix_shape
from biascope.curvature.uses import loss_gradients
from curvature.curvature_zoo import relative

E, OUT, IN = 3, 4, 5


class Experts(nn.Module):
    """Fused experts [e, o, i] under a router, and a head: [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(IN, E), nn.Parameter(torch.randn(E, OUT, IN))
        self.head = nn.Linear(OUT, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        h = torch.bmm(x.expand(E, *x.shape), self.experts.mT)  # [e, n, o]
        return self.head(torch.tanh(torch.einsum("eno,ne->no", h, weights)))


def network() -> Experts:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Experts().double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(7, IN, generator=g, dtype=torch.float64), torch.randint(0, 3, (7,), generator=g)


def test_experts_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BLOCK_LIMIT", 10)
    net = network()
    F = bs.fisher(net, data(), "ekfac", estimator="empirical")
    assert F.plan["experts"] == "ekfac"
    piece = next(p for p in F.pieces if p.names == ("experts",))
    M = loss_gradients(net, data(), params="experts").view(-1, E, OUT, IN)
    truth = torch.zeros(E, OUT * IN, E, OUT * IN, dtype=torch.float64)
    for e in range(E):
        G = M[:, e]
        U_B = torch.linalg.eigh((G @ G.mT).mean(0))[1]
        U_A = torch.linalg.eigh((G.mT @ G).mean(0))[1]
        s = (U_B.T @ G @ U_A).square().mean(0).flatten()
        U = torch.kron(U_B.contiguous(), U_A.contiguous())
        truth[e, :, e] = U @ torch.diag(s) @ U.T
    size = E * OUT * IN
    assert relative(piece.to_dense(), truth.view(size, size)) < 1e-9
    for e in range(E):  # the factors have the trace of the metric
        assert relative(piece.s_B[e].sum() * piece.s_A[e].sum(), piece.s[e].sum()) < 1e-9
    v = torch.randn(F.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    damped = F.to_dense() + 0.1 * torch.eye(len(v), dtype=torch.float64)
    assert relative(F.solve(v, 0.1), torch.linalg.solve(damped, v)) < 1e-9
    assert F.solve(v, 0.1, mode="factored").isfinite().all()
    whole = bs.fisher(net, data(), "ekfac", estimator="empirical", max_memory="1GB")
    assert relative(whole.to_dense(), F.to_dense()) < 1e-9


def test_which_parameters_have_such_factors() -> None:
    assert matrix_shape((8, 48, 16)) == (8, 48, 16)
    assert matrix_shape((48, 16)) == (1, 48, 16)
    for shape in ((48,), (1, 1, 768), (50257, 768), (4, 3, 3, 3)):
        assert matrix_shape(shape) is None


def test_influence_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BLOCK_LIMIT", 10)
    net = network()
    F = bs.fisher(net, data(), "ekfac", estimator="empirical")
    rows = loss_gradients(net, data())
    scores = rows @ torch.linalg.solve(F.to_dense() + 0.05 * torch.eye(rows.shape[1], dtype=torch.float64), rows.T)
    found = bs.influence(net, data(), data(), F, damping=0.05, dim=4000, top=7)
    assert ((found.values - scores.gather(1, found.top)) / found.errors).abs().max() < 4.5


def test_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.MixtralConfig(vocab_size=20, num_key_value_heads=1, num_local_experts=4, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config).eval()
    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    F = bs.fisher(model, inputs, "ekfac", estimator="empirical")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert F.plan[name] == "ekfac"
    piece = next(p for p in F.pieces if p.names == (name,))
    squares = loss_gradients(model, inputs, params=name).square().sum(1).mean()
    assert relative(piece.trace(), squares) < 1e-4
