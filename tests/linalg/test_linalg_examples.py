"""The examples in the docstrings of the room run and give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import biascope.linalg as room

MODULES = [m.name for m in pkgutil.iter_modules(room.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name == "tensor_core_kernel":
        pytest.importorskip("triton")
    result = doctest.testmod(importlib.import_module(f"biascope.linalg.{name}"))
    assert result.failed == 0


def test_all_is_complete() -> None:
    assert sorted(room.__all__) == room.__all__
    assert all(hasattr(room, name) for name in room.__all__)
