"""Measures of the source tree: lines, guards, public names, and the walks of two calls. `python tests/house.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[1] / "src"
GUARD_CALLS = ("check_", "refuse_", "explain")


def lines(folder: Path) -> int:
    """All lines of all Python files below a folder."""
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))


def guards_and_code(file: Path) -> tuple[int, int]:
    """Lines that only refuse, and other lines of code; docstrings, comments, imports and signatures do not count."""
    text = file.read_text()
    tree = ast.parse(text)
    silent: set[int] = set()
    guard: set[int] = set()
    for node in ast.walk(tree):
        text_only = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        if isinstance(node, ast.Import | ast.ImportFrom) or text_only:
            silent |= _span(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
            silent |= set(range(first, node.body[0].lineno))
        if _is_guard(node):
            guard |= _span(node)
    rows = text.splitlines()
    code = {i + 1 for i, row in enumerate(rows) if row.strip() and not row.strip().startswith("#")} - silent
    return len(code & guard), len(code - guard)


def _span(node: Any) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def _is_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.If):
        return isinstance(node.body[-1], ast.Raise) and not node.orelse
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_").startswith(GUARD_CALLS)
    if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
        name = getattr(node.value.func, "id", getattr(node.value.func, "attr", ""))
        return str(name).lstrip("_").startswith(GUARD_CALLS)
    return False


def guard_share(files: list[Path]) -> float:
    """Guards as a share of all code of some files."""
    both = [guards_and_code(file) for file in files]
    guards, code = sum(g for g, _ in both), sum(c for _, c in both)
    return guards / (guards + code)


def public_names() -> dict[str, int]:
    """Number of names in the `__all__` of every file of the library that has one."""
    found: dict[str, int] = {}
    for file in sorted((SRC / "biascope").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found[str(file.relative_to(SRC))] = len(ast.literal_eval(node.value))
    return found


def walk(call: Callable[[], Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """Files of the package, and named functions in them, that a call enters."""
    seen: set[tuple[str, str]] = set()
    root = str(SRC / "biascope")

    def enter(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file for file, _ in seen}, seen


def two_walks() -> dict[str, tuple[set[str], set[tuple[str, str]]]]:
    """`bs.ntk(net, x)` and `bs.fisher(net, data, "ekfac") @ v` on Linear-Tanh-Linear, at the second call."""
    import torch
    from torch import nn

    import biascope as bs

    gen = torch.Generator().manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 3, generator=gen)
    v = torch.randn(sum(p.numel() for p in net.parameters()), generator=gen)
    calls = {
        "ntk": lambda: bs.ntk(net, x),
        "ekfac": lambda: bs.fisher(net, x, "ekfac") @ v,
        "hessian": lambda: bs.hessian(net, (x, torch.tensor([0, 1, 0, 1, 0]))) @ v,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = walk(call)
        except Exception as error:
            print(name, error)
    return found


def rooms() -> list[Path]:
    """The rooms of the library, without those where guards belong."""
    return sorted(p for p in (SRC / "biascope").iterdir() if p.is_dir() and p.name != "__pycache__")


if __name__ == "__main__":
    print("library", lines(SRC / "biascope"), "papers", lines(SRC / "biascope_papers"))
    total = [0, 0]
    for room in rooms():
        both = [guards_and_code(file) for file in room.rglob("*.py") if file.name != "door.py"]
        g, c = sum(a for a, _ in both), sum(b for _, b in both)
        print(f"{room.name:12} lines {lines(room):6} guards {g:5} code {c:6} share {g / (g + c):.1%}")
        if room.name != "support":
            total = [total[0] + g, total[1] + c]
    print(f"guards outside support: {total[0] / sum(total):.1%}")
    print("public names", sum(public_names().values()), public_names())
    for name, (files, functions) in two_walks().items():
        print(name, len(files), "files", len(functions), "functions")
        if name in sys.argv[1:]:
            for file, function in sorted(functions):
                print("   ", Path(file).relative_to(SRC), function)
