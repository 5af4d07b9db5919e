"""Every public function has an example; the tests of each room run them (`doctest`)."""

import importlib
import inspect
from pathlib import Path

import pytest

import biascope

SRC = Path(biascope.__file__).parent
INNER = {"cli"}  # the command line
ROOMS = sorted(p.parent.name for p in SRC.glob("*/__init__.py") if p.parent.name not in INNER)


def functions(module: str) -> dict[str, str]:
    """{name: docstring} of the functions that a module says are public."""
    room = importlib.import_module(module)
    found = {name: getattr(room, name) for name in room.__all__}
    return {name: inspect.getdoc(f) or "" for name, f in found.items() if inspect.isfunction(f)}


@pytest.mark.parametrize("module", ["biascope", *(f"biascope.{room}" for room in ROOMS)])
def test_public_functions_have_an_example(module: str) -> None:
    found = functions(module)
    assert found or module in {
        "biascope.optim",
        "biascope.network",
        "biascope.planning",
    }  # classes alone, or nothing but bs.plan
    assert [name for name, words in found.items() if ">>> " not in words] == []


def test_the_rooms_are_found() -> None:
    assert {"kernels", "studies", "reports", "linalg", "data", "nets"} <= set(ROOMS)
