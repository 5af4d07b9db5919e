"""The architectures of the papers, each small and readable, and a registry that builds them by name.

To add one: write a file with a decorated class (`@register(...)`) into this folder. All files here are imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from biascope.nets.coordinates import FFN, SIREN
from biascope.nets.dense import MLP
from biascope.nets.linear_pooling import LinearPooling as LinearPooling
from biascope.nets.registry import NetInfo as NetInfo
from biascope.nets.registry import build, info, names, register, resolve
from biascope.nets.registry import unregister as unregister

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

__all__ = ["FFN", "MLP", "SIREN", "build", "info", "names", "register", "resolve"]
