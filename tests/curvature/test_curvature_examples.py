"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import biascope.curvature

NAMES = [m.name for m in pkgutil.iter_modules(biascope.curvature.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    module = importlib.import_module(f"biascope.curvature.{name}")
    result = doctest.testmod(module, extraglobs={"torch": __import__("torch"), "nn": __import__("torch").nn})
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = importlib.import_module("biascope.curvature.build")
    found = {t.name.rpartition(".")[2] for t in finder.find(module) if t.examples}
    assert found >= {"fisher", "ggn", "l2_metric"}
