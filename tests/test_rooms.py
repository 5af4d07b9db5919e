"""Data flows one way through the rooms of the code; this test is the law.

`ALLOWED[room]` lists the rooms a room may import from. A new room is added here in one line.
"""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "biascope"

ROOT_FILES = {"__init__.py", "__main__.py", "_moved.py", "_replaced.py"}
BASE = {"support", "_moved"}  # the latter: names of before, found by the rooms themselves
CORE = {"network", "linalg"}
SPACES = {"kernels", "curvature", "geometry", "tangent", "ensembles", "spectral"}
USES = {"probes", "optim", "editing", "fields", "information"}

ALLOWED: dict[str, set[str]] = {
    **{room: set() for room in BASE},
    "linalg": set(),
    "nets": set(),
    "data": set(),
    "network": {"linalg"},
    "kernels": CORE,
    "curvature": CORE | {"kernels"},
    "tangent": CORE,
    "spectral": CORE,
    "ensembles": CORE,
    "geometry": CORE | {"ensembles", "kernels"},
    "planning": CORE | {"kernels", "curvature"},
    **dict.fromkeys(USES, CORE | SPACES),
    "fields": CORE | SPACES | {"nets", "data"},  # coordinate networks are built there
    "information": CORE | SPACES | {"data"},  # its problems are drawn there
    "studies": CORE | SPACES | USES | {"nets", "data"},
    "reports": CORE | SPACES | USES | {"nets", "data", "studies"},
    "atlas": CORE | SPACES | {"reports"},  # a network is taken as the card takes it
    "cli": CORE | SPACES | USES | {"nets", "data", "studies", "reports", "atlas", "planning"},
}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms imported anywhere in the file, except under `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    package = ("biascope", *path.relative_to(SRC).parts[:-1])
    rooms = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parent = package[: len(package) - node.level + 1]
                module = ".".join((*parent, *(node.module or "").split("."))).strip(".")
            else:
                module = node.module or ""
            names = [module] if module != "biascope" else [f"biascope.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "biascope" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


FILES = sorted(
    p
    for p in SRC.rglob("*.py")
    if p.parent != SRC or p.name not in {"__init__.py", "__main__.py", "_moved.py", "_replaced.py"}
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_rooms(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is a new room: add it to ALLOWED in tests/test_rooms.py"
    wrong = imported_rooms(path) - ALLOWED[room] - BASE - {room, "__version__"}
    assert not wrong, f"{path.relative_to(SRC)} ({room}) must not import from {sorted(wrong)}"


def test_the_law_can_be_broken(tmp_path: Path) -> None:
    """The checker itself sees relative, absolute and late imports."""
    file = SRC / "linalg" / "__init__.py"
    fake = tmp_path / "x.py"
    fake.write_text("def f():\n    from biascope.kernels import ntk\nimport biascope.cli\nfrom biascope import data\n")
    original = Path.relative_to
    try:
        Path.relative_to = lambda self, *a, **k: original(file, SRC) if self == fake else original(self, *a, **k)  # type: ignore[method-assign]
        assert imported_rooms(fake) == {"kernels", "cli", "data"}
    finally:
        Path.relative_to = original  # type: ignore[method-assign]
