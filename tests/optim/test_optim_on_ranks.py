"""KFAC and EKFAC under DDP and FSDP2, against one process that sees all examples."""

import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import biascope as bs
from biascope.support.errors import InputError
from ranks import Failed, Ranks

KINDS: dict[str, Any] = {
    "kfac": lambda net, **k: bs.optim.KFAC(net, refresh_every=3, factors_every=2, **k),
    "kfac, workers": lambda net, **k: bs.optim.KFAC(net, refresh_every=3, gradient_workers=0.5, **k),
    "ekfac": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, **k),
    "running": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, scalings="running", on_refresh="project", **k),
    "running, workers": lambda net, **k: bs.optim.EKFAC(net, scalings="running", gradient_workers=0.25, **k),
    "adam": lambda net, **k: bs.optim.EKFAC(net, refresh_every=3, fallback="adam", **k),
}
N = 40  # examples per step: enough that no eigenvalues of a factor agree, as any basis will do for those that do
OPTIONS = {"lr": 0.05, "damping": 0.01, "momentum": 0.9, "weight_decay": 1e-3}


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [
        nn.Conv2d(2, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3, bias=False),
    ]
    return nn.Sequential(*layers).double()


def wrapped(net: nn.Module, group: Any, way: str) -> nn.Module:
    if group is None:
        return net
    if way == "ddp":
        return DistributedDataParallel(net, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(torch.distributed.get_world_size(group))))
    fully_shard(net[3], mesh=mesh)  # type: ignore[index]
    return fully_shard(net, mesh=mesh)


def batch(step: int, group: Any) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(step)
    x, y = torch.randn(N, 2, 4, 4, generator=gen, dtype=torch.float64), torch.randint(3, (N,), generator=gen)
    if group is None:
        return x, y
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    own = slice(rank * N // size, (rank + 1) * N // size)
    return x[own], y[own]


def train(net: nn.Module, opt: Any, steps: range, group: Any) -> None:
    for i in steps:
        opt.zero_grad()
        x, y = batch(i, group)
        F.cross_entropy(net(x), y).backward()
        opt.step()


def weights(net: nn.Module) -> Tensor:
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in found])


def trained(group: Any, kind: str, way: str, saved: bytes | None = None) -> tuple[Tensor, bytes, Tensor]:
    """Weights and state after five steps (or the state that was saved there), and weights after nine."""
    net = network()
    net = wrapped(net, group, way)
    opt = KINDS[kind](net, **OPTIONS)
    if saved is None:
        train(net, opt, range(5), group)
        file = io.BytesIO()
        torch.save([weights(net), opt.state_dict()], file)
        saved = file.getvalue()
    else:
        vector, state = torch.load(io.BytesIO(saved))
        with torch.no_grad():
            for p, v in zip(net.parameters(), vector.split([p.numel() for p in net.parameters()]), strict=True):
                own = v.view(p.shape)
                if hasattr(p, "full_tensor"):
                    own = torch.distributed.tensor.distribute_tensor(own, p.device_mesh, p.placements)
                p.copy_(own)
        opt.load_state_dict(state)
    before = weights(net)
    train(net, opt, range(5, 9), group)
    return before, saved, weights(net)


def flat(state: Any) -> dict[str, Tensor]:
    if isinstance(state, dict):
        return {f"{k}/{name}": t for k, v in state.items() for name, t in flat(v).items()}
    return {"": state} if isinstance(state, Tensor) else {}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_process_does(ranks: Ranks, kind: str, way: str) -> None:
    before, saved, after = trained(None, kind, way)
    state = flat(torch.load(io.BytesIO(saved))[1])
    for size in (1, 2, 4):
        found = ranks.run(trained, size, kind, way)
        for other, _, end in found:
            assert (other - before).norm() < 1e-11 * before.norm()
            assert (end - after).norm() < 1e-10 * after.norm()
        files = {rank: flat(torch.load(io.BytesIO(file))[1]) for rank, (_, file, _) in enumerate(found)}
        for theirs in files.values():  # the same on every rank, and as that of one process
            assert theirs.keys() == state.keys()
            for name, t in state.items():
                if "U_" not in name and "/s/" not in name:
                    assert (theirs[name] - t).norm() <= 1e-10 * t.norm(), name
    resumed = trained(None, kind, way, found[0][1])[2]
    assert (resumed - after).norm() < 1e-10 * after.norm()
    for _, _, end in ranks.run(trained, 2, kind, way, saved):
        assert (end - after).norm() < 1e-10 * after.norm()


def accumulated(group: Any, way: str) -> Tensor:
    """Two backward passes per step."""
    net = wrapped(network(), group, way)
    opt = KINDS["ekfac"](net, **OPTIONS)
    for i in range(3):
        opt.zero_grad()
        for j in range(2):
            x, y = batch(2 * i + j, group)
            (F.cross_entropy(net(x), y) / 2).backward()
        opt.step()
    return weights(net)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_accumulated(ranks: Ranks, way: str) -> None:
    alone = accumulated(None, way)
    for found in ranks.run(accumulated, 2, way):
        assert (found - alone).norm() < 1e-11 * alone.norm()


def refused(group: Any, way: str) -> None:
    rank = torch.distributed.get_rank(group)
    net = wrapped(network(), group, way)
    opt = KINDS["ekfac"](net, **OPTIONS)
    x, y = batch(0, group)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    if rank == 1:  # what only this rank has seen
        module = opt.preconditioner.units[0].module
        opt.preconditioner.watcher.settle()
        opt.preconditioner.watcher.records[module].calls[0].grad.fill_(torch.nan)
    opt.step()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_error_on_one_rank_ends_the_step_on_all(ranks: Ranks, way: str) -> None:
    begin = time.monotonic()
    for outcome in ranks.outcomes(refused, 2, way):
        assert isinstance(outcome, Failed)
        assert "NaN or infinity" in str(outcome.error)
    assert time.monotonic() - begin < 10


def test_shares_of_workers_are_checked() -> None:
    with pytest.raises(InputError, match="a share of the ranks"):
        bs.optim.KFAC(network(), damping=0.01, gradient_workers=0.0)
    with pytest.raises(InputError, match="scalings='running'"):
        bs.optim.EKFAC(network(), damping=0.01, gradient_workers=0.5)
