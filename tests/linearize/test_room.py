"""`bs.linearize` is the room and the function, in whatever order they are imported."""

import inspect
import subprocess
import sys

import pytest

import biascope as bs

LINES = {
    "attribute first": "import biascope as bs; f = bs.linearize; import biascope.linearize; g = bs.linearize",
    "submodule first": "import biascope.linearize; import biascope as bs; f = g = bs.linearize",
    "lazy first": "import biascope as bs; bs.lazy; f = g = bs.linearize",
    "from the package": "from biascope import linearize as f, lazy; import biascope as bs; g = bs.linearize",
    "from the room": "from biascope.linearize import linearize as f; import biascope as bs; g = bs.linearize",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", LINES)
def test_every_order_of_import(order: str) -> None:
    use = "from torch import nn; net = nn.Linear(2, 1)"
    check = "assert [type(h(net)).__name__ for h in (f, g)] == ['Linearized'] * 2; assert bs.lazy(net, 2.0).alpha == 2"
    subprocess.run(
        [sys.executable, "-c", f"{LINES[order]}\n{use}\n{check}\nbs.linearize.posthoc(net, net)"], check=True
    )


def test_signature_is_that_of_the_function() -> None:
    assert inspect.signature(bs.linearize) == inspect.signature(bs.linearize.linearize)  # type: ignore[attr-defined]
    assert "linearize" in dir(bs)
    assert "lazy" in dir(bs)
