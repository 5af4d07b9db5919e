"""Slips of the hand: wrong types and names are refused by name, whatever the size of the problem."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from biascope import linalg as la
from biascope.linalg.conjugate_gradients import damped
from biascope.linalg.elementary import Dense, Diagonal
from biascope.linalg.trace import diagonal, frobenius_norm_squared
from biascope.support.errors import InputError

A = Dense(torch.diag(torch.arange(1.0, 7.0)), symmetric=True)
X = torch.ones(6, 2)


@pytest.mark.parametrize("bad", [None, "10", 2.0, True, [2]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k", lambda v: la.eigsh(A, v)),
        ("max_iterations", lambda v: la.eigsh(A, 2, max_iterations=v)),
        ("samples", lambda v: la.hutchinson(A, v)),
        ("samples", lambda v: diagonal(A, v)),
        ("samples", lambda v: frobenius_norm_squared(A, v)),
        ("block", lambda v: la.hutchinson(A, 4, block=v)),
        ("seed", lambda v: la.hutchinson(A, seed=v)),
        ("seed", lambda v: diagonal(A, seed=v)),
        ("n_samples", lambda v: la.marchenko_pastur(v, 2)),
        ("chunk", lambda v: A.to_dense(v)),
    ],
)
def test_counts_and_seeds(name: str, call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be an integer, not"):
        call(bad)


@pytest.mark.parametrize("bad", [None, "0.1", [0.1], torch.tensor([0.1, 0.2])])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("damping", lambda v: damped(A, v)),
        ("tol", lambda v: la.eigsh(A, 2, tol=v)),
        ("tol", lambda v: la.cg(A, X, tol=v)),
        ("variance", lambda v: la.marchenko_pastur(4, 2, v)),
    ],
)
def test_numbers(name: str, call: Callable[[Any], Any], bad: Any) -> None:
    if name == "tol" and bad is None:  # the default
        return
    with pytest.raises(InputError, match="one number is needed"):
        call(bad)


@pytest.mark.parametrize("bad", ["A", {"A": 1}, None, 1.0])
@pytest.mark.parametrize(
    "call",
    [Dense, Diagonal, la.effective_rank, la.psd_eigh, lambda v: la.subspace_overlap(X, v), lambda v: la.cg(A, v)],
)
def test_tensors(call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match="expected a tensor, got"):
        call(bad)


@pytest.mark.parametrize("bad", [torch.eye(6), np.eye(6), None, lambda v: v])
@pytest.mark.parametrize(
    "call",
    [
        lambda v: damped(v, 0.1),
        frobenius_norm_squared,
        la.hutchinson,
        lambda v: la.eigsh(v, 1),
        lambda v: la.cg(A, X, preconditioner=v) if v is not None else la.cg(v, X),
        lambda v: A + v,
    ],
)
def test_operators(call: Callable[..., Any], bad: Any) -> None:
    with pytest.raises(InputError, match=r"an operator is needed, not .*: wrap it with aslinearoperator"):
        call(bad)


@pytest.mark.parametrize("estimator", [la.hutchinson, frobenius_norm_squared])
def test_names_of_probes_are_read_where_the_answer_is_exact_too(estimator: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="probes='radamacher' is not known; did you mean rademacher"):
        estimator(A, probes="radamacher")


def test_a_start_is_read_where_the_matrix_is_small_too() -> None:
    for bad in (torch.ones(5), torch.zeros(6), torch.full((6,), torch.nan), X):
        with pytest.raises(InputError, match=r"start must be|it takes a vector \[6\]"):
            la.eigsh(A, 2, start=bad)


def test_matrices_that_are_not_finite_have_no_singular_values() -> None:
    with pytest.raises(InputError, match=r"matrix \[6, 2\] has no singular values: it holds NaN or infinity"):
        la.principal_angles(X * torch.nan, X)
