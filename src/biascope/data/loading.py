"""Real sets as tensors: `load` for images, `load_weights` for networks; the digits need no download."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from biascope.data.catalogue import Kind, Source, source
from biascope.data.dataset import Dataset
from biascope.data.store import DATA, DIGITS_FILE, check, data_root, get
from biascope.support.errors import InputError
from biascope.support.signatures import checked

Split = Literal["train", "test"]


@checked
def load(
    name: str,
    split: Split | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    download: bool = False,
    root: str | Path | None = None,
) -> Dataset:
    """Images x [n, c, h, w] and labels y [n] (int64) of a real set; split None gives train followed by test.

    A floating `dtype` gives values in [0, 1], `torch.uint8` the stored grey levels. The files are checked against their
    sidecar first. A set that is not in the cache is an error, unless `download`.

    Example:
        >>> d = load("digits", "train")
        >>> d.x.shape, float(d.x.max()), d.info["classes"][:3]
        (torch.Size([1437, 1, 8, 8]), 1.0, ('0', '1', '2'))
    """
    src = _source(name, "images")
    splits: tuple[Split, ...] = ("train", "test") if split is None else (split,)
    if name == "digits":
        parts, classes = _digits(splits), src.classes
    else:
        folder = _folder(src, download, root)
        classes = tuple(check(folder, src, deep=True)["classes"])
        with safe_open(folder / DATA, framework="pt") as tensors:
            parts = [(tensors.get_tensor(f"{s}_x"), tensors.get_tensor(f"{s}_y")) for s in splits]
    x = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
    y = parts[0][1] if len(parts) == 1 else torch.cat([part[1] for part in parts])
    if dtype != torch.uint8:
        if not dtype.is_floating_point:
            raise InputError(f"dtype must be a floating type or torch.uint8, got {dtype}")
        x = x.to(dtype).div_(src.max_value)
    about = {"classes": classes, "split": split, "licence": src.licence, "citation": src.citation, "notes": src.notes}
    return Dataset(x, y, name, None, {**about, "package": f"{src.package} {src.version}"})


@checked
def load_weights(name: str, *, download: bool = False, root: str | Path | None = None) -> dict[str, Tensor]:
    """The state dict of a pretrained network ("mobilenet-v2" or "minilm"), from verified safetensors.

    Example:
        >>> state = load_weights("mobilenet-v2")  # doctest: +SKIP
    """
    src = _source(name, "weights")
    folder = _folder(src, download, root)
    check(folder, src, deep=True)
    return load_file(folder / (DATA if name == "mobilenet-v2" else "model.safetensors"))


def _source(name: str, kind: Kind) -> Source:
    src = source(name)
    if src.kind != kind:
        raise InputError(f"{name} holds {src.kind}, not {kind}: `load` gives images, `load_weights` gives weights")
    return src


def _folder(src: Source, download: bool, root: str | Path | None) -> Path:
    folder = data_root(root) / src.name
    if download:
        return get(src.name, root=root)
    if not folder.is_dir():
        raise InputError(f"{src.name} is not in {folder.parent}: run `biascope data get {src.name}`, or download=True")
    return folder


def _digits(splits: tuple[Split, ...]) -> list[tuple[Tensor, Tensor]]:
    src = source("digits")
    with np.load(DIGITS_FILE, allow_pickle=False) as stored:
        x = torch.from_numpy(stored["x"]).view(-1, *src.shape)
        y = torch.from_numpy(stored["y"]).long()
    cut = {"train": slice(None, src.n_train), "test": slice(src.n_train, None)}
    return [(x[cut[s]], y[cut[s]]) for s in splits]
