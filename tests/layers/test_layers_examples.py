"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import biascope.layers

NAMES = [m.name for m in pkgutil.iter_modules(biascope.layers.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"biascope.layers.{name}")).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [t for name in NAMES for t in finder.find(importlib.import_module(f"biascope.layers.{name}"))]
    assert sum(bool(t.examples) for t in tests) >= 7
