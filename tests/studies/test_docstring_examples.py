"""The examples in the docstrings of studies, reports, the command and the small helpers run and are right."""

import doctest
import importlib
import pkgutil

import pytest

ROOMS = (
    "biascope.studies",
    "biascope.reports",
    "biascope.cli",
    "biascope.support.seeds",
    "biascope.support.bars",
    "biascope.geometry.pooling",
)


def modules() -> list[str]:
    found = []
    for room in ROOMS:
        found.append(room)
        package = importlib.import_module(room)
        if hasattr(package, "__path__"):
            found += [module.name for module in pkgutil.walk_packages(package.__path__, f"{room}.")]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
