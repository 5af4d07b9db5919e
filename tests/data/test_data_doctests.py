import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

import biascope.data

MODULES = sorted(m.name for m in pkgutil.iter_modules(biascope.data.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"biascope.data.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0


def test_global_rng_is_neither_read_nor_moved() -> None:
    e = torch.eye(6)
    make = [
        lambda: biascope.data.directional(e[0], 4, seed=1).x,
        lambda: biascope.data.circles(e[0], e[1], 4, seed=1).x,
        lambda: biascope.data.simplicity_contest(e[0], e[1], e[2], 4, seed=1).x,
        lambda: biascope.data.isotropic(e[0], 4, seed=1).x,
        lambda: biascope.data.geometry_gaussian(e, 4, seed=1).x,
        lambda: biascope.data.random_orthogonal(4, seed=1),
        lambda: biascope.data.yin_yang(4, seed=1).x,
        lambda: biascope.data.disk(4, seed=1).x,
        lambda: biascope.data.sinusoids([1, 2], seed=1).y,
        lambda: biascope.data.correlated_gaussians(4, seed=1).y,
        lambda: biascope.data.noisy_function(4, seed=1).y,
        lambda: biascope.data.corrupt_labels(torch.arange(10), 0.5, seed=1)[0],
        lambda: biascope.data.quadratic_example2(basis=3).u,
    ]
    for f in make:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first = f()
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(6)
        assert torch.equal(first, f())


def test_import_is_light() -> None:
    code = (
        "import biascope.data, sys; print([m for m in ('PIL', 'sklearn', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
