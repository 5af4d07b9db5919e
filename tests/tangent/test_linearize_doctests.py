"""The examples in the docstrings run, and every public function has one."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import biascope.tangent as room

MODULES = sorted(m.name for m in pkgutil.iter_modules(room.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"biascope.tangent.{name}")
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_every_public_function_has_an_example() -> None:
    public = [getattr(room, name) for name in room.__all__]
    without = [f.__name__ for f in public if not isinstance(f, type) and "Example:" not in (f.__doc__ or "")]
    assert without == []
