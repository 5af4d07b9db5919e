"""Networks that FSDP2 has spread over ranks, and networks inside DDP, against the same networks on one process."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import biascope as bs
from biascope.network import shards
from biascope.support.errors import InputError, UnsupportedError
from ranks import Failed, Ranks


class LoRA(nn.Module):
    """A frozen linear layer and a product of two thin ones beside it, as PEFT puts them there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


class Block(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 7), nn.Linear(7, 4, bias=False)
        self.up = LoRA(self.up) if lora else self.up  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Two blocks over an embedding that is also the output layer."""

    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(6, 4), nn.ModuleList([Block(lora), Block(lora)])
        self.head = nn.Linear(4, 3)
        if lora:
            self.words.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def network(lora: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    net = Network(lora).to(dtype)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return net


def data(n: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    return torch.randint(0, 6, (n, 5), generator=gen), torch.arange(n) % 3


def spread(net: nn.Module, group: Any) -> nn.Module:
    size = torch.distributed.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(size)))
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert isinstance(net, FSDPModule)
    return net


def measured(group: Any, n: int, lora: bool, way: str) -> list[Tensor]:
    net, (x, y) = network(lora), data(n)
    shards.KEPT = 0.0 if way == "again" else 0.2  # put together again for the way back, or kept
    if group is not None:
        net = DistributedDataParallel(net, process_group=group) if way == "ddp" else spread(net, group)
    loader = [(x[:4], y[:4]), (x[4:], y[4:])] if n > 4 else [(x, y)]
    found = []
    for kind in ("diagonal", "ekfac"):
        F = bs.fisher(net, loader, kind, group=group)
        V = torch.randn(F.shape[0], 2, generator=torch.Generator().manual_seed(4), dtype=F.dtype)
        found += [F @ V, F.solve(V, damping=0.1), F.trace()[None]]
    found.append(bs.fisher(net, (x, y), "ekfac", "categorical", "empirical", centered=True, group=group) @ V)
    found.append(bs.ggn(net, (x, y), "kfac", "ce", batch_size=2, group=group) @ V)
    H = bs.hessian(net, loader, group=group)
    found += [H @ V, H @ V[:, 0]]
    A = bs.label_alignment(net, x, y, by_layer=True, sketch=5, group=group)
    for one in (A, *A.layers.values()):
        found.append(torch.tensor([one.value, one.standard_error, one.alpha, one.frobenius]))
    found.append(bs.sketched_ntk(net, x, dim=8, group=group).features)
    return found


@pytest.mark.parametrize(
    ("size", "n", "lora", "way"),
    [
        (2, 7, False, "again"),
        (4, 5, False, "kept"),
        (4, 3, False, "again"),
        (2, 5, True, "again"),
        (2, 7, False, "ddp"),
    ],
)
def test_a_network_on_ranks_is_measured_as_on_one(ranks: Ranks, size: int, n: int, lora: bool, way: str) -> None:
    alone = measured(None, n, lora, way)
    for found in ranks.run(measured, size, n, lora, way):
        for i, (a, b) in enumerate(zip(alone, found, strict=True)):
            assert (a - b).norm() <= 1e-11 * a.norm(), i


def in_parts(group: Any, small: bool) -> list[Tensor]:
    """What follows from products whose vectors are spread as the parameters are."""
    torch.manual_seed(1)
    net: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double() if small else network()
    x, y = (torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3) if small else data(7)
    if group is not None and small:
        fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu", mesh=[0, 1]))
    elif group is not None:
        spread(net, group)
    H = bs.hessian(net, (x, y), group=group)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = [
        H @ v,
        H.quadratic_form(v)[None],
        H.estimate_trace(5).value[None],
        H.estimate_frobenius_norm(4).value[None],
    ]
    found += [(H + 0.5 * H) @ v, H.solve(v, damping=5.0, tol=1e-13)]
    if small:
        return [*found, H.to_dense(), H.trace()[None], H.eigh(2).values, H.estimate_diagonal(3).value]
    pairs = H.eigh(2)
    if group is not None:
        assert H.spread is not None
        assert pairs.vectors.shape == (H.spread.rows, 2)  # in parts
        grads = {name: p.detach().clone() for name, p in net.named_parameters()}  # DTensors
        moved = H @ grads
        assert all(moved[name].placements == g.placements for name, g in grads.items())
        whole = H @ torch.cat([g.full_tensor().flatten() for g in grads.values()])
        assert (torch.cat([t.full_tensor().flatten() for t in moved.values()]) - whole).norm() < 1e-12 * whole.norm()
        F = bs.fisher(net, (x, y), "kfac", group=group)
        preconditioned = H.solve(v, damping=5.0, tol=1e-13, preconditioner=F)
        assert (preconditioned - found[-1]).norm() < 1e-10 * found[-1].norm()
        pairs = bs.linalg.eigsh(H, 2)
        vectors = H.spread.join(pairs.vectors)
    else:
        vectors = pairs.vectors
    return [*found, pairs.values, vectors]


def llama(group: Any, tied: bool) -> list[Tensor]:
    """A small Llama, whose blocks are spread one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shards.KEPT = 0.0
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double().eval()
    ids = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(1))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu", mesh=[0, 1])
        for block in net.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    F = bs.fisher(net, {"input_ids": ids}, "ekfac", estimator="monte-carlo", class_dim=-1, group=group)
    H = bs.hessian(net, {"input_ids": ids, "labels": ids}, class_dim=-1, group=group)
    v = torch.ones(F.shape[0], dtype=F.dtype)
    return [F @ v, F.trace()[None], H @ v]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_on_ranks(ranks: Ranks, tied: bool) -> None:
    pytest.importorskip("transformers")
    alone = llama(None, tied)
    for found in ranks.run(llama, 2, tied):
        for a, b in zip(alone, found, strict=True):
            assert (a - b).norm() < 1e-12 * a.norm()


