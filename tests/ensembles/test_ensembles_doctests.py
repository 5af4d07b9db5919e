"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import biascope.ensembles

MODULES = sorted(m.name for m in pkgutil.iter_modules(biascope.ensembles.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"biascope.ensembles.{name}")).failed == 0
