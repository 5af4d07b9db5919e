"""What a card may be given beside the network: trained weights and labelled data."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from biascope import data
from biascope.support.errors import InputError, near
from biascope.support.seeds import generator

EXAMPLES = 512  # read from a data set; panels take fewer
WEIGHTS = (".pt", ".pth", ".safetensors", ".ckpt", ".bin")  # how files of weights are named
FILES = (".npz", ".safetensors", ".pt", ".pth")  # of data
MOST_CLASSES = 100_000  # labels beyond are identity numbers, not classes


@dataclass(frozen=True)
class Examples:
    """Labelled inputs: x [n, ...] in floating point, y [n] in classes 0, 1, ..."""

    name: str
    x: Tensor
    y: Tensor

    @property
    def classes(self) -> int:
        """How many classes the labels have."""
        return int(self.y.max()) + 1


def load_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file or from what `torch.save` wrote (tensors only, no code is run).

    A checkpoint that keeps it under "state_dict" or "model" is opened; a leading "module." (of DataParallel) or
    "_orig_mod." (of torch.compile) is taken off.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"--weights {path}: there is no such file")
    try:
        found: Any
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle raises its own kinds
        raise _unreadable(path, error) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"--weights {path} holds a {type(found).__name__}, not a state dict of tensors")
    return {str(name).removeprefix("module.").removeprefix("_orig_mod."): value for name, value in found.items()}


def _unreadable(path: Path, error: Exception) -> InputError:
    first = str(error).splitlines()[0] if str(error) else ""
    problem = f"{type(error).__name__}: {first[:160]}"
    if isinstance(error, UnpicklingError):  # torch's own words are long, and advise to run what is in the file
        problem = "it is no weights file, or holds Python objects such as a whole model beside its tensors"
    return InputError(
        f"--weights {path} cannot be read ({problem}); "
        "give a safetensors file, or what torch.save(model.state_dict(), ...) writes"
    )


def put_weights(network: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> nn.Module:
    """The network with these weights; every name or shape that does not fit is named."""
    own = network.state_dict()
    wrong = [
        f"{name} is {tuple(value.shape)} in the file and {tuple(own[name].shape)} in the network"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]
    missing, extra = [name for name in own if name not in state], [name for name in state if name not in own]
    problems = wrong[:5]
    if missing:
        problems.append(f"the file has no {_some(missing)}{near(missing[0], extra) if extra else ''}")
    if extra:
        problems.append(f"the network has no {_some(extra)}")
    if problems:
        hint = ""
        if wrong and not missing and not extra:
            hint = ". The network's options can be set, e.g. --set outputs=10, and its input with --input"
        raise InputError(f"--weights {path} does not fit this network: {'; '.join(problems)}{hint}")
    for name, value in state.items():
        if own[name].is_floating_point() and not value.is_floating_point():
            raise InputError(
                f"--weights {path}: {name} is {value.dtype} in the file and {own[name].dtype} in the network"
            )
        if not torch.isfinite(value).all():
            raise InputError(f"--weights {path}: {name} holds nan or infinity; take weights from before that happened")
    network.load_state_dict(dict(state))
    return network


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_examples(spec: str, seed: int = 0) -> Examples:
    """A registry data set (a random part of its training data, each channel standardised), or a file with x and y.

    Files: .npz, .safetensors or .pt with `x` [n, ...] in floating point and integer `y` [n]; a random part of a long
    one, as it is.
    """
    path = Path(spec)
    if path.suffix in FILES:
        x, y = _from_file(path)
    else:
        if path.is_file():
            raise InputError(f"--data {spec}: a file must be {', '.join(FILES)} and hold x and y")
        if spec not in data.names():
            raise InputError(f"--data {spec!r}: no data set is called that{near(spec, data.names())}")
        found = data.load(spec, "train")
        keep = torch.randperm(len(found.x), generator=generator(seed, "card data"))[:EXAMPLES]
        mean, std = data.channel_stats(found.x[: 10 * EXAMPLES])
        part = data.normalise(data.Dataset(found.x[keep], found.y[keep], spec, seed, {}), mean, std)
        x, y = part.x, part.y
    if len(x) != len(y) or len(x) < 16:
        raise InputError(f"--data {spec}: {len(x)} inputs and {len(y)} labels; it needs 16 or more, as many of each")
    if len(x) > EXAMPLES:  # not the first ones: a file may be sorted by class
        keep = torch.randperm(len(x), generator=generator(seed, "card data"))[:EXAMPLES]
        x, y = x[keep], y[keep]
    if not torch.isfinite(x).all():
        raise InputError(f"--data {spec}: x holds nan or infinity; fill or drop those examples first")
    if len(torch.unique(y)) < 2:
        raise InputError(f"--data {spec}: all labels are the same")
    if int(y.max()) >= MOST_CLASSES:
        raise InputError(
            f"--data {spec}: labels up to {int(y.max())}; number the classes, np.unique(y, return_inverse=True)[1]"
        )
    return Examples(path.name if path.suffix else spec, x, y)


def _from_file(path: Path) -> tuple[Tensor, Tensor]:
    if not path.is_file():
        raise InputError(f"--data {path}: there is no such file")
    try:
        held: Any
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                held = {name: torch.from_numpy(np.asarray(stored[name])) for name in stored.files}
        elif path.suffix == ".safetensors":
            held = load_file(path)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"--data {path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(held, Mapping) or "x" not in held or "y" not in held:
        names = ", ".join(map(str, held)) if isinstance(held, Mapping) else type(held).__name__
        raise InputError(f"--data {path} should hold x and y, it holds {names}")
    try:
        x, y = (torch.as_tensor(held[name]).detach().to_dense() for name in ("x", "y"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"--data {path}: x and y should be arrays of numbers ({error})") from error
    if x.ndim < 2 or not x.is_floating_point():
        raise InputError(
            f"--data {path}: x should be inputs [n, ...] in floating point as the network gets them (pixels scaled "
            f"as in training), it is {x.dtype} {tuple(x.shape)}"
        )
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or (len(y) and int(y.long().min()) < 0):
        fix = "; of one-hot rows take y.argmax(1)" if y.ndim == 2 and y.shape[1] > 1 else ""
        raise InputError(
            f"--data {path}: y should be classes 0, 1, ... of shape [n], it is {y.dtype} {tuple(y.shape)}{fix}"
        )
    return x.float(), y.long()
