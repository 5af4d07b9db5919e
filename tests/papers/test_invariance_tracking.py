"""Training while watching: the same as a plain loop, whatever the stacking and the micro-batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.ensembles import Networks, data_order, input_gradients, record
from biascope.geometry import velocity_floor
from biascope.studies import Run
from biascope.support.errors import InputError
from biascope_papers.gih.averages import History, probe_floor
from biascope_papers.gih.fig3_12_13 import compare_pair
from biascope_papers.gih.geometries import Geometry
from biascope_papers.gih.networks import factory
from biascope_papers.gih.tracking import Descent, Task, common_probes, track, train_stack

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double()


def watched(descent: Descent, start: int = 0, stop: int = 3) -> list[dict[str, Tensor]]:
    seen: list[dict[str, Tensor]] = []

    def watch(epoch: int, networks: Networks) -> None:
        assert epoch == len(seen)
        seen.append({name: value.clone() for name, value in networks.params.items()})

    train_stack(Task(record(build), 3, X, Y, descent), range(start, stop), watch)
    return seen


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_stack_is_the_plain_loop(optimiser: str) -> None:
    descent = Descent(3, 0.1, 8, 0.9, optimiser, clip_norm=0.3 if optimiser == "sgd" else None)  # type: ignore[arg-type]
    seen = watched(descent)
    assert len(seen) == 4
    for i in range(3):
        module = record(build).draw(3, i, i + 1).module(0)
        plain: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
        if optimiser == "adam":
            plain = torch.optim.Adam(module.parameters(), 0.1)
        for epoch in range(3):
            for batch in data_order(3, i, epoch, 24).split(8):
                plain.zero_grad()
                F.cross_entropy(module(X[batch]), Y[batch]).backward()
                if descent.clip_norm is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), descent.clip_norm)
                plain.step()
        for name, value in module.named_parameters():
            assert torch.allclose(seen[3][name][i], value, atol=1e-7), (i, name)


def test_one_network_is_the_same_alone() -> None:
    descent = Descent(2, 0.1, 8)
    together, alone = watched(descent), watched(descent, 1, 2)
    assert torch.allclose(together[2]["0.weight"][1], alone[2]["0.weight"][0], atol=1e-12)


def test_micro_batches_do_not_change_the_step() -> None:
    whole, pieces = (watched(Descent(4, 0.1, 0, micro=m)) for m in (1000, 5))
    assert torch.allclose(whole[4]["0.weight"], pieces[4]["0.weight"], atol=1e-12)
    assert not torch.allclose(whole[4]["0.weight"], whole[0]["0.weight"], atol=1e-3)


def test_track_resumes(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", {"seed": 0})
    probes = common_probes(run, 2, (5,))
    net = lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))  # noqa: E731
    first = track(run, "t", net, X.float(), Y, probes, 3, Descent(2, 0.1, 8))
    assert first.gradients.shape == (3, 3, 2, 5)
    assert first.accuracy.shape == (3, 3)
    again = track(run, "t", net, X.float(), Y, probes, 3, Descent(2, 0.1, 8))
    assert torch.equal(first.gradients, again.gradients)
    with pytest.raises(InputError, match="graph"):
        track(run, "u", net, X.float(), Y, probes, 3, Descent(2, 0.1, 8, engine="graph"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_steps_are_the_eager_ones(tmp_path: Path) -> None:
    x = torch.randn(40, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    y, net = (x.mean((1, 2, 3)) > 0).long(), factory("resnet18", (1, 32, 32), norm=False)
    tracks = []
    for engine in ("eager", "graph"):  # one key, so the same networks and orders
        run = Run.create(tmp_path / engine, {"seed": 0, "device": "cuda"})
        probes = common_probes(run, 2, (1, 32, 32))
        tracks.append(track(run, "t", net, x, y, probes, 3, Descent(2, 0.01, 16, engine=engine)))  # type: ignore[arg-type]
    eager, graph = tracks
    # in norm, not entry by entry: the two layouts use other kernels, whose rounding is relative to the largest entries
    assert (eager.gradients[0] - graph.gradients[0]).norm() < 1e-3 * eager.gradients[0].norm()
    moved = (eager.gradients[2] - eager.gradients[0]).norm()
    assert (eager.gradients[2] - graph.gradients[2]).norm() < 0.05 * moved


def test_both_sets_are_given_to_the_same_networks(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", {"seed": 0})
    rows = torch.randn(400, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = rows * torch.linspace(1, 0.01, 16)
    matrix = rows.T @ rows / 400
    G = Geometry(matrix, torch.ones(16), torch.eye(16), (matrix,), (1, 4, 4), 400)
    pair = compare_pair(run, "t", "mlp", G, Descent(3, 0.1, 16), n=64, runs=3, probes=4, probe_std=1.0)
    starts = [run.load_arrays(f"t mlp n=64 {kind} 0")["gradients"][0] for kind in ("G", "flip")]
    assert torch.equal(starts[0], starts[1])
    assert pair.velocity[False][0].shape == (3,)
    assert bool((pair.velocity[False][0] >= 0).all())
    assert pair.floor is not None
    assert 0 < pair.floor < 1
    mean = pair.mean_velocity[False].value - pair.mean_velocity[True].value
    assert pair.velocity_gap.value == pytest.approx(mean)


@pytest.mark.parametrize("net", ["mlp", "lenet"])
def test_floor_is_the_velocity_of_fresh_probes(net: str) -> None:
    """Against simulation: the same networks at pairs of fresh sets of probes. Two halves of a set give far more."""
    R, P, sets, shape = 5, 8, 40, (1, 16, 16)
    networks = record(factory(net, shape, norm=False)).draw(0, 0, R)
    probes = torch.randn(sets * P, *shape, generator=torch.Generator().manual_seed(1))
    gradients = input_gradients(networks, probes).flatten(2).double().view(R, sets, P, -1)
    w = torch.ones(R, dtype=torch.float64)

    def velocity(a: Tensor, b: Tensor) -> float:
        return float(History(torch.stack([a, b])).velocity(w)[0])

    truth = torch.tensor([velocity(gradients[:, i], gradients[:, i + 1]) for i in range(0, sets, 2)])
    floors = torch.tensor([probe_floor(gradients[:, i]) for i in range(sets)])
    assert float(floors[0]) == pytest.approx(velocity_floor(gradients[:, 0]), rel=1e-4)
    halves = torch.tensor([velocity(gradients[:, i, : P // 2], gradients[:, i, P // 2 :]) for i in range(sets)])
    error = float((truth.var() / len(truth) + floors.var() / sets).sqrt())
    # 2 %: the mean of a ratio is not the ratio of means
    assert abs(float(floors.mean() - truth.mean())) < 3 * error + 0.02 * float(truth.mean())
    assert float(halves.mean()) > 1.25 * float(truth.mean())  # the rule it replaces
