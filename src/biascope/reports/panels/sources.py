"""Where a network comes from: a registry name, your own factory, or a package that people know.

lenet                          a name from `biascope nets`
package.module:factory         your own; also path/to/script.py:factory
torchvision:resnet18           torchvision.models.get_model; with its weights where "pretrained" are asked for
timm:vit_tiny_patch16_224      timm.create_model, likewise
hf:bert                        a transformers configuration by type
hf:path/to/folder              a model of `save_pretrained` with its weights; or its name, if it was downloaded
"""

import ast
import copy
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from biascope import nets
from biascope.nets.registry import NoFactoryError
from biascope.reports.panels.adapter import Adapted, Way, argument_of, one_row, plain
from biascope.reports.panels.loading import WEIGHTS, Weights, weights_file
from biascope.studies.own_networks import own_factory
from biascope.support.errors import BiascopeError, InputError, UnsupportedError, near, no_network
from biascope.support.inputs import check_shape

Factory = Callable[[], nn.Module]
Spec = str | Callable[..., nn.Module]  # a name, or the function itself
Shape = tuple[int, ...]
TOKENS = 16  # of an input to a text model, unless another number is given


def name_of(spec: Spec) -> str:
    """What a network is called on its page."""
    if isinstance(spec, nn.Module):
        return type(plain(spec)).__name__
    return spec if isinstance(spec, str) else str(getattr(spec, "__name__", type(spec).__name__))


def resolve(spec: Spec, input_shape: Sequence[int] | None = None, **options: Any) -> tuple[Factory, Shape]:
    """A factory without arguments and the shape of one input.

    Example:
        >>> factory, shape = resolve("lenet", outputs=10)
        >>> shape
        (1, 32, 32)
    """
    asked = None if input_shape is None else check_shape(input_shape)
    if not isinstance(spec, str):
        return _handed_in(spec, asked, options)
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in PACKAGES:
        return PACKAGES[prefix](rest, asked, options)
    if not colon:
        _complete(spec)
    try:
        factory = own_factory(spec, settable=True)
    except NoFactoryError as error:
        if not isinstance(error.found, nn.Module):
            raise
        return _handed_in(error.found, asked, options)
    if colon:
        if asked is None:
            raise InputError(f"{spec}: say what one input looks like, for example --input 3,32,32")
        shape = asked
    else:
        info = nets.info(spec)
        shape = asked or tuple(info.input_shape)
        if shape != info.input_shape:
            options = {**info.options_for(shape), **options}
    return (lambda: factory(**options)), shape


@dataclass(frozen=True)
class Copies:
    """Copies of the one network that was handed in."""

    network: nn.Module

    def __call__(self) -> nn.Module:
        """One more."""
        return copy.deepcopy(self.network)


def _handed_in(
    factory: Callable[..., nn.Module], shape: Shape | None, options: Mapping[str, Any]
) -> tuple[Factory, Shape]:
    """A function of the caller's that builds a network; many are drawn, so that a network alone will not do."""
    name = name_of(factory)
    if shape is None:
        raise InputError(f"{name}: say what one input looks like, for example input_shape=(3, 32, 32)")
    if isinstance(factory, nn.Module):
        return Copies(plain(factory)), shape

    def make() -> nn.Module:
        made = factory(**options)
        if not isinstance(made, nn.Module):
            raise InputError(f"{name} returned {no_network(made)}")
        return made

    return _explained(name, make), shape


def takes(spec: Spec, option: str) -> bool:
    """Whether the registry network of that name has an option."""
    return isinstance(spec, str) and spec in nets.names() and option in nets.info(spec).defaults


