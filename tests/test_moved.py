"""Import paths of the version before still work, are the same modules, and say where they went."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from biascope._moved import MOVED, new_path


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module_and_warns(old: str) -> None:
    new = MOVED[old]
    code = (
        "import importlib, warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        f"    old = importlib.import_module('{old}')\n"
        f"new = importlib.import_module('{new}')\n"
        f"print(old is new, new.__spec__.name == '{new}', any('import {new}' in str(w.message) for w in caught))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


def test_what_is_inside_moves_along() -> None:
    import biascope.network.layers.pilot as new

    sys.modules.pop("biascope.layers.pilot", None)
    with pytest.warns(DeprecationWarning, match=r"import biascope\.network\.layers\.pilot"):
        old = importlib.import_module("biascope.layers.pilot")
    assert old is new
    assert new_path("biascope.nothing") is None


ORDERS = {
    "attribute first": "f = bs.linearize; import biascope.linearize; g = bs.linearize",
    "old path first": "import biascope.linearize; f = g = bs.linearize",
    "from the old path": "from biascope.linearize import linearize as f; g = bs.linearize",
    "a module of it": "from biascope.linearize.quadratic import quadratic_model; f = g = bs.linearize",
    "from the package": "from biascope import linearize as f; from biascope.tangent import linearize as g",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_linearize_stays_a_function_whatever_was_imported_before(order: str) -> None:
    code = (
        f"import biascope as bs, warnings\nwarnings.simplefilter('ignore')\n{ORDERS[order]}\n"
        "assert f is g is bs.linearize is bs.tangent.linearize\nassert f.__name__ == 'linearize'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_old_package_of_linearize_warns_where_it_is_imported() -> None:
    import biascope

    with pytest.warns(DeprecationWarning, match=r"biascope\.linearize has moved: import biascope\.tangent") as caught:
        from biascope.linearize import lazy, posthoc
    assert {w.filename for w in caught} == {__file__}
    assert (lazy, posthoc) == (biascope.lazy, biascope.tangent.posthoc)
    with pytest.raises(ImportError, match="nothing"), pytest.warns(DeprecationWarning, match="moved"):
        from biascope.linearize import nothing  # noqa: F401


@pytest.mark.parametrize(
    "name",
    [
        "curvature.margin_bound",
        "editing.zero_shot_head",
        "ensembles.scalar_of",
        "fields.psnr",
        "geometry.dipole_metric",
        "information.info_nce",
        "probes.fisher_rao_norm",
        "spectral.decay_exponent",
    ],
)
def test_a_name_that_a_room_no_longer_exports(name: str) -> None:
    room, _, last = name.partition(".")
    with pytest.warns(DeprecationWarning, match=rf"biascope\.{name} has moved: import biascope\.{room}\."):
        found = getattr(importlib.import_module(f"biascope.{room}"), last)
    assert found.__name__ == last


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match=r"biascope\.spectral.*nonsense"):
        importlib.import_module("biascope.spectral").__getattr__("nonsense")


def test_functions_that_methods_replaced_give_the_same() -> None:
    import torch

    from biascope import TaskVector

    a, b = (
        TaskVector.from_tensors({"w": torch.tensor(t)}) for t in ([[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 0.0]])
    )

    def before(room: str, name: str) -> Any:
        with pytest.warns(DeprecationWarning, match=rf"biascope\.{room}\.{name} goes: use"):
            return getattr(importlib.import_module(f"biascope.{room}"), name)

    cosines, effective_ranks, sparsity = (before("editing", n) for n in ("cosines", "effective_ranks", "sparsity"))
    mutual_coherence, project_out = before("fields", "mutual_coherence"), before("geometry", "project_out")
    assert cosines({"a": a, "b": b})[0, 1] == pytest.approx(1 / 10**0.5)
    assert effective_ranks(a) == a.effective_ranks()
    assert sparsity(a) == a.sparsity()
    assert (mutual_coherence(torch.eye(4), torch.ones(4, 1)), mutual_coherence(torch.eye(4))) == (0.5, 0.0)
    assert project_out(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 4.0]]
