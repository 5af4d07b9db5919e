"""Average geometries at their limits: no gradient, no room, no probes, and factories that cannot be recorded."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import Networks, record
from biascope.geometry import AverageGeometry, average_geometry, geometry_evolution, geometry_of, subspace_size
from biascope.geometry.average import blocks_within
from biascope.geometry.loss_curvature import input_curvature
from biascope.geometry.moments import BlockMoments
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.files import read_tensors, write_tensors


def bare() -> nn.Module:
    """No biases: no gradient at 0."""
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 1))


def drawn(count: int = 20) -> Networks:
    return record(bare).draw(0, 0, count)


@pytest.mark.parametrize("dense_up_to", [4096, 4])
def test_zero_gradients_are_refused_with_and_without_a_matrix(
    dense_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biascope.geometry.average.DENSE_UP_TO", dense_up_to)
    with pytest.raises(InputError, match="probe_std > 0"):
        average_geometry(bare, (6,), n_networks=8, probe_std=0.0)
    with pytest.raises(InputError, match="all gradients are zero: a ReLU network"):
        geometry_of(drawn(), torch.zeros(2, 6))
    networks = drawn()
    networks.params["2.weight"][:15] = 0  # some that are dead are no reason to refuse
    probes = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    found, alive = geometry_of(networks, probes, max_memory=5000), geometry_of(drawn()[15:], probes)
    v = torch.ones(6)
    assert torch.allclose((found @ v).double(), (alive @ v).double() / 4, rtol=1e-5)
    assert float((found @ v).norm()) > 0


def test_an_evolution_without_gradients_is_refused() -> None:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(4)
    with pytest.raises(InputError, match="probe_std > 0"):
        geometry_evolution(bare, *data, 5, probe_std=0.0)
    free = geometry_evolution(bare, *data, 5, probe_std=0.0, max_memory=200)  # without a matrix: at the first product
    with pytest.raises(InputError, match="probe_std > 0"):
        _ = free @ torch.ones(6)
    with pytest.raises(InputError, match="probe_std=-1"):
        geometry_evolution(bare, *data, 5, probe_std=-1.0)


def test_probes_that_ask_for_gradients_get_none() -> None:
    probes = torch.randn(3, 6, requires_grad=True)
    for G in (average_geometry(bare, (6,), 4, probes=probes), geometry_of(drawn(), probes)):
        assert not G.matrix.requires_grad
        assert probes.grad is None


def test_losses_and_networks_that_cannot_be_differentiated_are_named() -> None:
    x, y = torch.randn(4, 6), torch.ones(4)
    with pytest.raises(InputError, match=r"loss gave a tensor of shape \[4\] for"):
        geometry_evolution(bare, x, y, 2, loss=lambda f, y: (f - y) ** 2)
    with pytest.raises(InputError, match='y_train: "logistic" wants labels -1 and'):
        geometry_evolution(bare, x, y > 2, 2, loss="logistic")

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.memory(x.view(-1, 2, 3))[0][:, -1])
            return out

    with pytest.raises(UnsupportedError, match=r"second derivatives of Recurrent .*'memory' is fused"):
        geometry_evolution(Recurrent, x, y, 2)
    with pytest.raises(UnsupportedError, match="'memory' is fused"):
        input_curvature(Recurrent(), x, y)
    with pytest.raises(InputError, match=r"cannot multiply .* by a torch.float64 tensor of shape \[4, 6\]"):
        _ = average_geometry(bare, (6,), 2) @ x.numpy()  # type: ignore[operator]


def test_ranks_ask_for_a_share_of_the_largest() -> None:
    G = average_geometry(lambda: nn.Linear(10, 1), (10,), 3)
    assert G.rank(0.0) == 3  # and not what rounding adds
    assert subspace_size(G.matrix, threshold=0.0) == 3
    for wrong in (2.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"give a threshold in \[0, 1\) or a share"):
            G.rank(wrong)
    with pytest.raises(InputError, match=r"give a threshold in \[0, 1\) or a share"):
        G.rank(0.1, share=0.5)


@pytest.mark.parametrize("dense_up_to", [4096, 1])
def test_infinite_gradients_are_refused_with_and_without_a_matrix(
    dense_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("biascope.geometry.average.DENSE_UP_TO", dense_up_to)
    networks = drawn()
    networks.params["2.weight"][0] = torch.inf
    with pytest.raises(InputError, match="NaN or infinite gradients"):
        geometry_of(networks, torch.ones(2, 6))

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.w).sum(1, keepdim=True) - 1e30).abs().sqrt() * torch.inf

    with pytest.raises(InputError, match="NaN or infinite gradients"):
        _ = geometry_evolution(Steep, torch.ones(2, 3), torch.ones(2), 4) @ torch.ones(3)


def test_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 entries: a matrix has 32 KiB. Blocks as far as two more fit, then none, and the same answer each time."""
    networks = record(lambda: nn.Sequential(nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 1))).draw(0, 0, 40)
    probes = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    asked: list[int] = []
    made = BlockMoments.__init__

    def counted(self: BlockMoments, dimension: int, blocks: int, device: torch.device | str = "cpu") -> None:
        asked.append(blocks)
        made(self, dimension, blocks, device)

    monkeypatch.setattr(BlockMoments, "__init__", counted)
    matrix = 64 * 64 * 8
    whole = geometry_of(networks, probes, max_memory=64 * matrix)
    v = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    for room, blocks in ((64, 16), (32, 8), (16, 4), (4, 2), (3, 1), (2, 0), (1, 0)):
        asked.clear()
        found = geometry_of(networks, probes, max_memory=room * matrix)
        assert asked == ([blocks] if blocks else [])
        assert (found.dense is None) == (blocks == 0)
        assert torch.allclose((found @ v).double(), whole @ v, rtol=1e-4, atol=1e-5 * float(whole.matrix.norm()))
        assert blocks == blocks_within(64, room * matrix, 40)
        assert (blocks > 1) == (found.relative_error > 0)  # NaN if there is nothing to compare
    with pytest.raises(UnsupportedError, match=r"G is matrix-free \(D > 4096, or a small"):
        _ = found.matrix
    assert torch.allclose(found.eigh(3).values.double(), whole.eigh(3).values, rtol=1e-3)
    free = average_geometry(lambda: nn.Linear(64, 1), (64,), 10, max_memory=2 * matrix)
    assert free.dense is None
    x, y = torch.ones(4, 64), torch.ones(4)
    assert geometry_evolution(lambda: nn.Linear(64, 1), x, y, 10, max_memory=2 * matrix).dense is None