def adapted(group: Any, base: bool) -> list[Tensor]:
    """The adapters of a small Llama as PEFT puts them there, spread block by block; or its own weights below them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shards.KEPT = 0.0
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    net = get_peft_model(net, lora).double().eval()
    for name, p in net.named_parameters():
        if "lora_B" in name:  # PEFT starts them at 0, where all that belongs to A vanishes
            torch.nn.init.normal_(p, std=0.3)
    ids = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(1))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(torch.distributed.get_world_size(group))))
        for block in net.base_model.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    words = {"input_ids": ids, "labels": ids}
    only: Any = ["*.v_proj.base_layer.weight"] if base else None
    F = bs.fisher(net, words, "ekfac", estimator="empirical", params=only, group=group)
    assert len(F.space.shapes) == (2 if base else 12)
    D = bs.fisher(net, words, "diagonal", estimator="empirical", params=only, group=group)
    H = bs.hessian(net, words, params=only, class_dim=-1, group=group)
    v = torch.randn(F.shape[0], generator=torch.Generator().manual_seed(4), dtype=F.dtype)
    return [F @ v, F.solve(v, damping=0.1), F.trace()[None], D.diagonal(), H @ v]


@pytest.mark.slow
@pytest.mark.parametrize("base", [False, True])
def test_a_language_model_with_peft(ranks: Ranks, base: bool) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    alone = adapted(None, base)
    assert abs(alone[2] - alone[3].sum()) < 1e-10 * alone[2]  # EKFAC has the trace of the Fisher matrix
    for size in (2, 4):
        for found in ranks.run(adapted, size, base):
            for a, b in zip(alone, found, strict=True):
                assert (a - b).norm() < 1e-11 * a.norm()


def by_layers(group: Any) -> None:
    """A metric and vectors that are spread as the parameters are."""
    shards.KEPT = 0.2
    net, (x, y) = spread(network(), group), data(7)
    F = bs.fisher(net, (x, y), "ekfac", group=group)
    grads = {name: p.detach().clone() for name, p in net.named_parameters()}
    whole = torch.cat([g.full_tensor().flatten() for g in grads.values()])
    for moved, wanted in [(F @ grads, F @ whole), (F.solve(grads, damping=0.1), F.solve(whole, damping=0.1))]:
        assert all(moved[name].placements == g.placements for name, g in grads.items())
        assert (torch.cat([t.full_tensor().flatten() for t in moved.values()]) - wanted).norm() < 1e-12 * wanted.norm()


def test_metrics_take_vectors_that_are_spread(ranks: Ranks) -> None:
    ranks.run(by_layers, 2)


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lanczos_and_conjugate_gradients_with_vectors_in_parts(ranks: Ranks, small: bool) -> None:
    alone = in_parts(None, small)
    for found in ranks.run(in_parts, 2, small):
        for i, (a, b) in enumerate(zip(alone, found, strict=True)):
            assert (a - b).norm() < 1e-9 * a.norm(), i


def pulled(group: Any, way: str, n: int) -> list[Tensor]:
    """J^T u, and what else there is of a Jacobian where the parameters are whole."""
    net, (x, _) = network(), data(n)
    shards.KEPT = 0.0 if n == 3 else 0.2  # the same on all ranks, whatever they ran before
    if group is not None:
        net = DistributedDataParallel(net, process_group=group) if way == "ddp" else spread(net, group)
    loader = [x[:4], x[4:]] if n > 4 else [x]
    J = bs.Jacobian(net, loader, batch_size=2, group=group)
    gen = torch.Generator().manual_seed(4)
    u, v = torch.randn(n, 3, 2, generator=gen).double(), torch.randn(J.p, generator=gen).double()
    first, both = J.T @ u[..., 0], J.T @ u
    if group is not None and way == "shards":
        for name, p in net.named_parameters():
            assert first.as_dict()[name].placements == p.placements
        H = bs.hessian(net, (x, torch.arange(n) % 3), group=group)
        assert H.spread is not None
        assert both.shape == (H.spread.rows, 2)  # they fit each other
        with pytest.raises(UnsupportedError, match=r"J.T @ u only"):
            J @ v
        with pytest.raises(UnsupportedError, match=r"J.T @ u only"):
            J.rows()
        whole = torch.cat([t.full_tensor().flatten() for t in first.as_dict().values()])
        return [whole, H.spread.join(both)]
    found = [first.as_subclass(Tensor), both]
    return found if way == "shards" else [*found, J @ v, J.rows([0, n - 1]), J.to_dense()]


@pytest.mark.parametrize(("way", "size", "n"), [("shards", 2, 7), ("shards", 4, 3), ("ddp", 2, 7), ("ddp", 4, 3)])
def test_a_jacobian_on_ranks(ranks: Ranks, way: str, size: int, n: int) -> None:
    alone = pulled(None, way, n)
    for found in ranks.run(pulled, size, way, n):
        for a, b in zip(alone, found, strict=True):
            assert (a - b).norm() < 1e-12 * a.norm()


def density(group: Any, way: str) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of one probe with as many steps as the matrix has columns, and the matrix."""
    shards.KEPT = 0.0
    torch.manual_seed(1)
    net: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    if group is not None and way == "shards":
        size = torch.distributed.get_world_size(group)
        fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu", mesh=list(range(size))))
    A = bs.hessian(net, (x, y), group=group) if way != "fisher" else bs.fisher(net, x, "implicit", group=group)
    found, short = A.spectral_density(probes=1), A.spectral_density(probes=3, steps=5, seed=1, block=2)
    assert found.size == A.shape[0] == 43
    return torch.stack([found.nodes[0], found.weights[0]]), torch.stack([short.nodes, short.weights]), A.to_dense()


