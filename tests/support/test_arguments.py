"""Numbers, tensors and names as people hand them in."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from biascope.support.arguments import as_number, as_whole, check_choice, check_count, check_number, check_tensor, shown
from biascope.support.errors import InputError


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), torch.tensor([3])])
def test_whole_numbers_of_any_library_are_counts(value: Any) -> None:
    found = check_count(value, "k")
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [1.5, 2.0, True, None, "10", float("nan"), [2], torch.tensor([1, 2]), torch.ones(1)])
def test_other_things_are_no_counts(value: Any) -> None:
    with pytest.raises(InputError, match="k must be an integer, not"):
        check_count(value, "k")
    with pytest.raises(InputError, match="seed must be an integer, not"):
        as_whole(value, "seed")


def test_counts_have_a_least_and_seeds_have_none() -> None:
    assert check_count(0, "k", least=0) == 0
    assert as_whole(-7, "seed") == -7
    with pytest.raises(InputError, match="k must be at least 2, not 1"):
        check_count(1, "k", least=2)


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25])])
def test_numbers_of_any_library_are_numbers(value: Any) -> None:
    assert check_number(value, "lr") == 0.25


@pytest.mark.parametrize("value", [None, "0.1", [0.1], True, torch.tensor([0.1, 0.2]), np.zeros(2), 10**400, 1j])
def test_other_things_are_no_numbers(value: Any) -> None:
    with pytest.raises(InputError, match=r"lr=.*: one number is needed"):
        as_number(value, "lr")


def test_numbers_have_their_range() -> None:
    assert as_number(float("inf"), "lr") == float("inf")
    assert check_number(0, "lr", least=0) == 0.0
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="finite number is needed"):
            check_number(value, "lr")
    with pytest.raises(InputError, match="lr=0: a finite number above 0 is needed"):
        check_number(0, "lr", above=0)
    with pytest.raises(InputError, match=r"lr=-1\.0: a finite number from 0 on is needed"):
        check_number(-1.0, "lr", least=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2), r"y: expected a tensor, got ndarray; pass torch.from_numpy\(y\)"),
        ([0.0], r"y: expected a tensor, got list; pass torch.tensor\(y\)"),
        (None, "y: expected a tensor, got NoneType"),
        (torch.zeros(2, 2), r"y has shape \[2, 2\]: a tensor of 1 or 3 dimension"),
        (torch.zeros(2, dtype=torch.long), r"y is torch.int64.*e\.g\. y\.float\(\)"),
        (torch.zeros(2, dtype=torch.complex64), "y is torch.complex64: real floating-point"),
    ],
)
def test_what_is_no_such_tensor_is_refused_with_the_fix(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_tensor(value, "y", dims=(1, 3), floating=True)


def test_tensors_are_handed_on_as_they_are() -> None:
    y = torch.zeros(2)
    assert check_tensor(y, "y", dims=1, floating=True) is y


@pytest.mark.parametrize("value", [None, 0, True, ["entropy"]])
def test_a_choice_is_a_name(value: Any) -> None:
    assert check_choice("entropy", "kind", ("entropy", "participation")) == "entropy"
    with pytest.raises(InputError, match=r"kind=.* is not known; there is entropy, participation"):
        check_choice(value, "kind", ("entropy", "participation"))


def test_long_values_are_not_printed() -> None:
    assert shown(list(range(100))) == "a list"
    assert shown(torch.tensor(2.5)) == "2.5"


def test_a_learnt_number_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_number(torch.tensor(0.5, requires_grad=True), "temperature") == 0.5
