"""What a release needs says the same everywhere; `make wheel` builds one and uses it."""

import re
import tomllib
from pathlib import Path

import yaml

import biascope

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_one_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert biascope.__version__ == cited["version"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/biascope/__init__.py"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1].strip("[]") == biascope.__version__


def test_the_citation_has_what_its_format_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == PROJECT["project"]["license"]


def test_the_changelog_fits_on_two_screens() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_types_are_shipped_and_ci_tries_the_wheel() -> None:
    assert (ROOT / "src" / "biascope" / "py.typed").is_file()
    assert "make wheel" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((ROOT / package / "__init__.py").is_file() for package in packages)
