"""`import biascope` stays light: measured by what gets imported, not by the clock."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "matplotlib",
    "sklearn",
    "transformers",
    "lightning",
    "ray",
    "typer",
    "rich",
    "PIL",
    "scipy.stats",
    "scipy.sparse",
    "pandas",
    "jax",
)


def modules_after(statement: str) -> set[str]:
    """Modules that `statement` imports beyond those that `import torch` brings."""
    lines = ["import json, sys, torch", "before = set(sys.modules)", statement]
    code = "\n".join([*lines, "print(json.dumps(sorted(set(sys.modules) - before)))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


def heavy(modules: set[str]) -> list[str]:
    return [name for name in HEAVY if any(module == name or module.startswith(f"{name}.") for module in modules)]


def test_import_biascope_brings_nothing_heavy() -> None:
    modules = modules_after("import biascope")
    assert "biascope" in modules
    assert heavy(modules) == []
    assert len(modules) < 40, sorted(modules)


@pytest.mark.parametrize("room", ["reports", "nets"])
def test_rooms_draw_nothing_until_asked(room: str) -> None:
    found = heavy(modules_after(f"import biascope.{room}"))
    assert not set(found) & {"matplotlib", "sklearn", "transformers", "typer", "rich", "PIL", "lightning", "ray"}


def test_every_public_name_is_there_without_an_import_of_its_own() -> None:
    code = "import biascope as bs; print(all(hasattr(bs, name) for name in bs.__all__), bs.reports.make_card.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "make_card"]


def test_pages_of_theory_are_there_too() -> None:
    """The reference lists them as biascope.geometry.PAGE."""
    page = (Path(__file__).parents[1] / "docs/reference/geometry.md").read_text()
    told = set(re.findall(r"^::: (biascope\.geometry\.\w+)$", page, re.MULTILINE))
    assert len(told) > 20
    code = "import biascope; " + "; ".join(sorted(told))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail() -> None:
    assert heavy(modules_after("import rich.table")) == ["rich"]
