"""Inputs as users hand them in: tensors, keyword tensors, pairs with labels, loaders; checked once, here."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from operator import index
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from biascope.support.arguments import tensor_fix
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.hints import pairs_hint
from biascope.support.readers import as_loader, in_order, keywords_of, pair_of, to_tensor

Inputs = Tensor | dict[str, Tensor]  # one batch: a tensor [n, ...], or keyword arguments, each [n, ...]
SAMPLED = 4096  # entries by which a batch is recognised


def map_inputs(inputs: Inputs, fn: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply fn to the tensor, or to every keyword tensor."""
    return {k: fn(v) for k, v in inputs.items()} if isinstance(inputs, dict) else fn(inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors of a batch."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def nested_tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | tuple | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from nested_tensors(value)


def batch_size(inputs: Inputs) -> int:
    """Number of examples in a batch."""
    return tensors_of(inputs)[0].shape[0]


def take(inputs: Inputs, index: slice | Tensor) -> Inputs:
    """Some examples of a batch."""
    return map_inputs(inputs, lambda t: t[index])


def check_inputs(inputs: Any, what: str = "x") -> Inputs:
    """Validate one batch: tensors with equal leading size, at least one example, finite; arrays become tensors."""
    if isinstance(inputs, Mapping):
        inputs = {k: v if holds_words(v) else to_tensor(v, str(k)) for k, v in inputs.items() if k != "labels"}
        if not inputs or not all(isinstance(v, Tensor) for v in inputs.values()):
            raise InputError(
                f"{what}: a dict of inputs must hold tensors only, one per keyword argument of the model"
                f"{_odd_entry(inputs)}"
            )
        sizes = {k: v.shape[0] if v.dim() else None for k, v in inputs.items()}
        if len(set(sizes.values())) != 1:
            raise InputError(f"{what}: keyword inputs disagree on the number of examples: {sizes}")
    elif not isinstance(inputs, Tensor) and not isinstance(inputs := to_tensor(inputs, what), Tensor):
        got = f"{type(inputs).__name__}{tensor_fix(inputs, what)}"
        raise InputError(f"{what}: expected a tensor [n, ...] or a dict of tensors, got {got}")
    for name, t in inputs.items() if isinstance(inputs, dict) else [(what, inputs)]:
        if t.dim() == 0:
            raise InputError(f"{name} is a scalar; the first dimension must count examples")
        if t.shape[0] == 0:
            raise InputError(f"{name} is empty: shape {list(t.shape)} has no example")
        if t.is_complex():
            raise UnsupportedError(f"{name} is complex; only real inputs are supported")
        if t.is_floating_point() and t.numel() and not is_finite(t):
            bad = int((~torch.isfinite(t.reshape(t.shape[0], -1)).all(1)).nonzero()[0])
            raise InputError(f"{name} has a NaN or infinity, first in example {bad}")
    return map_inputs(inputs, lambda t: t.clone() if t.is_inference() else t)  # autograd refuses those


def _odd_entry(inputs: Mapping[str, Any]) -> str:
    """Which entry is no tensor, and what to do about it."""
    odd = next((k for k, v in inputs.items() if not isinstance(v, Tensor)), None)
    return "" if odd is None else f"; {odd!r} is a {type(inputs[odd]).__name__}: leave it out, or {pairs_hint(inputs)}"


def is_finite(t: Tensor) -> bool:
    """Is every entry a number? A sum of numbers is one, unless it overflows: then the least and the largest tell."""
    total: Any = t.sum().tolist()
    return isfinite(total) or all(map(isfinite, torch.stack(torch.aminmax(t)).tolist()))


def check_shape(shape: Any, what: str = "input_shape") -> tuple[int, ...]:
    """The shape of one input, without the batch: whole numbers from 1 on."""
    if isinstance(shape, Tensor):
        raise InputError(
            f"{what} is a tensor of shape {tuple(shape.shape)}: pass the shape of one input, e.g. x.shape[1:]"
        )
    if not isinstance(shape, str):
        try:
            found = tuple(index(extent) for extent in shape)
            if found and min(found) >= 1:
                return found
        except TypeError:
            pass
    fix = f"({shape},)" if isinstance(shape, int) and shape > 0 else "whole numbers from 1 on, e.g. (3, 32, 32)"
    raise InputError(f"{what}={shape!r} is not the shape of one input: pass {fix}")


def read(data: Any, arguments: Collection[str] | None = None, what: str = "x") -> Any:
    """Data as people hold them in one of four forms: a tensor, keyword tensors, a pair (x, y), an iterable of batches.

    Arrays, lists of numbers and columns of tables become tensors, data sets loaders. A dict is a pair where it has the
    usual names of such, and not all of them are among the network's `arguments`; None takes every dict for keywords.
    """
    data = as_loader(to_tensor(data, what))
    if isinstance(data, Mapping) and arguments is not None:
        data = pair_of(data, arguments) or data
    if isinstance(data, tuple) and arguments is not None:
        data = keywords_of(data, arguments)
    if isinstance(data, tuple) and len(data) == 2:
        x, y = to_tensor(data[0], what), data[1]
        return (x, to_tensor(y, "y")) if isinstance(x, Tensor | Mapping) else data
    return data


def is_single(data: Any) -> bool:
    """Is this one batch: a tensor, a dict of keyword tensors, or a pair (x, y)?"""
    pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | Mapping)
    return pair or isinstance(data, Tensor | Mapping)