def test_probes_that_do_not_fit_are_named() -> None:
    networks, line = drawn(), lambda: nn.Linear(6, 1)
    for call, message in (
        (lambda: average_geometry(line, (6,), 4, probes=torch.ones(0, 6)), "probes is empty"),
        (lambda: average_geometry(line, (6,), 4, probes=torch.ones(2, 6) * torch.nan), "probes has a NaN"),
        (lambda: geometry_of(networks, torch.ones(0, 6)), "probes is empty"),
        (lambda: geometry_of(networks, torch.ones(2, 6) / 0), "probes has a NaN or infinity"),
        (lambda: geometry_of(networks, torch.ones(6)), r"probes \[6\] does not fit"),
    ):
        with pytest.raises(InputError, match=message):
            call()


class Unrecorded(nn.Module):
    """Numbers that torch does not draw, so the factory has to be called; NumPy's follow the seed all the same."""

    def __init__(self) -> None:
        import numpy as np

        super().__init__()
        self.w = nn.Parameter(torch.randn(3) + float(np.random.standard_normal()))  # noqa: NPY002

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w)[:, None]


def test_a_factory_that_was_called_for_each_network_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = dict(record(Unrecorded).reasons)
    assert list(reasons) == ["w"]
    G = average_geometry(Unrecorded, (3,), 8)
    Delta = geometry_evolution(Unrecorded, torch.ones(2, 3), torch.ones(2), 8)
    assert list(G.fallback) == list(Delta.fallback) == ["w"]
    assert average_geometry(lambda: nn.Linear(3, 1), (3,), 8).fallback == {}
    G.save(path := tmp_path / "g.safetensors")
    assert AverageGeometry.load(path).fallback == G.fallback
    tensors, about = read_tensors(path)  # a file from before there was such a field
    old = {k: v for k, v in json.loads(about["geometry"]).items() if k != "fallback"}
    write_tensors(path, tensors, {"geometry": json.dumps(old)})
    assert AverageGeometry.load(path).fallback == {}
    assert torch.equal(AverageGeometry.load(path).matrix, G.matrix)
    monkeypatch.setattr("biascope.geometry.average.DENSE_UP_TO", 1)
    assert list(average_geometry(Unrecorded, (3,), 8).fallback) == ["w"]
    assert list(geometry_evolution(Unrecorded, torch.ones(2, 3), torch.ones(2), 8).fallback) == ["w"]


def test_rank_by_a_share_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    G = geometry_of(drawn(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.eigvalsh(G.matrix).flip(0)
    for share in (0.3, 0.6, 0.9, 0.99):
        k = G.rank(share=share)
        assert float(values[:k].sum()) >= share * G.trace()
        assert float(values[: k - 1].sum()) < share * G.trace()
        assert k == subspace_size(G.matrix, share=share)
    assert G.rank(0.05) == subspace_size(G.matrix, threshold=0.05)
    x, y = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)), torch.ones(9)
    Delta = geometry_evolution(bare, x, y, 50)
    sizes = torch.linalg.eigvalsh(Delta.matrix).abs().sort(descending=True).values
    assert Delta.rank(share=0.5) == int((sizes.cumsum(0) < 0.5 * sizes.sum()).sum()) + 1
    monkeypatch.setattr("biascope.geometry.average.DENSE_UP_TO", 4)
    with pytest.raises(UnsupportedError, match="matrix-free"):
        average_geometry(bare, (6,), 20).rank(share=0.9)


def test_one_dead_network_does_not_stop_an_average() -> None:
    """Half of these networks have no gradient. Whether the first one alone was looked at depended on the memory."""

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))

    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    for seed in range(6):
        much, little = (geometry_evolution(narrow, x, y, 64, seed=seed, max_memory=room) for room in (None, "2KB"))
        eye = torch.eye(3)
        torch.testing.assert_close((little @ eye).double(), (much @ eye).double(), rtol=1e-4, atol=1e-6)
