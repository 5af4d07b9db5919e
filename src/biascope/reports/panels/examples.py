"""Labelled data as people hold it, for a card: a name, a file, arrays, columns of a table, a data set, a loader."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from biascope import data
from biascope.support.errors import InputError, near
from biascope.support.inputs import holds_words
from biascope.support.readers import X_NAMES, Y_NAMES, as_loader, drawn, pair_of, to_tensor
from biascope.support.seeds import generator

EXAMPLES = 512  # read from a data set; panels take fewer
LEAST = 16
FILES = (".npz", ".safetensors", ".pt", ".pth")  # of data
MOST_CLASSES = 100_000  # labels beyond are identity numbers, not classes
FEW_CLASSES = 100  # real numbers are classes if they are whole and no more than these

Kind = Literal["classes", "numbers", "places"]


@dataclass(frozen=True)
class Examples:
    """Labelled inputs: x [n, ...], and y: classes [n] from 0 on, numbers [n, c] (regression), or a label per place.

    x is real, or the numbers of tokens.
    """

    name: str
    x: Tensor
    y: Tensor
    kind: Kind = "classes"

    @property
    def classes(self) -> int:
        """How many classes the labels have; 0 where they are no classes."""
        return int(self.y.max()) + 1 if self.kind == "classes" else 0

    @property
    def tokens(self) -> bool:
        """Whether the inputs are whole numbers."""
        return not self.x.is_floating_point()

    @property
    def stamp(self) -> int:
        """A checksum of the examples."""
        parts = [t.contiguous().cpu().numpy().tobytes() for t in (self.x, self.y)]
        return crc32(parts[1], crc32(parts[0]))

    def as_numbers(self) -> "Examples":
        """The same with the classes as numbers, for a network with one output."""
        return Examples(self.name, self.x, self.y.float().reshape(len(self.y), -1), "numbers")


def load_examples(given: Any, seed: int = 0) -> Examples:
    """Examples from what was given, a random part of them where there are many.

    A registry set (each channel standardised); a file .npz, .safetensors or .pt; (x, y) of tensors, arrays, lists or
    columns; a dict of those by the usual names; a Dataset, a DataLoader, or a list of batches.
    """
    if isinstance(given, Examples):
        return given
    name, x, y = _read(given, seed)
    x, y = to_tensor(x, "x"), to_tensor(y, "y")
    for what, t in (("x", x), ("y", y)):
        if not isinstance(t, Tensor):
            raise InputError(f"{name}: {what} should be a tensor, an array or a list, it is a {type(t).__name__}")
        if t.ndim == 0:
            raise InputError(f"{name}: {what} is a single number; its first axis must count examples")
    x, y = x.detach().to_dense(), y.detach().to_dense()
    if len(x) != len(y) or len(x) < LEAST:
        raise InputError(f"{name}: {len(x)} inputs and {len(y)} labels; it needs {LEAST} or more, as many of each")
    if len(x) > EXAMPLES:  # not the first ones: a file may be sorted by class
        keep = _some(len(x), seed)
        x, y = x[keep], y[keep]
    return Examples(name, *_checked(name, x, y))


def _some(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, "card data"))[:EXAMPLES]


def _read(given: Any, seed: int) -> tuple[str, Any, Any]:
    """A name for the page, x and y."""
    if isinstance(given, str | Path):
        path = Path(given)
        return (path.name, *_from_file(path)) if path.suffix in FILES else (str(given), *_registered(given, seed))
    if isinstance(given, data.Dataset):
        return f"data {given.name!r}", given.x, given.y
    if isinstance(given, Mapping):
        return ("the data given", *_pair(given, "the data given"))
    if isinstance(given, tuple) and len(given) == 2:
        return "the data given", *given
    given = as_loader(given)
    if not isinstance(given, Iterable) or isinstance(given, Tensor | np.ndarray):
        raise InputError(
            f"data is a {type(given).__name__}: inputs and labels are needed, e.g. data=(x, y), a DataLoader, or a file"
        )
    return ("the data given", *_from_batches(given, seed))


def _pair(item: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    found = pair_of(item)
    if found is None and "input_ids" in item:  # a batch of Hugging Face
        if not torch.as_tensor(item.get("attention_mask", 1)).all():
            warnings.warn("a card is about one input: attention_mask is left out, padding is read", stacklevel=9)
        found = (item["input_ids"], next((item[key] for key in Y_NAMES if key in item), None))
    if found is None or found[1] is None:
        raise InputError(
            f"{name} holds {', '.join(map(str, item))}: call inputs and labels x and y (known too: "
            f"{', '.join(X_NAMES[2:7])}; {', '.join(Y_NAMES[2:6])})"
        )
    return found


def _from_batches(given: Iterable[Any], seed: int) -> tuple[Any, Any]:
    """Enough examples of a loader or a list of batches: random ones where they can be asked for one by one."""
    if isinstance(given, DataLoader):
        given = drawn(given, EXAMPLES, seed, "card data")
    x: list[Tensor] = []
    y: list[Any] = []
    count = 0
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws from the global state
        for item in islice(given, 10 * EXAMPLES):
            more = _pair(item, "a batch of the data") if isinstance(item, Mapping) else item
            if not isinstance(more, tuple | list) or len(more) != 2:
                got = f"of {len(item)}" if isinstance(more, tuple | list) else "without labels"
                fix = "give pairs, e.g. [(b[0], b[-1]) for b in loader]"
                if hasattr(given, "columns"):  # iterating over a table gives the names of its columns
                    fix = "give inputs and labels of a table, e.g. data=(table[['a', 'b']], table['label'])"
                raise InputError(f"a batch of the data is a {type(item).__name__} {got}: {fix}")
            x.append(to_tensor(more[0], "x"))
            y.append(list(more[1]) if holds_words(more[1]) else to_tensor(more[1], "y"))
            count += len(x[-1])
            if count >= EXAMPLES:
                break
    if not x:
        raise InputError("the data are empty: there is no batch in them")
    if any(isinstance(labels, list) for labels in y):
        return torch.cat(x), [word for labels in y for word in labels]
    return torch.cat(x), torch.cat(y)


def _registered(given: str | Path, seed: int) -> tuple[Tensor, Tensor]:
    path, spec = Path(given), str(given)
    if path.is_file():
        raise InputError(f"--data {spec}: a file must be {', '.join(FILES)} and hold x and y")
    found = _loaded(spec)
    keep = _some(len(found.x), seed)
    mean, std = data.channel_stats(found.x[: 10 * EXAMPLES])
    part = data.normalise(data.Dataset(found.x[keep], found.y[keep], spec, seed, {}), mean, std)
    return part.x, part.y


def _loaded(spec: str) -> data.Dataset:
    if spec not in data.names():
        raise InputError(
            f"--data {spec!r}: no data set is called that{near(spec, images())}; or a file {', '.join(FILES)}"
        )
    return data.load(spec, "train")


def images() -> list[str]:
    """The registry's sets of labelled images."""
    return [name for name in data.names() if data.info(name).kind == "images"]


