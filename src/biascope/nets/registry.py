"""Networks by name, and the user's own by `package.module:factory` or `path/to/script.py:factory`."""

import importlib
import importlib.util
import inspect
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from torch import nn

from biascope.support.errors import BiascopeError, InputError, near, no_network
from biascope.support.seeds import seeded
from biascope.support.signatures import checked
from biascope.support.tables import facts

Factory = Callable[..., nn.Module]
F = TypeVar("F", bound=Factory)
KNOWN = re.compile(  # of torchvision
    r"resnet(18|34|50|101|152)|(wide_resnet|resnext)\d+_\w+|vgg(11|13|16|19)(_bn)?|densenet(121|161|169|201)|alexnet"
    r"|vit_[blh]_\d+|mobilenet_v[23]\w*|efficientnet_\w+|convnext_\w+|swin_\w+|googlenet|inception_v3|squeezenet\w+"
)
OWN = "package.module:factory or path/to/script.py:factory"


@dataclass(frozen=True)
class NetInfo:
    """What the registry knows of one network.

    `input_shape` is the shape of one example with the default options; `defaults` are all options of the factory and
    the value each has under this name.
    """

    name: str
    factory: Factory = field(repr=False)
    summary: str
    input_shape: tuple[int, ...]
    defaults: Mapping[str, Any] = field(repr=False)

    def _repr_html_(self) -> str:
        """What it is and its options, for notebooks."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.defaults.items())
        rows = {"what": self.summary, "input": " x ".join(map(str, self.input_shape)), "options": options}
        return facts(self.name, rows)

    @checked
    def options_for(self, input_shape: Sequence[int]) -> dict[str, int]:
        """The options that make this network accept examples of another shape."""
        shape = tuple(input_shape)
        if "in_features" in self.defaults:
            return {"in_features": math.prod(shape)}
        if len(shape) != 3 or shape[1] != shape[2]:
            raise InputError(f"{self.name} takes square images (channels, side, side), got input shape {shape}")
        return {"in_channels": shape[0], "image_size": shape[1]}


_REGISTRY: dict[str, NetInfo] = {}


@checked
def register(name: str, *, summary: str, input_shape: Sequence[int], **options: Any) -> Callable[[F], F]:
    """Put a class (or any function that builds a module) into the registry; `options` override its defaults.

    Example:
        >>> from torch import nn
        >>> @register("two-to-one", summary="a line", input_shape=(2,))
        ... def two_to_one(bias: bool = True) -> nn.Module:
        ...     return nn.Linear(2, 1, bias=bias)
        >>> build("two-to-one", bias=False)
        Linear(in_features=2, out_features=1, bias=False)
        >>> unregister("two-to-one")
    """

    def keep(factory: F) -> F:
        old = _REGISTRY.get(name)
        if old is not None and _where(old.factory) != _where(factory):
            raise InputError(f"{name!r} is taken by {_where(old.factory)}: choose another name for {_where(factory)}")
        parameters = inspect.signature(factory).parameters.values()
        signature = {p.name: p.default for p in parameters if p.default is not p.empty}
        defaults = MappingProxyType({**signature, **options})
        _REGISTRY[name] = NetInfo(name, factory, summary, tuple(input_shape), defaults)
        return factory

    return keep


@checked
def unregister(name: str) -> None:
    """Take a network out of the registry."""
    del _REGISTRY[info(name).name]


def names() -> tuple[str, ...]:
    """All registered names, sorted.

    Example:
        >>> "lenet" in names()
        True
    """
    return tuple(sorted(_REGISTRY))


@checked
def info(name: str) -> NetInfo:
    """The entry of one name.

    Example:
        >>> info("lenet").input_shape
        (1, 32, 32)
    """
    if name not in _REGISTRY:
        other = f"; torchvision:{name} is one of torchvision's" if KNOWN.fullmatch(name) else ""
        raise InputError(f"no network is called {name!r}{other or near(name, names())} (for your own, type {OWN})")
    return _REGISTRY[name]


@checked
def build(name: str, seed: int | None = None, *, devices: Sequence[int] = (), **options: Any) -> nn.Module:
    """Build a network by name (or by anything `resolve` takes).

    With a seed the initial weights depend on the seed alone and the global random state is left as it was; without one
    they are drawn from the global state, as torch modules do. `devices`: CUDA devices on which the factory itself draws
    numbers (the networks here draw on the CPU).

    Example:
        >>> import torch
        >>> a, b = build("lenet", seed=0, outputs=10), build("lenet", seed=0, outputs=10)
        >>> all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
        True
    """
    factory = resolve(name)
    if seed is None:
        return factory(**options)
    with seeded(seed, *devices):
        return factory(**options)


@checked
def resolve(spec: str) -> Factory:
    """The factory behind a registry name, `package.module:factory` or `path/to/script.py:factory`.

    What comes back takes options by keyword, refuses unknown ones by name, and always returns an `nn.Module` or raises
    an `InputError` that says what the factory did instead.

    Example:
        >>> resolve("logreg")(in_features=4)
        LogReg(
          (linear): Linear(in_features=4, out_features=1, bias=True)
        )
        >>> resolve("torch.nn:Flatten")()
        Flatten(start_dim=1, end_dim=-1)
    """
    if ":" in spec:
        factory, defaults = _load(spec), {}
    else:
        entry = info(spec)
        factory, defaults = entry.factory, dict(entry.defaults)

    def make(**options: Any) -> nn.Module:
        valid = _option_names(factory)
        unknown = [name for name in options if valid is not None and name not in valid]
        if unknown:
            raise InputError(f"{spec} has no option {unknown[0]!r}{near(unknown[0], valid or ()) or '; it has none'}")
        with _named(spec):
            module = factory(**{**defaults, **options})
        if not isinstance(module, nn.Module):
            raise InputError(f"{spec} returned {no_network(module)}")
        return module

    return make


def _option_names(factory: Factory) -> list[str] | None:
    """What a factory takes by keyword; None where that is anything, or not known."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtins have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error of the user's own code says where it comes from."""
    try:
        yield
    except BiascopeError:
        raise
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {error}") from error


class NoFactoryError(InputError):
    """What stands at `module:name` builds no networks: `found`, which may be one."""

    def __init__(self, message: str, found: object = None) -> None:
        super().__init__(message)
        self.found = found


def _load(spec: str) -> Factory:
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{spec!r} is not complete: type {OWN}")
    module = _load_script(where) if where.endswith(".py") else _load_module(where)
    found = getattr(module, attribute, None)
    if found is None:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InputError(f"{where} has no {attribute!r}{near(attribute, public) or '; it has no function or class'}")
    if isinstance(found, nn.Module) or not callable(found):
        fix = f"not a factory: write `def build(): return ...` and type {where}:build"
        raise NoFactoryError(f"{spec} is a {type(found).__name__}, {fix}", found)
    return found  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    # an installed command does not have the working folder on its path, but users expect `mypkg.models:build` to work
    with _on_path(Path.cwd()), _named(f"importing {name}"):
        return importlib.import_module(name)


def _load_script(where: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    name = f"_biascope_script_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"there is no file {where}; type path/to/script.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    with _on_path(path.parent), _named(f"running {where}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """The folder importable for a moment, behind everything else so that it shadows nothing."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _where(factory: Factory) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', factory)}"
