"""The examples at which a probe measures: tensors, a pair, or some examples of a data set or loader, read once."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from biascope.probes.groups import check_labels
from biascope.probes.metrics import Metric
from biascope.support.errors import InputError
from biascope.support.hints import arguments_of
from biascope.support.inputs import Inputs, batch_size, batches, check_inputs, is_single, joined, map_inputs, read, take
from biascope.support.readers import drawn, to_tensor

EXAMPLES = 128  # taken from a data set or a loader


def probe_data(x: Any, y: Tensor | None, model: nn.Module, device: torch.device, seed: int) -> tuple[Any, Any, str]:
    """x and y of what was given, and a note where they are a part of it.

    A tensor or a dict of keywords stays as it is. Labels that come along (a pair, a dict with usual names, a batch of a
    loader) are taken as y. Of a data set or a DataLoader, `EXAMPLES` random ones are read once, in a fixed order, and
    moved to the device; a list of batches is taken whole.
    """
    arguments = arguments_of(model)
    data = read(x, arguments)
    if isinstance(data, Tensor):
        return x, y, ""
    if is_single(data):
        given, labels = data if isinstance(data, tuple) else (data, to_tensor(data.get("labels"), "y"))
        if y is not None and labels is not None:
            raise InputError("x_probe holds labels and y_probe gives others: pass only one of them")
        return given, labels if y is None else y, ""
    if y is not None:
        raise InputError("y_probe goes with tensors: a loader or a data set as x_probe brings its own labels")
    note = ""
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws from the global state
        if isinstance(data, DataLoader):
            source: Any = data.dataset
            data = drawn(data, EXAMPLES, seed, "probe examples")
            count = len(source) if hasattr(source, "__len__") else math.inf
            if count > EXAMPLES:
                note = f"measured at {EXAMPLES} of {'many' if count == math.inf else count} examples"
        inputs, labels = _some(data, arguments)
    if labels is not None:
        labels = labels.to(device)
    return map_inputs(inputs, lambda t: t.to(device)), labels, note


def _some(data: Any, arguments: Collection[str]) -> tuple[Inputs, Any]:
    """The first examples of some batches, all of a list."""
    xs: list[Inputs] = []
    ys: list[Any] = []
    most = EXAMPLES if isinstance(data, DataLoader) else None
    for inputs, labels in batches(data, "x_probe", arguments):
        xs.append(inputs)
        ys.append(labels)
        if most is not None and sum(map(batch_size, xs)) >= most:
            break
    inputs = take(joined(xs, "x_probe"), slice(most))
    return inputs, None if ys[0] is None else torch.cat(ys)[:most]


def probe_batch(
    x: Any, y: Tensor | None, groups: Mapping[str, Any], metrics: Sequence[Metric], device: torch.device
) -> tuple[Inputs, int]:
    """The probe batch and its size, if it is where the network is and has the labels that metrics need."""
    places = [("x_probe", x), ("y_probe", y)]
    places += [(f"groups[{name!r}]", t) for name, group in groups.items() if isinstance(group, tuple) for t in group]
    for name, given in places:
        for t in given.values() if isinstance(given, Mapping) else [given]:
            if isinstance(t, Tensor) and t.device != device:
                raise InputError(f"{name} is on {t.device}, the model on {device}: move it with .to('{device}')")
    inputs = check_inputs(x, "x_probe")
    n = batch_size(inputs)
    own = bool(groups) and all(isinstance(g, tuple) for g in groups.values())
    lacking = [m.name for m in metrics if "labels" in m.needs or ("group labels" in m.needs and not own)]
    if y is None and lacking:
        raise InputError(f"metrics {', '.join(lacking)} need labels: pass y_probe")
    if y is not None:
        check_labels(y, n, "y_probe")
    return inputs, n