def load_inputs(spec: str) -> Tensor | dict[str, Tensor]:
    """All inputs of a registry set (its training data, each channel standardised as for a card) or of a file.

    Of a file, `x` [n, ...] as it is; without one, its tensors are the keyword arguments of the network.
    """
    path = Path(spec)
    if path.suffix in FILES:
        held = _held(path)
        if not isinstance(held, Mapping) or not held:
            raise InputError(f"--data {path} should hold x, it holds a {type(held).__name__}")
        if "x" in held:
            return torch.as_tensor(held["x"])
        return {name: torch.as_tensor(value) for name, value in held.items() if name not in Y_NAMES}
    whole = _loaded(spec)
    return data.normalise(whole, *data.channel_stats(whole.x[: 10 * EXAMPLES])).x


def _from_file(path: Path) -> tuple[Any, Any]:
    held = _held(path)
    if isinstance(held, tuple | list) and len(held) == 2:
        return held[0], held[1]
    if not isinstance(held, Mapping):
        raise InputError(f"--data {path} should hold x and y, it holds a {type(held).__name__}")
    return _pair(held, f"--data {path}")


def _held(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"--data {path}: there is no such file")
    try:
        held: Any
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                held = {name: np.asarray(stored[name]) for name in stored.files}
        elif path.suffix == ".safetensors":
            held = load_file(path)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"--data {path} cannot be read ({type(error).__name__}: {error})") from error
    return held


def _checked(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Kind]:
    """Inputs and labels in one of the forms of `Examples`."""
    if x.ndim == 1:
        x = x[:, None]
    if x.is_complex() or y.is_complex():
        raise InputError(f"{name}: complex numbers; give their real and imaginary parts as features")
    if x.dtype == torch.uint8 and x.ndim > 2:
        raise InputError(f"{name}: x are bytes {tuple(x.shape)}: scale them as in training, e.g. x.float() / 255")
    x = x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()
    for what, t in (("x", x), ("y", y)):
        if not torch.isfinite(t).all():
            raise InputError(f"{name}: {what} holds nan or infinity; fill or drop those examples first")
    if y.ndim == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all()):
        y = y.argmax(1)  # one-hot rows
    if y.ndim > 1 and y[0].numel() == 1:
        y = y.flatten()
    if y.ndim > 1:
        return (x, y.float(), "numbers") if y.is_floating_point() and y.ndim == 2 else (x, y, "places")
    if y.numel() and bool((y == y[0]).all()):
        raise InputError(f"{name}: all labels are the same")
    whole = not y.is_floating_point() or bool((y == y.round()).all())
    if y.is_floating_point() and not (whole and len(set(y.tolist())) <= FEW_CLASSES):
        return x, y.float()[:, None], "numbers"
    y = y.long()
    if set(y.tolist()) == {-1, 1}:
        y = (y + 1) // 2
    if int(y.min()) < 0 or int(y.max()) >= MOST_CLASSES:
        raise InputError(
            f"{name}: labels from {int(y.min())} to {int(y.max())}; number the classes, "
            "np.unique(y, return_inverse=True)[1], or give real numbers for a regression"
        )
    return x, y, "classes"
