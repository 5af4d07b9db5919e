"""What type hints promise is checked at the door of public functions, with the name of the argument and the fix."""

import doctest
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError
from biascope.support.signatures import checked, rule_of


@checked
def example(
    x: Tensor,
    n: int = 3,
    sigma: float = 1.0,
    gap: Literal["full", "half"] = "full",
    variant: Literal[1, 2] = 1,
    model: nn.Module | None = None,
    hidden: Sequence[int] = (3, 4),
    radii: tuple[float, float] = (0.5, 1.5),
    networks: int | Literal["auto"] = 3,
    folder: str | Path = "here",
    loss: str | Callable[[Tensor], Tensor] = "mse",
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    flip: bool = False,
    tensors: Sequence[Tensor] = (),
) -> dict[str, Any]:
    return locals()


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ({"x": np.array(["a"])}, r"x holds <U1 values, not numbers"),
        ({"x": [torch.zeros(2), torch.zeros(3)]}, r"x: expected a tensor, got list; pass torch\.cat\(x\)"),
        ({"x": None}, "x: expected a tensor, got NoneType"),
        ({"n": 1e4}, r"n must be an integer, not 10000\.0"),
        ({"n": "10"}, "n must be an integer, not '10'"),
        ({"n": True}, "n must be an integer, not True"),
        ({"n": None}, "n must be an integer, not None"),
        ({"sigma": "0.1"}, "sigma='0.1': one number is needed"),
        ({"sigma": [1.0]}, r"sigma=\[1\.0\]: one number is needed"),
        ({"gap": "ful"}, r"gap='ful' is not known; did you mean full\?"),
        ({"gap": None}, "gap=None is not known; there is full, half"),
        ({"variant": 3}, "variant=3: 1 or 2 is needed"),
        ({"model": nn.ReLU}, r"model is the class ReLU: pass a network, e\.g\. ReLU\(\.\.\.\)"),
        ({"model": [nn.ReLU()]}, "model: expected an nn.Module, got list"),
        ({"hidden": 3}, r"hidden=3: a sequence of integers is needed, e\.g\. \[3\]"),
        ({"hidden": (3, 4.5)}, r"hidden\[1\] must be an integer, not 4\.5"),
        ({"hidden": "34"}, "hidden='34': a sequence of integers is needed"),
        ({"hidden": torch.zeros(2, 2)}, r"hidden\[0\] must be an integer"),
        ({"radii": (1.0,)}, r"radii=\(1\.0,\): 2 numbers are needed"),
        ({"networks": "aut"}, "networks='aut' is not known; did you mean auto?"),
        ({"folder": 3}, "folder=3: a string or a path is needed"),
        ({"loss": 3}, "loss=3: a string or a function is needed"),
        ({"options": [1]}, "options: expected a dict, got list"),
        ({"dtype": "float64"}, r"dtype='float64': a torch dtype is needed, e\.g\. torch\.float64"),
        ({"flip": "yes"}, "flip='yes': True or False is needed"),
        ({"tensors": [torch.zeros(1), None]}, r"tensors\[1\]: expected a tensor, got NoneType"),
    ],
)
def test_slips_are_refused_by_name(slip: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        example(**{"x": torch.zeros(3), **slip})


def test_what_fits_goes_through_and_numpys_numbers_become_pythons() -> None:
    x, model = nn.Parameter(torch.zeros(3)), nn.ReLU()
    found = example(x, np.int64(4), np.float32(0.5), "half", 2, model, np.array([5, 6]), [1, 2], "auto", Path("there"))
    assert found["x"] is x
    assert found["model"] is model
    assert (type(found["n"]), found["n"]) == (int, 4)
    assert (type(found["sigma"]), found["sigma"]) == (float, 0.5)
    assert found["hidden"] == [5, 6]
    assert found["folder"] == Path("there")
    assert example(x, n=torch.tensor(7), loss=torch.sum, options={})["n"] == 7
    for numbers in (np.arange(3.0), [0.0, 1.0, 2.0], [torch.tensor(float(i)) for i in range(3)]):
        assert torch.equal(example(numbers)["x"], torch.arange(3.0).to(example(numbers)["x"]))
    lazy = example(x, tensors=torch.zeros(2, 3))["tensors"]
    assert isinstance(lazy, Tensor)


def test_a_door_leaves_name_signature_examples_and_defaults() -> None:
    assert example.__name__ == "example"
    assert list(inspect.signature(example).parameters)[:2] == ["x", "n"]
    assert example(torch.zeros(1))["radii"] == (0.5, 1.5)
    found = {t.name for t in doctest.DocTestFinder().find(inspect.getmodule(bs.geometry.correlation)) if t.examples}
    assert "biascope.geometry.measures.correlation" in found


def test_hints_for_type_checkers_only_and_any_ask_for_nothing() -> None:
    def loose(a: Any, b: "NotThere", *rest: Tensor, **options: int) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 1

    assert rule_of(Any) is None
    assert checked(loose)("a", "b", torch.zeros(1), c="d") == 1
    with pytest.raises(InputError, match="rest: expected a tensor"):
        checked(loose)("a", "b", None)


def test_warnings_of_public_functions_point_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bs.nads(lambda: nn.Linear(4, 1), (4,), n_networks="auto", max_memory="1GB", tolerance=1.0)
    assert [w.filename for w in caught if "n_networks='auto'" in str(w.message)] == [__file__]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: bs.nads(lambda: nn.Linear(4, 1), (4,), n_networks=1e3),
            "n_networks=1000.0: an integer from 1 on or 'auto'",
        ),
        (lambda: bs.nads(lambda: nn.Linear(4, 1), (4,), 10, "finite-diference"), "did you mean finite-difference"),
        (lambda: bs.geometry.correlation("eye", torch.eye(2)), r"A: expected a tensor, got str"),
        (lambda: bs.data.directional(np.ones((4, 2))[0] > 0, 10), r"v is torch\.bool"),
        (lambda: bs.nets.MLP(hidden=500), r"hidden=500: a sequence of integers is needed, e\.g\. \[500\]"),
        (lambda: bs.information.neighbours.ksg({"x": 0}, torch.zeros(1)), r"x: expected a tensor, got dict"),
        (
            lambda: bs.spectral.affine_map(nn.Linear, torch.ones(1)),
            "model is the class Linear: an nn.Module or a ReLUNetwork is needed",
        ),
        (lambda: bs.fields.fit(nn.Linear, torch.zeros(2, 1), torch.zeros(2)), "is the class Linear"),
    ],
)
def test_rooms_have_doors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_a_learnt_number_stays_a_tensor() -> None:
    @checked
    def scaled(x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return scale * x

    scale = torch.tensor(2.0, requires_grad=True)
    scaled(torch.ones(3), scale).sum().backward()
    assert scale.grad is not None
    assert float(scale.grad) == 3.0
