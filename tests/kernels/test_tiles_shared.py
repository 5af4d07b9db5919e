"""One kernel by several processes: the bits of one process, whoever is killed, late, or out of disk space."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import open_kernel, store
from biascope.support.claims import Claims
from biascope.support.errors import BiascopeError, InputError

SETTINGS: dict[str, Any] = {"outputs": "trace", "max_memory": "10KB", "precision": "float64"}


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.pause = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return self.net(x)  # type: ignore[no-any-return]


def make() -> tuple[Slow, torch.Tensor]:
    torch.manual_seed(3)
    return Slow(), torch.randn(90, 6)


def worker(folder: str, pause: float, full: bool, told: Any) -> None:
    """One process: what it has computed, or the error it ended with."""
    torch.set_num_threads(1)
    net, x = make()
    net.pause = pause
    mine, deliver = [], store.Store.deliver

    def noted(self: store.Store, tile: torch.Tensor, place: tuple[int, int]) -> None:
        if full and mine:
            with store.explain_write_errors(self.log):
                raise OSError(28, "No space left on device")
        mine.append(place)
        deliver(self, tile, place)

    store.Store.deliver = noted  # type: ignore[method-assign]
    try:
        K = bs.ntk(net, x, store=folder, **SETTINGS)
        told.send((mine, K.tensor.numpy().copy()))
    except BiascopeError as error:
        told.send((mine, str(error)))


class Crew:
    """Processes that fill one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.members = folder, list[tuple[Any, Any]]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "biascope", "torch.testing"])

    def add(self, pause: float = 0.0, full: bool = False) -> Any:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=worker, args=(str(self.folder), pause, full, theirs), daemon=True)
        process.start()
        theirs.close()
        self.members.append((process, mine))
        return process

    def listed(self) -> int:
        log = self.folder / "tiles.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def until(self, tiles: int) -> None:
        end = time.monotonic() + 60
        while self.listed() < tiles:
            assert time.monotonic() < end
            time.sleep(0.01)

    def results(self) -> list[Any]:
        found = []
        for process, pipe in self.members:
            try:
                assert pipe.poll(60), "a worker hangs"
                found.append(pipe.recv())
            except EOFError:
                found.append(None)  # killed
            process.join()
        return found


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path / "k")
    yield made
    for process, _ in made.members:
        process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    torch.set_num_threads(1)
    net, x = make()
    K = bs.ntk(net, x, store=tmp_path_factory.mktemp("one") / "k", **SETTINGS).tensor.clone()
    torch.testing.assert_close(K, bs.ntk(net, x, outputs="trace", precision="float64").tensor, rtol=1e-12, atol=1e-14)
    return K


