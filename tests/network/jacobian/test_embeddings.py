"""Tables of embeddings: J v is the adjoint of what the backward pass does, whichever examples come first."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.editing import TaskVector, leakage
from biascope.network.jacobian import jacobian_vector
from biascope.support.errors import UnsupportedError
from zoo import brute_force

F64 = torch.float64
WORDS = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 0], [0, 0, 2], [3, 3, 3]])  # padding from the third example on


class Reader(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        h = self.table(words)
        out: Tensor = self.head((h.sum(1) if h.dim() == 3 else h).tanh())
        return out


class ByFunction(nn.Module):
    """The same by a function, not by a layer that could be looked for."""

    def __init__(self, look_up: object) -> None:
        super().__init__()
        self.weight, self.look_up = nn.Parameter(torch.randn(7, 4)), look_up

    def forward(self, words: Tensor) -> Tensor:
        return self.look_up(self.weight, words)  # type: ignore[operator,no-any-return]


TABLES = {
    "padding": lambda: nn.Embedding(7, 4, padding_idx=0),
    "padding from the end": lambda: nn.Embedding(7, 4, padding_idx=-7),
    "sparse": lambda: nn.Embedding(7, 4, sparse=True),
    "sparse padding": lambda: nn.Embedding(7, 4, padding_idx=0, sparse=True),
    "bag": lambda: nn.EmbeddingBag(7, 4, padding_idx=0),
    "sparse bag": lambda: nn.EmbeddingBag(7, 4, mode="sum", sparse=True),
    "F.embedding": lambda: ByFunction(lambda w, x: F.embedding(x, w, padding_idx=0)),
    "torch.embedding": lambda: ByFunction(lambda w, x: torch.embedding(w, x, 0)),
}


def network(table: str) -> tuple[nn.Module, Tensor]:
    net = Reader(TABLES[table]()).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, dtype=F64))  # the padding row is no zero, so that it shows
    return net, brute_force(net, WORDS) if "sparse" not in table else dense_twin(net)


def dense_twin(net: nn.Module) -> Tensor:
    """Brute force cannot flatten sparse gradients: the same network without them."""
    net.table.sparse = False
    dense = brute_force(net, WORDS)
    net.table.sparse = True
    return dense


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_products_agree_with_the_backward_pass(table: str) -> None:
    net, dense = network(table)
    J = bs.Jacobian(net, WORDS)
    v, u = torch.randn(J.p, dtype=F64), torch.randn(5, 3, dtype=F64)
    torch.testing.assert_close(J @ v, dense @ v, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((J.T @ u).as_subclass(Tensor), torch.einsum("nc,ncp->p", u, dense))
    torch.testing.assert_close(J.to_dense(), dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("table", ["padding", "F.embedding", "torch.embedding"])
def test_the_first_batch_seen_does_not_decide(table: str) -> None:
    """A module once tried on examples without padding is right on those with it, and the other way round."""
    net, dense = network(table)
    for order in ([0, 1, 2, 3, 4], [2, 3, 0, 1, 4]):
        f = bs.functional.functional(net)
        v = {k: torch.randn_like(p) for k, p in f.params.items()}
        flat = torch.cat([t.flatten() for t in v.values()])
        for i in order:
            torch.testing.assert_close(jacobian_vector(f, WORDS[i : i + 1], v), (dense @ flat)[i : i + 1])


@pytest.mark.parametrize("vectors", [1, 3])
def test_curvature_products_agree_with_the_backward_pass(vectors: int) -> None:
    """J^T J V / n where one pass gives the outputs, J v and the graph: gaussian outputs have unit curvature."""
    net, dense = network("padding")
    G = bs.fisher(net, [(WORDS, torch.zeros(5, 3, dtype=F64))], representation="implicit", likelihood="gaussian")
    flat = dense.flatten(0, 1)
    V = torch.randn(flat.shape[1], vectors, dtype=F64)
    torch.testing.assert_close(G @ V, flat.T @ (flat @ V) / 5, rtol=1e-10, atol=1e-12)


def test_leakage_of_task_vectors_is_that_of_the_training_gradient() -> None:
    net, dense = network("padding")
    tau = {k: torch.randn_like(p) for k, p in net.named_parameters()}
    lengths = (dense @ torch.cat([t.flatten() for t in tau.values()])).norm(dim=1)
    for model in (net, bs.linearize(net)):
        found = leakage(model, {"a": TaskVector.from_tensors(tau)}, {"a": WORDS})
        assert float(found.values) == pytest.approx(float(lengths.mean()), rel=1e-10)


@pytest.mark.parametrize("grad", [False, True])
def test_linearised_networks_inside_torch_func(grad: bool) -> None:
    net, dense = network("padding")
    lin = bs.linearize(net)
    lin(WORDS[:2])  # the first call must not be inside of torch.func
    start = {k: p.detach() for k, p in lin.named_parameters()}
    v = {k: torch.randn_like(p) for k, p in start.items()}
    flat = torch.cat([t.flatten() for t in v.values()])
    with torch.set_grad_enabled(grad):
        run = lambda p: torch.func.functional_call(lin, p, (WORDS,))  # noqa: E731
        moved = torch.func.vmap(run)({k: (p + v[k])[None] for k, p in start.items()})[0]
    torch.testing.assert_close(moved - net(WORDS), dense @ flat, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_change_or_mix_examples_are_refused_by_name(layer: type[nn.Module]) -> None:
    net = Reader(layer(7, 4, max_norm=0.5))
    before = net.table.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"'table' has max_norm=0\.5"):
        bs.Jacobian(net, WORDS)
    assert torch.equal(net.table.weight, before)
    net = Reader(layer(7, 4, scale_grad_by_freq=True))
    with pytest.raises(UnsupportedError, match="'table' has scale_grad_by_freq=True"):
        bs.Jacobian(net, WORDS)
    head = bs.Jacobian(net, WORDS, params="head", precision="float64")
    torch.testing.assert_close(head.to_dense(), brute_force(net, WORDS, ["head.weight", "head.bias"]))


def flat(net: nn.Module) -> Tensor:
    return torch.ones(sum(p.numel() for p in net.parameters()))


JOBS = {
    "Jacobian": lambda net: bs.Jacobian(net, WORDS).to_dense(),
    "J v": lambda net: bs.Jacobian(net, WORDS) @ flat(net),
    "ntk": lambda net: bs.ntk(net, WORDS),
    "ekfac": lambda net: bs.fisher(net, WORDS, "ekfac"),
    "implicit": lambda net: bs.fisher(net, WORDS, "implicit") @ flat(net),
    "hessian": lambda net: bs.hessian(net, (WORDS, torch.zeros(5, dtype=torch.int64)), "implicit") @ flat(net),
    "linearize": lambda net: bs.linearize(net)(WORDS),
    "value": lambda net: (f := bs.functional.functional(net))(f.params, WORDS),
}
CALLS = {
    "embedding": lambda **how: lambda w, x: F.embedding(x, w, **how),
    "embedding_bag": lambda **how: lambda w, x: F.embedding_bag(x, w, **how),
    "embedding, a table made on the way": lambda **how: lambda w, x: F.embedding(x, 2 * w, **how),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("look_up", CALLS)
def test_calls_that_change_a_table_or_mix_examples_are_refused_by_name(job: str, look_up: str) -> None:
    """max_norm wrote into the user's module, and J was that of other weights; no option, no refusal."""
    who = look_up.split(",")[0]
    net = Reader(ByFunction(CALLS[look_up](max_norm=0.5)))
    before = net.table.weight.detach().clone()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=rf"^{who} is called with max_norm=0\.5 on a table of"):
        JOBS[job](net)
    with pytest.raises(UnsupportedError, match=rf"^{who} is called with max_norm=0\.5 on a table of shape \[7, 4\]"):
        JOBS[job](net)
    assert torch.equal(net.table.weight, before)
    net = Reader(ByFunction(CALLS[look_up](scale_grad_by_freq=True)))
    if job == "value":
        torch.testing.assert_close(JOBS[job](net), net(WORDS).detach())
    else:
        with pytest.raises(UnsupportedError, match=f"^{who} is called with scale_grad_by_freq=True"):
            JOBS[job](net)


@pytest.mark.parametrize("look_up", CALLS)
def test_a_table_that_is_not_differentiated_may_mix_examples(look_up: str) -> None:
    net = Reader(ByFunction(CALLS[look_up](scale_grad_by_freq=True))).double()
    head = bs.Jacobian(net, WORDS, params="head")
    torch.testing.assert_close(head.to_dense(), brute_force(net, WORDS, ["head.weight", "head.bias"]))


def test_a_direct_write_into_a_table_is_refused() -> None:
    def look_up(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.embedding_renorm_(w.detach(), x, 0.5, 2.0)
        return F.embedding(x, w)

    with pytest.raises(UnsupportedError, match=r"^embedding_renorm_ is called with max_norm=0\.5"):
        bs.Jacobian(Reader(ByFunction(look_up)), WORDS).to_dense()


def test_a_tied_table_that_mixes_examples_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Embedding(7, 4, scale_grad_by_freq=True))
    tied[1].weight = tied[0].weight  # known to the module as '0.weight' only
    with pytest.raises(UnsupportedError, match="Embedding '1'"):
        bs.functional.functional(tied)
