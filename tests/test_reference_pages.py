"""Every public name is on a reference page, and every public function has an example (doctests run it)."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import biascope

PAGES = Path(__file__).parents[1] / "docs" / "reference"
ROOMS = (
    "kernels",
    "curvature",
    "optim",
    "geometry",
    "tangent",
    "editing",
    "fields",
    "information",
    "probes",
    "spectral",
    "ensembles",
)


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_documented(room: str) -> None:
    module = importlib.import_module(f"biascope.{room}")
    listed = set(re.findall(rf"^::: biascope\.{room}\.(\w+)$", (PAGES / f"{room}.md").read_text(), re.MULTILINE))
    top = set(biascope.__all__)  # public as bs.NAME, and documented beside their relatives
    assert listed - top == set(module.__all__) - top, f"docs/reference/{room}.md and biascope.{room}.__all__ differ"
    functions = [getattr(module, name) for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert functions or room == "optim"  # which has classes alone
    silent = [f.__name__ for f in functions if "Example:" not in (f.__doc__ or "")]
    assert not silent, f"biascope.{room}: without an example: {silent}"
