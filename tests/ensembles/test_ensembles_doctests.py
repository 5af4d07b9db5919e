"""The examples in the docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["capture", "engines", "evaluate", "initialisers", "networks", "sweep", "train"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"biascope.ensembles.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
