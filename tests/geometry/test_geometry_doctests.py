"""The examples in the docstrings run, and every public function has one."""

import doctest
import importlib
import pkgutil
from inspect import isfunction

import pytest
import torch

import biascope.geometry

MODULES = sorted(m.name for m in pkgutil.iter_modules(biascope.geometry.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"biascope.geometry.{name}")
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_every_public_function_has_an_example() -> None:
    public = [f for name in biascope.geometry.__all__ if isfunction(f := getattr(biascope.geometry, name))]
    without = [f.__name__ for f in public if "Example:" not in (f.__doc__ or "")]
    assert without == []
