"""The page that says what each check of the papers is tested by: everything it names exists."""

import ast
import re
from pathlib import Path

from biascope.studies.registry import find

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reference" / "checks.md").read_text(encoding="utf-8")


def rows(heading: str) -> set[str]:
    """The checks named in the first column under a heading; "7, 8" are two."""
    part = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| ")]
    return {check.strip() for cell in cells for check in cell.split(",")}


def test_every_test_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 150
    assert len(named) == PAGE.count("::")  # none is written in another form
    known: dict[str, set[str]] = {}
    for path, name in named:
        if path not in known:
            tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
            known[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in known[path], f"{path} has no {name}"


def test_every_study_named_exists() -> None:
    names = re.findall(r"study (\w+/[\w.\-]*\w)", PAGE)
    assert len(names) > 30
    for name in names:
        assert find(name).name == name


def test_every_check_has_a_row() -> None:
    for heading, wanted in (
        ("Neural anisotropy directions", [str(i) for i in range(1, 22)]),
        ("Geometric invariance", [str(i) for i in range(1, 23)]),
        (
            "Weight space and function space, parts A to C",
            [f"A{i}" for i in range(1, 11)] + [f"B{i}" for i in range(1, 11)] + [f"C{i}" for i in range(1, 8)],
        ),
        ("Weight space and function space, part D", [f"D{i}" for i in range(1, 10)]),
        ("Weight space and function space, part E", [f"E{i}" for i in range(1, 12)]),
        ("Spectral bias and tangent feature alignment", [str(i) for i in range(1, 36)]),
        ("Mutual information", [str(i) for i in range(36, 51)]),
        ("Linearization, EKFAC, lazy and hasty training", [str(i) for i in range(1, 37)]),
    ):
        assert set(wanted) <= rows(heading), set(wanted) - rows(heading)
