"""From a package's files to plain tensors: idx, PNG, JPEG, ndjson and state dicts. Nothing is unpickled freely."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.data.catalogue import Source
from biascope.errors import CorruptError, InputError

Files = Mapping[str, bytes]


def decode_images(src: Source, files: Files) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """({train_x, train_y, test_x, test_y}, class names): x uint8 [n, c, h, w], y int64 [n]; sizes checked."""
    classes = src.classes
    if src.name in ("mnist", "fashion-mnist"):
        tensors = _idx_set(files)
    elif src.name == "cifar10":
        tensors = _cifar10(files)
    elif src.name == "quickdraw":
        tensors, classes = _quickdraw(files)
    elif src.name == "chest-xray":
        tensors = _chest_xray(files)
    else:
        raise InputError(f"no decoder for {src.name!r}")
    for split, n in (("train", src.n_train), ("test", src.n_test)):
        x, y = tensors[f"{split}_x"], tensors[f"{split}_y"]
        if x.shape != (n, *src.shape) or y.shape != (n,) or x.dtype != torch.uint8 or int(y.max()) >= len(classes):
            raise CorruptError(
                f"{src.name} {split}: images {list(x.shape)}, {len(y)} labels; expected {n} of {src.shape}"
            )
    return tensors, classes


def parse_idx(data: bytes) -> Tensor:
    """An idx file (big-endian header: 0, 0, type 8 = uint8, number of axes, sizes) as a uint8 tensor.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])).tolist()
        [7, 9]
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise CorruptError("not an idx file of unsigned bytes")
    axes = data[3]
    sizes = np.frombuffer(data, ">u4", axes, 4).astype(int)
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * axes)
    if body.size != sizes.prod():
        raise CorruptError(f"idx file announces {sizes.prod()} bytes and holds {body.size}")
    return torch.from_numpy(body.reshape(sizes).copy())


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


def _quickdraw(files: Files) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    names = sorted(files, key=str.lower)
    train, test = [], []
    for name in names:
        rows = [json.loads(line) for line in gzip.decompress(files[name]).splitlines()]
        grey = np.round(255 * np.asarray(rows, dtype=np.float64)).astype(np.uint8)
        drawings = torch.from_numpy(grey.reshape(-1, 1, 28, 28))
        train.append(drawings[:80])
        test.append(drawings[80:])
    labels = torch.arange(len(names))
    tensors = {
        "train_x": torch.cat(train),
        "train_y": labels.repeat_interleave(80),
        "test_x": torch.cat(test),
        "test_y": labels.repeat_interleave(20),
    }
    return tensors, tuple(name.removesuffix(".ndjson.gz") for name in names)


def _chest_xray(files: Files) -> dict[str, Tensor]:
    out = {}
    for split in ("train", "test"):
        names = sorted(name for name in files if name.startswith(f"{split}/"))
        out[f"{split}_x"] = torch.from_numpy(np.stack([_pillow(files[name], "L")[None] for name in names]))
        out[f"{split}_y"] = torch.tensor([int("/PNEUMONIA/" in name) for name in names])
    return out


def decode_state_dict(data: bytes) -> dict[str, Tensor]:
    """A torch state dict from a .pth file, loaded with `weights_only=True`: tensors only, no code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files make torch warn about its own storages
        try:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CorruptError("the weight file is damaged or holds more than tensors: refused") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CorruptError("the weight file is not a flat dictionary of tensors")
    return {str(name): tensor.contiguous() for name, tensor in state.items()}
