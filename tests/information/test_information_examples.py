"""The examples in the docstrings of `biascope.information`."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import biascope.information

MODULES = sorted(m.name for m in pkgutil.iter_modules(biascope.information.__path__, "biascope.information."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch, "nn": nn}).failed == 0
