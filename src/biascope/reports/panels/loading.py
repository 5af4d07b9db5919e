"""Trained weights as people hold them: a state dict, a network, a file, a folder of `save_pretrained`."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from biascope.ensembles.redraw import from_transformers
from biascope.reports.panels.adapter import plain
from biascope.support.errors import InputError, near

WEIGHTS = (".pt", ".pth", ".safetensors", ".ckpt", ".bin")  # how files of weights are named
NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")  # in a folder of `save_pretrained`
KEPT_UNDER = ("state_dict", "model_state_dict", "model", "module", "net", "network")  # in a checkpoint
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch, anywhere in a name

Weights = str | Path | nn.Module | Mapping[str, Any]


def weights_name(weights: Weights) -> str:
    """What weights are called on a page."""
    if isinstance(weights, nn.Module):
        return f"the {type(plain(weights)).__name__} given"
    return "the state dict given" if isinstance(weights, Mapping) else Path(weights).name


def weights_stamp(weights: Weights | None) -> object:
    """What tells weights from others, for the name of a page."""
    if isinstance(weights, nn.Module):
        weights = plain(weights).state_dict()
    if not isinstance(weights, Mapping):
        return weights
    return [float(t.double().norm()) for t in weights.values() if isinstance(t, Tensor)]


def with_weights(network: nn.Module, weights: Weights) -> nn.Module:
    """The network with weights given in any of these ways."""
    if isinstance(weights, nn.Module | Mapping):
        name = f"'{weights_name(weights)}'"
        state = plain(weights).state_dict() if isinstance(weights, nn.Module) else weights
        return put_weights(network, tidied(state, name), name)
    path, own = Path(weights), plain(network)
    folder = path if path.is_dir() else path.parent
    if from_transformers(own) and (folder / "config.json").is_file() and _stored_otherwise(own, path):
        return put_weights(network, _from_pretrained(own, folder), path)
    return put_weights(network, load_state(path), path)


def _stored_otherwise(own: nn.Module, path: Path) -> bool:
    """Whether a `save_pretrained` folder keeps the weights in several files, or under other names than in memory."""
    if path.is_dir() and not any((path / name).is_file() for name in NAMES):
        return True
    return set(load_state(path)) != set(own.state_dict())


def _from_pretrained(own: Any, folder: Path) -> dict[str, Tensor]:
    """The state dict of a model read by transformers itself, which knows under which names it stores what."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, told = type(own).from_pretrained(
                folder, config=own.config, local_files_only=True, output_loading_info=True
            )
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"--weights {folder} cannot be read by transformers ({type(error).__name__}: {first})"
        ) from error
    missing = sorted(told.get("missing_keys", ()))
    if missing:
        raise InputError(
            f"--weights {folder} has no {_some(missing)} of {type(own).__name__}: they would be random, not trained"
        )
    return dict(made.float().state_dict())


def weights_file(folder: Path) -> Path | None:
    """The one file of weights in a folder: of `save_pretrained`, or the only one with such an ending."""
    named = [folder / name for name in NAMES if (folder / name).is_file()]
    found = named[:1] or [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS]
    return found[0] if len(found) == 1 else None


def load_state(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, from what `torch.save` wrote (no code is run), or from a folder with one.

    A checkpoint that keeps it under "state_dict" or "model" is opened; prefixes of `DataParallel` and `torch.compile`
    are taken off.
    """
    path = Path(path)
    if path.is_dir():
        if (index := next(path.glob("*.index.json"), None)) is not None:
            return _sharded(index)
        file = weights_file(path)
        if file is None:
            raise InputError(f"--weights {path} is a folder: name the file of weights in it")
        path = file
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
    return tidied(found, str(path))


def tidied(found: Any, name: str) -> dict[str, Tensor]:
    """The state dict in what was read, under the names of the plain network."""
    for key in KEPT_UNDER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"--weights {name} holds a {type(found).__name__}, not a state dict of tensors")
    state = {}
    for key, value in found.items():
        key = str(key)
        for wrapper in WRAPPERS:
            key = key.replace(wrapper, "")
        state[key.removeprefix("module.")] = value
    return state


def _sharded(index: Path) -> dict[str, Tensor]:
    """The state dict whose files a `save_pretrained` folder lists."""
    files = dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return {name: value for file in files for name, value in load_state(index.parent / file).items()}


def _unreadable(path: Path, error: Exception) -> InputError:
    first = str(error).splitlines()[0] if str(error) else ""
    problem = f"{type(error).__name__}: {first[:160]}"
    if isinstance(error, UnpicklingError):  # torch's own words are long, and advise to run what is in the file
        problem = "it is no weights file, or holds Python objects such as a whole model beside its tensors"
    return InputError(
        f"--weights {path} cannot be read ({problem}); "
        "give a safetensors file, or what torch.save(model.state_dict(), ...) writes"
    )


def fitted(own: Mapping[str, Tensor], state: Mapping[str, Tensor], path: object) -> dict[str, Tensor]:
    """The state dict under the network's names, where one level in front of all of them is all that differs."""
    if set(own) == set(state) or not own:
        return dict(state)
    found = {}
    for prefix in {name.partition(".")[0] + "." for name in state}:
        inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if set(inner) == set(own):
            found[prefix] = inner
    for prefix in {name.partition(".")[0] + "." for name in own}:
        outer = {prefix + name: value for name, value in state.items()}
        if set(outer) == set(own):
            found[prefix] = outer
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise InputError(f"--weights {path} holds several networks that fit ({names}): save the one that is meant")
    return next(iter(found.values()), dict(state))


def put_weights(network: nn.Module, state: Mapping[str, Tensor], path: object) -> nn.Module:
    """The network with these weights; every name or shape that does not fit is named."""
    own = network.state_dict()
    state = fitted(own, state, path)
    wrong = [
        f"{name} is {tuple(value.shape)} in the weights and {tuple(own[name].shape)} in the network"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]
    missing, extra = [name for name in own if name not in state], [name for name in state if name not in own]
    problems = wrong[:5]
    if missing:
        problems.append(f"the weights have no {_some(missing)}{near(missing[0], extra) if extra else ''}")
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
                f"--weights {path}: {name} is {value.dtype} in the weights and {own[name].dtype} in the network"
            )
        if not torch.isfinite(value).all():
            raise InputError(f"--weights {path}: {name} holds nan or infinity; take weights from before that happened")
    network.load_state_dict(dict(state))
    return network


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
