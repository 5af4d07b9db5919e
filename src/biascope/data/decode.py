"""From a package's files to plain tensors: idx, PNG, JPEG, ndjson and state dicts. Nothing is unpickled freely."""

import gzip
import io
import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.data.catalogue import Source
from biascope.support.errors import CorruptError, InputError

Files = Mapping[str, bytes]


def decode_images(src: Source, files: Files) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """({train_x, train_y, test_x, test_y}, class names): x uint8 [n, c, h, w], y int64 [n]; sizes checked."""
    known = {"cifar10": _cifar10, "quickdraw": _quickdraw, "chest-xray": _chest_xray, "faces": _faces}
    tensors = {**known, "astronaut": _astronaut, "elpv": _elpv}.get(src.name, _idx_set)(files)
    classes = src.classes or tuple(name.removesuffix(".ndjson.gz") for name in _sorted(files))
    for split, n in (("train", src.n_train), ("test", src.n_test)):
        x, y = tensors[f"{split}_x"], tensors[f"{split}_y"]
        if x.shape != (n, *src.shape) or y.shape != (n,) or x.dtype != torch.uint8 or bool((y >= len(classes)).any()):
            raise CorruptError(f"{src.name} {split}: {len(y)} labels of images {list(x.shape)}, expected {n}")
    return tensors, classes


def parse_idx(data: bytes) -> Tensor:
    """An idx file (big-endian header: 0, 0, type 8 = uint8, number of axes, sizes) as a uint8 tensor."""
    axes = data[3]
    sizes = np.frombuffer(data, ">u4", axes, 4).astype(int)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(sizes).copy())


def _idx_set(files: Files) -> dict[str, Tensor]:
    out = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for part, kind in (("x", "images-idx3-ubyte"), ("y", "labels-idx1-ubyte")):
            name = f"{prefix}-{kind}"
            raw = files[name] if name in files else gzip.decompress(files[f"{name}.gz"])
            tensor = parse_idx(raw)
            out[f"{split}_{part}"] = tensor[:, None] if part == "x" else tensor.long()
    return out


def _pillow(data: bytes, mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        from PIL import Image
    except ImportError:
        raise InputError('decoding PNG and JPEG needs Pillow: pip install "biascope[cli]"') from None
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert(mode), dtype=np.uint8)


def _cifar10(files: Files) -> dict[str, Tensor]:
    def batch(name: str) -> Tensor:  # one image a row: 1024 pixels wide
        return torch.from_numpy(_pillow(files[name], "RGB").reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy())

    return {
        "train_x": torch.cat([batch(f"data_batch_{i}.png") for i in range(1, 6)]),
        "train_y": torch.tensor(json.loads(files["train_lables.json"])),
        "test_x": batch("test_batch.png"),
        "test_y": torch.tensor(json.loads(files["test_lables.json"])),
    }


def _sorted(files: Files) -> list[str]:
    return sorted(files, key=str.lower)


def _quickdraw(files: Files) -> dict[str, Tensor]:
    train, test = [], []
    for name in _sorted(files):
        rows = [json.loads(line) for line in gzip.decompress(files[name]).splitlines()]
        grey = np.round(255 * np.asarray(rows, dtype=np.float64)).astype(np.uint8)
        drawings = torch.from_numpy(grey.reshape(-1, 1, 28, 28))
        train.append(drawings[:80])
        test.append(drawings[80:])
    labels = torch.arange(len(files))
    return {
        "train_x": torch.cat(train),
        "train_y": labels.repeat_interleave(80),
        "test_x": torch.cat(test),
        "test_y": labels.repeat_interleave(20),
    }


def _chest_xray(files: Files) -> dict[str, Tensor]:
    out = {}
    for split in ("train", "test"):
        names = sorted(name for name in files if name.startswith(f"{split}/"))
        out[f"{split}_x"] = torch.from_numpy(np.stack([_pillow(files[name], "L")[None] for name in names]))
        out[f"{split}_y"] = torch.tensor([int("/PNEUMONIA/" in name) for name in names])
    return out


def _faces(files: Files) -> dict[str, Tensor]:
    names = sorted(files, key=lambda name: int(name.rpartition("/")[2].removesuffix(".png")))
    faces = torch.stack([_colour(files[name]) for name in names])
    halved = faces.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)).round().to(torch.uint8)
    y, n = torch.zeros(len(names), dtype=torch.int64), len(names) - 100
    return {"train_x": halved[:n], "train_y": y[:n], "test_x": halved[n:], "test_y": y[n:]}


def _elpv(files: Files) -> dict[str, Tensor]:
    rows = [line.split() for line in files["labels.csv"].decode().splitlines()]
    cells = torch.from_numpy(np.stack([_pillow(files[name], "L")[None] for name, *_ in rows]))
    x = torch.cat([part.float().unfold(2, 3, 3).unfold(3, 3, 3).mean((4, 5)) for part in torch.split(cells, 256)])
    y = torch.tensor([int(float(likelihood) > 0.5) for _, likelihood, _ in rows])
    test = torch.arange(len(y)) % 5 == 4
    x = x.round().to(torch.uint8)
    return {"train_x": x[~test], "train_y": y[~test], "test_x": x[test], "test_y": y[test]}


def _astronaut(files: Files) -> dict[str, Tensor]:
    x, y = _colour(files["astronaut.png"])[None], torch.zeros(1, dtype=torch.int64)
    return {"train_x": x[:0], "train_y": y[:0], "test_x": x, "test_y": y}


def _colour(data: bytes) -> Tensor:
    return torch.from_numpy(_pillow(data, "RGB").transpose(2, 0, 1).copy())


def decode_state_dict(data: bytes) -> dict[str, Tensor]:
    """A torch state dict from a .pth file, loaded with `weights_only=True`: tensors only, no code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files make torch warn about its own storages
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return {str(name): tensor.contiguous() for name, tensor in state.items()}