def batches(
    data: Any, what: str = "x", arguments: Collection[str] | None = None
) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Iterate over (inputs, labels or None).

    A tensor or a dict is one batch; a tuple (x, y) is one labelled batch; anything else is iterated over and each
    element is read in the same way (so a DataLoader, or a list of batches). `read` says what else is taken for those.
    """
    data = data if isinstance(data, Tensor) else read(data, arguments, what)
    if isinstance(data, Tensor | Mapping):
        labels = data.get("labels") if isinstance(data, Mapping) else None
        yield check_inputs(data, what), None if labels is None else to_tensor(labels, "y")
        return
    if is_single(data):
        yield check_inputs(data[0], what), data[1]
        return
    if not isinstance(data, Iterable) or isinstance(data, str):
        raise InputError(
            f"{what}: expected a tensor, a dict, (x, y) or an iterable of batches, got {type(data).__name__}"
        )
    count = 0
    for count, item in enumerate(data, start=1):
        where = f"batch {count - 1} of {what}"
        if isinstance(item, Mapping) and arguments is not None:
            item = pair_of(item, arguments) or item
        elif arguments is not None:
            item = keywords_of(item, arguments)
        labels = None
        if isinstance(item, tuple | list):
            first = to_tensor(item[0], where) if item else None
            if not isinstance(first, Tensor | Mapping):
                raise InputError(f"{where}: expected x or (x, y), got {type(item).__name__} of {len(item)}")
            item, labels = first, (item[1] if len(item) > 1 else None)
        elif isinstance(item, Mapping):
            labels = item.get("labels")
        yield check_inputs(item, where), _numbered(labels, where)
    if count == 0:
        raise InputError(f"{what} is empty: the iterable gave no batch")


def _numbered(labels: Any, where: str) -> Any:
    """Labels of one batch of several as a tensor; words have no numbers that all batches share."""
    if holds_words(labels):
        raise InputError(
            f"{where}: its labels are words; number the classes in the data set, e.g. classes = sorted(set(words)) and "
            "classes.index(word), so that all batches have the same numbers"
        )
    return to_tensor(labels, "y")


def holds_words(values: Any) -> bool:
    """Whether these are words, as labels may be."""
    return isinstance(values, list | tuple) and bool(values) and isinstance(values[0], str)


def shuffles(data: Any) -> bool:
    """Is this a DataLoader that gives another order, or other examples, at every pass?"""
    if not isinstance(data, DataLoader):
        return False
    samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    return any(isinstance(s, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) for s in samplers)


def readable_again(data: Any, what: str = "x", ordered: bool = True, same: bool = True) -> Any:
    """Data that can be read several times: tensors as they are, other batches as they are or as `Repeated`.

    A one-shot iterator is refused. With `ordered`, a DataLoader that shuffles is read in the order of its data set.
    With `same`, every pass is compared with the first.
    """
    if isinstance(data, Tensor | Mapping | tuple) or not isinstance(data, Iterable):
        return data
    if isinstance(data, Iterator):
        raise InputError(
            f"{what} is a one-shot iterator; pass a list of batches or a DataLoader, which can be read again"
        )
    if ordered:
        data = ordered_by_data(data, what)
    return Repeated(data, what) if same and not isinstance(data, Repeated) else data


def ordered_by_data(data: Any, what: str = "x") -> Any:
    """A DataLoader that shuffles in the order of its data set, with a warning; anything else as it is."""
    return in_order(data, what) if shuffles(data) else data


class Repeated:
    """Batches that must be the same at every pass; the first pass says what they are."""

    def __init__(self, data: Iterable[Any], what: str) -> None:
        self.data, self.what = data, what
        self._marks: list[int] | None = None  # None until all batches were seen

    def __iter__(self) -> Iterator[Any]:
        marks: list[int] = []
        for item in self.data:
            marks.append(mark(item))
            i = len(marks) - 1
            if self._marks is not None and self._marks[i : i + 1] != marks[-1:]:
                raise InputError(
                    f"batch {i} of {self.what} is not what it was at the first pass: the examples must not change "
                    "(no shuffling, no random augmentation)"
                )
            yield item
        if self._marks is not None and len(marks) != len(self._marks):
            raise InputError(
                f"{self.what} gave {len(self._marks)} batches at the first pass and {len(marks)} at a later one; it "
                "must not change"
            )
        self._marks = marks


def mark(item: Any, seed: int = 0) -> int:
    """A checksum of the inputs of a batch, of their order too; of entries spread over them where there are many."""
    item = item[0] if isinstance(item, tuple | list) and item else item
    found = item.values() if isinstance(item, Mapping) else [item]
    for t in found:
        if not isinstance(t, Tensor):
            continue  # refused by `batches`
        flat, m = t.detach().reshape(-1), t.numel()
        if m > SAMPLED:  # steps of the golden ratio fall into no pattern of rows and columns
            places = torch.arange(SAMPLED, dtype=torch.float64, device="cpu").mul_(0.6180339887498949)
            flat = flat[places.frac().mul_(m).long().to(t.device)]
        shape = crc32(str(t.shape).encode(), seed)
        seed = crc32(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes(), shape)
    return seed


def refuse_samplers(data: Any, what: str = "x") -> None:
    """Raise for a DataLoader that gives every process other examples already, and some of them twice."""
    if isinstance(data, Repeated):
        data = data.data
    if isinstance(getattr(data, "sampler", None), DistributedSampler):
        raise InputError(
            f"{what} is a DataLoader with a DistributedSampler, which repeats examples where the ranks do not divide "
            "them: give every rank the same loader of all examples, without it; each runs its own share"
        )


def gather(data: Any, what: str = "x", arguments: Collection[str] | None = None) -> Inputs:
    """All examples of `data` as one batch (inputs only), in the order of `ordered_by_data`."""
    if isinstance(data, Tensor):
        return check_inputs(data, what)
    parts = [inputs for inputs, _ in batches(ordered_by_data(data, what), what, arguments)]
    return joined(parts, what)


def joined(parts: Sequence[Inputs], what: str) -> Inputs:
    """Batches as one."""
    if len(parts) == 1:
        return parts[0]
    shapes = [str([list(t.shape[1:]) for t in tensors_of(part)])[1:-1] for part in parts]
    if other := next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0):
        raise InputError(
            f"batch {other} of {what} has examples of shape {shapes[other]}, batch 0 {shapes[0]}: here all must have "
            "one shape; pad texts to one length, with attention_mask 0 there"
        )
    if isinstance(parts[0], dict):
        return {k: torch.cat([p[k] for p in parts if isinstance(p, dict)]) for k in parts[0]}
    return torch.cat([p for p in parts if isinstance(p, Tensor)])


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor: is every entry finite? Asked of all at once, so that a GPU is waited for once.

    The norms tell, with one operation for all. Only where a norm is not finite (an entry is not, or its square
    overflows) are the smallest and largest entries looked at.
    """
    some = [t for t in tensors if t.numel() and t.is_floating_point()]
    if not some or all(map(isfinite, torch.stack(torch._foreach_norm(some)).tolist())):
        return [True] * len(tensors)
    return [not t.numel() or all(map(isfinite, torch.stack(torch.aminmax(t)).tolist())) for t in tensors]
