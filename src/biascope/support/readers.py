"""Data as people hold it (arrays, lists, columns of tables, dicts of a data set, loaders), read as tensors.

Nothing is imported for it: an array or a column of pandas, polars or JAX is known by what it can do.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, SubsetRandomSampler

from biascope.support.errors import InputError
from biascope.support.seeds import generator

X_NAMES = ("x", "X", "images", "image", "img", "inputs", "input", "data", "features", "pixel_values", "x_train")
Y_NAMES = ("y", "Y", "labels", "label", "targets", "target", "classes", "y_train")
LABELS = ("y", "label", "target", "class", "other")  # how arguments that hold labels begin; of alignments, `other`
BATCH = 128  # examples of a data set that are read at once


def to_tensor(value: Any, name: str = "x") -> Any:
    """A tensor of an array, a list of numbers or tensors, or a column or table; anything else as it is.

    Words become the numbers of their classes, in alphabetical order, where the name is that of labels.

    Example:
        >>> to_tensor([[1.0, 2.0]]), to_tensor(["cat", "dog", "cat"], "y")
        (tensor([[1., 2.]], dtype=torch.float64), tensor([0, 1, 0]))
    """
    if isinstance(value, Tensor | str | bytes | Mapping | DataLoader | Dataset):
        return value
    if isinstance(value, list) and value and all(isinstance(v, Tensor) for v in value):
        return torch.stack(value) if all(v.dim() == 0 for v in value) else value
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    elif not isinstance(value, np.ndarray):
        if not isinstance(value, list) and not (hasattr(value, "__array__") and hasattr(value, "shape")):
            return value
        if isinstance(value, list) and not _holds_numbers_or_words(value):
            return value
        try:
            value = np.asarray(value)
        except ValueError:  # rows of several lengths
            return value
    return _from_array(value, name)


def _holds_numbers_or_words(value: list[Any]) -> bool:
    first: Any = value
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, str | bool | int | float | np.generic)


def _from_array(array: Any, name: str) -> Tensor:
    kind = array.dtype.kind
    if kind == "O" and array.size and all(isinstance(v, bool | int | float | np.number) for v in array.flat):
        array = array.astype(float)
        kind = "f"
    if kind in "OUST" and name.lower().startswith(LABELS):
        return torch.from_numpy(np.unique(array.astype(str), return_inverse=True)[1].reshape(array.shape)).long()
    if kind not in "biufc":
        raise InputError(
            f"{name} holds {array.dtype} values, not numbers: give columns of numbers, and words as the numbers of "
            "their classes (pandas.factorize, sklearn.preprocessing.OrdinalEncoder)"
        )
    if kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.byteorder not in "=|" or not array.flags.writeable or any(s < 0 for s in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="))  # torch takes no others
    return torch.from_numpy(array)


def pair_of(item: Mapping[str, Any], arguments: Collection[str] = ()) -> tuple[Any, Any] | None:
    """x and y of a dict by their usual names; None for keyword arguments of a network that takes such.

    Example:
        >>> pair_of({"image": torch.zeros(2, 3), "label": torch.tensor([0, 1]), "path": ["a", "b"]})[1]
        tensor([0, 1])
    """
    x = next((name for name in X_NAMES if name in item), None)
    y = next((name for name in Y_NAMES if name in item), None)
    if x is None or y is None:
        return None
    given = [name for name in item if name != "labels"]
    if all(name in arguments for name in given):
        return None
    return item[x], item[y]


def keywords_of(item: Any, arguments: Collection[str]) -> Any:
    """Inputs that come one after another, as keywords of a network that needs several of them; else what was given."""
    if not (isinstance(arguments, Mapping) and isinstance(item, tuple | list) and item) or isinstance(item[0], Mapping):
        return item
    needed, known = [k for k, v in arguments.items() if v], [k for k, v in arguments.items() if v is not False]
    if len(needed) < 2 <= len(known):
        masked = "mask" in known[1] and len(item) > 1 and is_padding_mask(item[0], item[1])
        if masked and len(item) == 3:  # as tokenizers and tutorials put them
            return {known[0]: item[0], known[1]: item[1]}, item[2]
        if masked or len(item) > 2:
            named = [f"{name!r}: ..." for name in known[: max(len(item) - 1, 2)]]
            ways = [named, [named[0], "'labels': ..."]] if masked else [[*named, "'labels': ..."]]
            asked = " or ".join(f"{{{', '.join(way)}}}" for way in ways)
            raise InputError(f"a batch of {len(item)} parts: say what they are, {asked}")
    if len(needed) < 2:
        return item
    nested = len(item) == 2 and isinstance(item[0], tuple | list) and len(item[0]) == len(needed)
    parts = [*item[0], item[1]] if nested else item
    inputs, labels = dict(zip(needed, parts)), parts[len(needed) :]
    if len(inputs) < len(needed) or len(labels) > 1:
        return item
    return (inputs, *labels) if labels else inputs


def is_padding_mask(tokens: Any, mask: Any) -> bool:
    """Is this 0 where texts [n, tokens] are padded, at one end with one token, and 1 elsewhere? Few labels are so.

    Example:
        >>> ids = torch.tensor([[5, 7, 0], [8, 0, 0]])
        >>> is_padding_mask(ids, ids != 0), is_padding_mask(ids, ids > 6)
        (True, False)
    """
    if not all(isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point() for t in (tokens, mask)):
        return False
    if tokens.shape != mask.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    turns, pads = mask.long().diff(dim=1), tokens[mask == 0]
    one_end = bool((turns <= 0).all()) or bool((turns >= 0).all())
    return one_end and bool((pads == pads[:1]).all())


def as_loader(data: Any) -> Any:
    """A data set in batches, also one that is a list of (example, label); anything else as it is."""
    pair = data[0] if isinstance(data, list) and data and isinstance(data[0], tuple | list) else ()
    held = len(pair) == 2 and isinstance(pair[0], Tensor | np.ndarray) and np.ndim(pair[1]) == 0
    columns = hasattr(data, "column_names") and hasattr(data, "__getitem__")  # the datasets library
    if columns and hasattr(data, "with_format"):
        data = data.with_format("torch")
    if isinstance(data, Dataset) or held or columns:
        return DataLoader(data, batch_size=BATCH, collate_fn=_collated)
    if isinstance(getattr(data, "x", None), Tensor) and isinstance(getattr(data, "y", None), Tensor):
        return data.x, data.y  # biascope.data.Dataset
    return data


def _collated(rows: list[Any]) -> Any:
    try:
        return torch.utils.data.default_collate(rows)
    except TypeError as error:
        raise InputError(
            f"the data set's examples cannot be put together ({str(error).rpartition('; ')[2]}): pictures need a "
            "transform, as in training, e.g. torchvision.transforms.ToTensor()"
        ) from error


def in_order(loader: DataLoader[Any], what: str) -> Any:
    """A loader that shuffles, in the order of its data set: without copies where it visits every example once."""
    warnings.warn(
        f"{what} is a DataLoader that shuffles: its examples are taken in the order of its data set. What you read "
        "from it yourself, labels for example, comes in another order: use shuffle=False for that",
        stacklevel=2,
    )
    sampler, data = loader.sampler, loader.dataset
    plain = type(loader) is DataLoader and loader.batch_size is not None
    if plain and isinstance(sampler, SubsetRandomSampler):
        data = Subset(data, list(sampler.indices))
    elif not (plain and type(sampler) is RandomSampler and not sampler.replacement):
        return list(loader)  # as it comes this once
    return DataLoader(
        data,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )


def drawn(loader: DataLoader[Any], count: int, seed: int, what: str) -> DataLoader[Any]:
    """The same loader over `count` random examples of its data set, the same for a seed and for `what` they are.

    As it is where it chooses its examples itself.
    """
    source, own = loader.dataset, getattr(loader.sampler, "indices", None)
    if type(loader) is not DataLoader or isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        return loader
    where = torch.arange(len(source), device="cpu") if own is None else torch.tensor(list(own), device="cpu")
    some = torch.randperm(len(where), generator=generator(seed, what), device="cpu")[:count]
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or BATCH
    return DataLoader(Subset(source, where[some].tolist()), batch_size=size, collate_fn=loader.collate_fn)