@pytest.mark.parametrize("way", ["shards", "hessian", "fisher"])
def test_spectral_density_on_ranks(ranks: Ranks, way: str) -> None:
    alone = density(None, way)
    lam, U = torch.linalg.eigh(alone[2])
    z = torch.randn(1, 43, generator=torch.Generator().manual_seed(0)).double()[0]
    shares = (U.T @ z).square() / z.square().sum()
    for size in (2, 4):
        for (nodes, weights), short, matrix in ranks.run(density, size, way):
            assert (matrix - alone[2]).norm() < 1e-12 * alone[2].norm()
            assert (short - alone[1]).abs().max() < 1e-9
            # the exact distribution of the spectrum, seen by the probe: the same steps at the same places
            for at in torch.linspace(float(lam[0]) - 0.01, float(lam[-1]) + 0.01, 50).tolist():
                if (lam - at).abs().min() > 1e-6:
                    assert (weights[nodes < at].sum() - shares[lam < at].sum()).abs() < 1e-7


def left_alone(group: Any) -> None:
    """A step of training gives the same before and after a measurement, and parameters are where they were."""
    net, (x, y) = spread(network(), group), data(8)
    other = spread(network(), group)
    nn.functional.cross_entropy(net(x), y)  # FSDP keeps what it has put together
    bs.fisher(net, (x, y), "ekfac", group=group)
    bs.hessian(net, (x, y), group=group) @ torch.ones(sum(p.numel() for p in other.parameters()), dtype=torch.float64)
    for module in (net, other):
        nn.functional.cross_entropy(module(x), y).backward()
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p._local_tensor, q._local_tensor), name
        assert torch.equal(p.grad._local_tensor, q.grad._local_tensor), name


def test_the_network_is_left_as_it_was(ranks: Ranks) -> None:
    ranks.run(left_alone, 2)


def refused(group: Any, what: str) -> None:
    net, (x, y) = spread(network(), group), data(8)
    rank = torch.distributed.get_rank(group)
    if what == "no group":
        bs.fisher(net, (x, y), "ekfac")
    elif what == "kernel":
        bs.ntk(net, x, group=group)
    elif what == "jacobian":
        bs.Jacobian(net, x)
    elif what == "implicit":
        bs.fisher(net, (x, y), "implicit", group=group)
    elif what == "nan":
        x = torch.randn(8, 4)
        broken = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
        if rank == 1:
            x = x.clone()
        mesh = DeviceMesh.from_group(group, "cpu", mesh=[0, 1])
        broken[1].register_forward_hook(lambda m, a, out: out / 0 if rank == 1 and len(out) > 3 else out)
        bs.fisher(fully_shard(broken, mesh=mesh), x, "kfac", group=group)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("no group", InputError, "with group= the mesh"),
        ("kernel", UnsupportedError, "bs.sketched_ntk"),
        ("jacobian", UnsupportedError, "bs.sketched_ntk"),
        ("implicit", UnsupportedError, "representation='ekfac'"),
        ("nan", InputError, "NaN or infinity"),
    ],
)
def test_what_cannot_be_done_on_shards_is_refused(ranks: Ranks, what: str, kind: type[Exception], text: str) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(refused, 2, what):
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, kind), outcome.error
        assert text in str(outcome.error)
    assert time.monotonic() - begin < 10