def test_four_at_once_one_killed_and_one_late(crew: Crew, alone: torch.Tensor) -> None:
    for _ in range(3):
        crew.add(pause=0.02)
    crew.until(tiles=4)
    crew.members[0][0].kill()  # in the middle of a tile: it sleeps in one most of the time
    crew.add()
    killed, *others = crew.results()
    assert killed is None
    tiles = [tuple(place) for mine, _ in others for place in mine]
    assert len(tiles) == len(set(tiles)), "a tile was computed twice"
    assert all(mine for mine, _ in others), "a worker found nothing to do"
    for _, values in others:
        assert np.array_equal(values, alone)
    assert torch.equal(open_kernel(crew.folder).tensor, alone)
    assert sorted(file.name for file in crew.folder.iterdir()) == ["kernel.json", "tiles.jsonl", "values.npy"]
    lines = [json.loads(line) for line in (crew.folder / "tiles.jsonl").read_text().splitlines()]
    kernel = json.loads((crew.folder / "kernel.json").read_text())
    per_side = -(-90 // kernel["side"])
    assert len({(line["row"], line["col"]) for line in lines if "row" in line}) == per_side * (per_side + 1) // 2


def test_a_full_disk_on_one_of_them(crew: Crew, alone: torch.Tensor) -> None:
    crew.add(pause=0.005, full=True)
    crew.until(tiles=1)
    crew.add()
    (done, error), (others, values) = crew.results()
    assert len(done) == 1
    assert "No space left on device" in error
    assert len(others) > 1
    assert np.array_equal(values, alone)


def test_tiles_on_their_way(tmp_path: Path, alone: torch.Tensor) -> None:
    """Who finds the array taken leaves a parcel; a whole one is used, a damaged one computed again."""
    net, x = make()
    folder = tmp_path / "k"
    with store.Store.join(folder, *made(folder, net, x)) as one:
        work = one.work()
        with Claims(folder / "claims") as busy:
            assert busy.take("array")
            for _ in range(3):
                place = next(work)
                one.deliver(alone[one.slices(place)], place)
            assert one.done == {}
        _, second, third = sorted((folder / "parcels").iterdir())
        data = bytearray(second.read_bytes())
        data[-1] ^= 1
        second.write_bytes(data)
        third.write_bytes(third.read_bytes()[:40])
    computed = count_tiles(folder, net, x)
    assert len(computed) == len(one.places) - 1
    assert torch.equal(open_kernel(folder).tensor, alone)
    assert not (folder / "parcels").exists()


def test_damage_during_the_work_is_found_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make()
    deliver = store.Store.deliver
    computed = []

    def damage(self: store.Store, tile: torch.Tensor, place: tuple[int, int]) -> None:
        deliver(self, tile, place)
        computed.append(place)
        if len(computed) == 3:
            array = np.lib.format.open_memmap(self.array, mode="r+")
            array[0, 1] += 1.0
            array.flush()

    monkeypatch.setattr(store.Store, "deliver", damage)
    K = bs.ntk(net, x, store=tmp_path / "k", **SETTINGS)
    assert computed.count((0, 0)) == 2
    torch.testing.assert_close(K.tensor, bs.ntk(net, x, outputs="trace", precision="float64").tensor)


def test_who_joins_with_another_network_or_data_is_refused(tmp_path: Path) -> None:
    net, x = make()
    with store.Store.join(tmp_path / "k", *made(tmp_path / "k", net, x)) as one:
        next(one.work())  # nothing is finished yet
        with pytest.raises(InputError, match="its data is"):
            bs.ntk(net, x + 1, store=tmp_path / "k", **SETTINGS)
        other, _ = make()
        other.net[1] = nn.ReLU()  # the same parameters
        with pytest.raises(InputError, match="its entries are"):
            bs.ntk(other, x, store=tmp_path / "k", **SETTINGS)
        with torch.no_grad():
            other.net[0].weight.add_(1)
        with pytest.raises(InputError, match="its parameters is"):
            bs.ntk(other, x, store=tmp_path / "k", **SETTINGS)


def test_a_killed_beginning_is_begun_again(tmp_path: Path) -> None:
    net, x = make()
    (tmp_path / "k" / "claims").mkdir(parents=True)
    (tmp_path / "k" / "values.npy.new").write_bytes(b"half")
    assert bs.ntk(net, x, store=tmp_path / "k", **SETTINGS).tensor.shape == (90, 90)


# ---------------------------------------------------------------------------------------------------- helpers


def made(folder: Path, net: nn.Module, x: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `kernel.json` of this kernel says, from another folder."""
    other = folder.with_name("for-its-configuration")
    bs.ntk(net, x, store=other, **SETTINGS)
    config = json.loads((other / "kernel.json").read_text())
    return config, {key: config.pop(key) for key in ("side", "budget")}


def count_tiles(folder: Path, net: nn.Module, x: torch.Tensor) -> list[Any]:
    computed, deliver = [], store.Store.deliver

    def noted(self: store.Store, tile: torch.Tensor, place: tuple[int, int]) -> None:
        computed.append(place)
        deliver(self, tile, place)

    store.Store.deliver = noted  # type: ignore[method-assign]
    try:
        bs.ntk(net, x, store=folder, **SETTINGS)
    finally:
        store.Store.deliver = deliver  # type: ignore[method-assign]
    return computed
