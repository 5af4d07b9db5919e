"""The papers use the library through its public names only: they are its first users."""

import ast
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted((SRC / "biascope_papers").rglob("*.py"))
# modules whose documented functions are public although no `__all__` lists them one by one
MODULES = {
    "biascope.curvature.complexity",
    "biascope.data.boundaries",
    "biascope.data.directions",
    "biascope.data.fourier",
    "biascope.data.images",
    "biascope.data.planar",
    "biascope.ensembles.steppers",
    "biascope.ensembles.work",
    "biascope.geometry.linear_cnn",
    "biascope.geometry.mixed",
    "biascope.geometry.mlp_theory",
    "biascope.geometry.patch_normalisation",
    "biascope.geometry.pooling",
    "biascope.geometry.closed_forms",
    "biascope.geometry.data_directions",
    "biascope.geometry.dipole",
    "biascope.geometry.loss_curvature",
    "biascope.information.bounds",
    "biascope.spectral.decay",
    "biascope.spectral.manifolds",
    "biascope.spectral.perturb",
    "biascope.studies.claims",
    "biascope.studies.estimates",
    "biascope.studies.own_networks",
    "biascope.studies.pictures",
    "biascope.support.memory",
    "biascope.support.precision",
    "biascope.tangent.quadratic",
}


def private_imports(text: str) -> list[str]:
    """Names of the library that a file imports and that are not public."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("biascope.")]
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "biascope":
            continue
        module = str(node.module)
        public = getattr(importlib.import_module(module), "__all__", ())
        for alias in node.names:
            listed = alias.name in public or f"{module}.{alias.name}" in MODULES
            if not listed and (module not in MODULES or alias.name.startswith("_")):
                found.append(f"{module}.{alias.name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_public_names_are_imported(path: Path) -> None:
    assert private_imports(path.read_text()) == []


def test_a_private_import_is_seen() -> None:
    text = "from biascope.network.stream import Forward\nfrom biascope import ntk\nimport biascope.cli"
    assert private_imports(text) == ["biascope.network.stream.Forward", "biascope.cli"]


def test_the_library_does_not_know_the_papers() -> None:
    for file in (SRC / "biascope").rglob("*.py"):
        names = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not any("biascope_papers" in ast.dump(n) for n in names), file
