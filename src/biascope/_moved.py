"""Import paths of version 0.1.0.dev0 that have moved: they work for one more version and warn with the new path."""

import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SUPPORT = "arguments errors figures files hints inputs memory precision seeds signatures tables"
_NETWORK = "derivatives elementary functional jacobian layers"
MOVED = {f"biascope.{name}": f"biascope.support.{name}" for name in _SUPPORT.split()}
MOVED |= {f"biascope.{name}": f"biascope.network.{name}" for name in _NETWORK.split()}
_PAPERS = "alignment ekfac lazy mine nad spectral"
MOVED |= {f"biascope.studies.{name}": f"biascope_papers.{name}" for name in _PAPERS.split()}
MOVED["biascope.refusals"] = "biascope.network.door"
MOVED["biascope.progress"] = "biascope.support.bars"
MOVED["biascope.kernels.ntk"] = "biascope.kernels.empirical"
MOVED["biascope.studies.function_space"] = "biascope_papers"
MOVED["biascope.studies.function_space.training"] = "biascope_papers.ntk.training"
MOVED["biascope.studies.invariance"] = "biascope_papers.gih"
MOVED["biascope.linearize.quadratic"] = "biascope.tangent.quadratic"
FUNCTIONS = {"biascope.linearize": "biascope.tangent"}  # packages whose name is that of a function


def new_path(name: str) -> str | None:
    """Where a module that has moved, or was inside one, is now."""
    place = name
    while place not in MOVED and "." in place:
        place = place.rpartition(".")[0]
    return MOVED[place] + name[len(place) :] if place in MOVED else None


class _OldPaths(MetaPathFinder, Loader):
    """Answers `import biascope.seeds` with the module `biascope.support.seeds`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if new_path(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_path(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} has moved: import {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._specs[new] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # the import system has put the old one there

    _specs: dict[str, ModuleSpec | None] = {}  # noqa: RUF012


def _stand_in(old: str, new: str) -> ModuleType:
    """A module for `from biascope.linearize import lazy` to find.

    Python binds a module that it has loaded to its package, but not one that is in `sys.modules` before: so
    `biascope.linearize` stays the function.
    """
    module = ModuleType(old, f"Moved to {new}.")
    module.__path__ = []
    module.__spec__ = ModuleSpec(old, None, is_package=True)

    def find(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # asked for by tools that look at all modules
            raise AttributeError(name)
        warnings.warn(f"{old} has moved: import {new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    module.__getattr__ = find  # type: ignore[method-assign]
    return module


def names_of_before(room: str) -> Callable[[str], Any]:
    """A `__getattr__` for a room: names that it exported in 0.1.0.dev0 and that only their module has now."""

    def find(name: str) -> Any:
        from biascope._replaced import REPLACED

        for made in REPLACED.get(room, ()):
            if made.__name__ == name:
                warnings.warn(f"{room}.{name} goes: use {made.__doc__}", DeprecationWarning, stacklevel=2)
                return made
        for file in [] if name.startswith("_") else pkgutil.iter_modules(sys.modules[room].__path__, f"{room}."):
            with suppress(ImportError):  # of an optional library
                value = vars(import_module(file.name)).get(name)
                if getattr(value, "__module__", None) == file.name:
                    warnings.warn(f"{room}.{name} has moved: import {file.name}", DeprecationWarning, stacklevel=2)
                    return value
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    return find


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldPaths())  # before the finder that would load a second copy from the file
    for old, new in FUNCTIONS.items():
        sys.modules.setdefault(old, _stand_in(old, new))
