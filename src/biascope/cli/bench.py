"""`biascope bench`: run a file of the `benchmarks/` folder of a checkout, or of the copy that the wheel holds."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from biascope.support.errors import InputError, near

INSTALLED = Path(__file__).resolve().parents[1] / "_benchmarks"  # pyproject.toml puts it there
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A benchmark, e.g. ntk; without a name they are listed.")] = None,
) -> None:
    """Measure this machine against the installed rivals; what follows the name goes to the benchmark."""
    folder = find_folder(Path.cwd(), Path(__file__).resolve().parents[3])
    known = {file.stem: file for file in sorted(folder.glob("*.py")) if is_benchmark(file)}
    if name is None:
        typer.echo("\n".join(known))
        return
    if name not in known:
        raise InputError(f"no benchmark is called {name!r}{near(name, known)}")
    code = subprocess.run([sys.executable, str(known[name]), *context.args], check=False).returncode
    raise typer.Exit(code if code in (0, 130) else 1)


def is_benchmark(file: Path) -> bool:
    """Whether a file measures something by itself; what others import and what prints results does not."""
    return file.stem not in {"harness", "table"} and '__name__ == "__main__"' in file.read_text(encoding="utf-8")


def find_folder(*starts: Path) -> Path:
    """The `benchmarks/` folder of the checkout that holds one of these places, else the copy inside the package."""
    for start in starts:
        for place in (start, *start.parents):
            if (place / "benchmarks" / "harness.py").is_file():
                return place / "benchmarks"
    if (INSTALLED / "harness.py").is_file():
        return INSTALLED
    raise InputError(
        "this installation has no benchmarks: install the wheel, or clone the repository and run `biascope bench` in it"
    )