def _complete(spec: str) -> None:
    """A script or a module without the name of a function is a frequent slip: say what is missing."""
    if (Path(spec) / "config.json").is_file():
        raise InputError(f"{spec} is a folder of save_pretrained: type hf:{spec}")
    where, dot, last = spec.rpartition(".")
    if spec in nets.names() or not dot:
        return
    if f".{last}" in WEIGHTS:
        raise InputError(
            f"{spec} holds weights: name the network they belong to, and give the file as --weights {spec}"
        )
    if last != "py":
        raise InputError(f"no network is called {spec!r}; for your own, type module:factory, here {where}:{last}")
    if not Path(spec).is_file():
        raise InputError(f"there is no file {spec}; type path/to/script.py:factory")
    try:
        tree = ast.parse(Path(spec).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{spec} cannot be read as Python: {error}") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [node.name for node in sorted(found, key=_unlikely)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    shown = f"; it has {', '.join(names[:8])}{more}"
    hint = shown if names else "; it has none yet: def build(): return nn.Sequential(...)"
    raise InputError(f"say which function builds the network: type {spec}:{names[0] if names else 'build'}{hint}")


def _unlikely(node: ast.FunctionDef | ast.ClassDef) -> int:
    """0 for functions that need no arguments, as what builds a network, 1 for such classes, 2 for all others."""
    within = node.body if isinstance(node, ast.ClassDef) else [node]
    functions = [one for one in within if isinstance(one, ast.FunctionDef)]
    made = next((one for one in functions if node is one or one.name == "__init__"), None)
    if made is None:
        return 2  # a class that takes what its parent takes
    given, own = made.args, int(isinstance(node, ast.ClassDef))
    free = len(given.posonlyargs + given.args) - own <= len(given.defaults) and None not in given.kw_defaults
    return own if free else 2


def _torchvision(name: str, shape: Shape | None, options: Mapping[str, Any]) -> tuple[Factory, Shape]:
    models = _package("torchvision").models
    _known(name, models.list_models(), "torchvision")
    if shape is not None and len(shape) == 3 and shape[0] != 3:
        raise InputError(
            f"torchvision:{name} takes images of 3 channels, not {shape[0]}: use --input 3,{shape[1]},{shape[2]}, or a "
            "timm: network, which takes any number"
        )
    if shape is not None and len(shape) == 3 and name.startswith("vit_"):
        options = {"image_size": shape[1], **options}  # its position embedding has one size
    return _explained(f"torchvision:{name}", lambda: models.get_model(name, weights=None, **options)), shape or (
        3,
        *([299] * 2 if name.startswith("inception") else [224] * 2),
    )


def _timm(name: str, shape: Shape | None, options: Mapping[str, Any]) -> tuple[Factory, Shape]:
    timm = _package("timm")
    _known(name, timm.list_models(), "timm")
    config = timm.get_pretrained_cfg(name)
    if shape is not None and len(shape) == 3:
        size = {"img_size": shape[1:]} if getattr(config, "fixed_input_size", False) else {}
        options = {"in_chans": shape[0], **size, **options}
    factory = _explained(f"timm:{name}", lambda: timm.create_model(name, pretrained=False, **options))
    return factory, shape or tuple(config.input_size)


def _transformers(name: str, shape: Shape | None, options: Mapping[str, Any]) -> tuple[Factory, Shape]:
    transformers = _package("transformers")
    folder = stored(name)
    if folder is None:
        if Path(name).is_absolute() or name.startswith("."):
            raise InputError(f"hf:{name}: there is no such folder")
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        _known(name, auto.CONFIG_MAPPING_NAMES, "hf")
    try:
        if folder is not None:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        else:
            config = transformers.AutoConfig.for_model(name, **options)
    except Exception as error:
        raise InputError(f"hf:{name}: no configuration could be made ({type(error).__name__}: {error})") from error
    config.use_cache = False

    def build() -> nn.Module:
        kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        config.dtype = torch.float32
        made: nn.Module = transformers.AutoModel.from_config(config) if kind is None else kind(copy.deepcopy(config))
        return Adapted(made.float(), Way(one_row, argument_of(made)))

    if shape is None:
        side = getattr(config, "image_size", None)
        hidden = getattr(config, "hidden_size", None)
        if side is not None:
            sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
            shape = (int(getattr(config, "num_channels", 3)), *map(int, sides))
        elif hidden is not None:
            shape = (TOKENS, int(hidden))
        else:
            raise InputError(f"hf:{name}: say what one input looks like, for example --input 16,128")
    return _explained(f"hf:{name}", build), shape


def stored(name: str) -> Path | None:
    """The folder of a transformers model: as it is named, or in the cache of downloads; None for a type of model."""
    if name and Path(name).is_dir():
        return Path(name)
    if "/" not in name and "-" not in name:
        return None
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, local_files_only=True))
    except Exception:  # not there, no name of the hub, or no such package
        return None


def weights_of(spec: Spec, weights: Weights | None) -> Weights | None:
    """The weights to show: those given, or those in the folder of `hf:folder`; "pretrained" are a package's own."""
    if isinstance(weights, str | Path) and str(weights) == "pretrained":
        return pretrained(spec)
    if isinstance(spec, str) and spec.startswith("hf:") and weights is None:
        folder = stored(spec.removeprefix("hf:"))
        if folder is not None and (weights_file(folder) or next(folder.glob("*.index.json"), None)):
            return folder
    return weights


def pretrained(spec: Spec) -> Path:
    """The file of a torchvision: or timm: network's pretrained weights, where it was downloaded; nothing is fetched."""
    package, _, name = (spec if isinstance(spec, str) else "").partition(":")
    checkpoints, file = Path(torch.hub.get_dir()) / "checkpoints", Path()
    if package == "torchvision":
        url = _package(package).models.get_model_weights(name).DEFAULT.url
        file, fetch = checkpoints / url.rpartition("/")[2], f"torchvision.models.get_model({name!r}, weights='DEFAULT')"
    elif package == "timm":
        config = _package(package).get_pretrained_cfg(name)
        file, fetch = checkpoints / str(config.url or name).rpartition("/")[2], f"timm.create_model({name!r}, True)"
        if config.hf_hub_id:
            hub = _package("huggingface_hub")
            kept = hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
            file = Path(kept) if isinstance(kept, str) else file
    else:
        raise InputError(
            "--weights pretrained is for torchvision: and timm: networks; hf:folder brings its own, others take a file"
        )
    if not file.is_file():
        raise InputError(f"{spec}: its pretrained weights are not on this disk; fetch them once with {fetch}")
    return file


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise UnsupportedError(f"{name} is not installed here: pip install {name}") from error
        raise _broken(name, error) from error
    except Exception as error:  # a build for another torch fails in its own ways
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is installed but cannot be imported ({type(error).__name__}: {error}); install the build made for "
        f"torch {torch.__version__}, from where torch itself came"
    )


def _known(name: str, known: Any, package: str) -> None:
    if name not in known:
        hint = near(name, list(known)) if name else ""
        raise InputError(f"{package} has no model {name!r}{hint if len(hint) < 200 else ''}")


def _explained(spec: str, build: Factory) -> Factory:
    def make() -> nn.Module:
        try:
            return build()
        except BiascopeError:
            raise
        except Exception as error:
            missing = re.findall(r"'(\w+)'", str(error)) if "required positional argument" in str(error) else []
            fix = f"; add {' and '.join(f'--set {name}=...' for name in missing)}" if missing else ""
            raise InputError(f"{spec} raised {type(error).__name__}: {error}{fix}") from error

    return make


PACKAGES = {"torchvision": _torchvision, "timm": _timm, "hf": _transformers}
