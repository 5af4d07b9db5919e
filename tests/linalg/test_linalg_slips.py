"""Slips of the hand: wrong types and names are refused by name, whatever the size of the problem."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from biascope import linalg as la
from biascope.errors import InputError

A = la.Dense(torch.diag(torch.arange(1.0, 7.0)), symmetric=True)
K = la.KroneckerOperator(torch.eye(2), torch.eye(3))
X = torch.ones(6, 2)


@pytest.mark.parametrize("bad", [None, "10", 2.0, True, [2]])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k", lambda v: la.eigsh(A, v)),
        ("k", lambda v: la.svds(A, v)),
        ("k", lambda v: la.subspace_iteration(A, v)),
        ("max_iterations", lambda v: la.eigsh(A, 2, max_iterations=v)),
        ("oversampling", lambda v: la.randomized_svd(A, 2, oversampling=v)),
        ("power_iterations", lambda v: la.randomized_eigsh(A, 2, power_iterations=v)),
        ("samples", lambda v: la.hutchinson(A, v)),
        ("samples", lambda v: la.diagonal(A, v)),
        ("samples", lambda v: la.frobenius_norm_squared(A, v)),
        ("matvecs", lambda v: la.hutchpp(A, v)),
        ("matvecs", lambda v: la.xtrace(A, v)),
        ("block", lambda v: la.hutchinson(A, 4, block=v)),
        ("seed", lambda v: la.hutchinson(A, seed=v)),
        ("seed", lambda v: la.diagonal(A, seed=v)),
        ("steps", lambda v: la.logdet(A, steps=v)),
        ("steps", lambda v: la.lanczos_tridiagonal(A, X, v)),
        ("k", lambda v: la.spectral_density(A, 2).moment(v)),
        ("n", lambda v: K.sample(v, damping=0.1)),
        ("n", lambda v: la.Identity(v)),
        ("n_samples", lambda v: la.marchenko_pastur(v, 2)),
        ("chunk", lambda v: A.to_dense(v)),
        ("k", lambda v: la.Nystrom(A, v)),
    ],
)
def test_counts_and_seeds(name: str, call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be an integer, not"):
        call(bad)


@pytest.mark.parametrize("bad", [None, "0.1", [0.1], torch.tensor([0.1, 0.2])])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("damping", lambda v: la.damped(A, v)),
        ("damping", lambda v: la.jacobi(A, v)),
        ("damping", lambda v: la.Nystrom(A, 2).solve(X, v)),
        ("damping", lambda v: K.inverse(v, "factored")),
        ("eps", lambda v: la.deep_net_damping(X[:, 0], X[:, 0], v)),
        ("exponent", lambda v: K.power(v)),
        ("exponent", lambda v: K.eigen().power(v)),
        ("cutoff", lambda v: K.power(-1, v)),
        ("tol", lambda v: la.eigsh(A, 2, tol=v)),
        ("tol", lambda v: la.cg(A, X, tol=v)),
        ("sigma", lambda v: la.spectral_density(A, 2).evaluate(X[:, 0], v)),
        ("variance", lambda v: la.marchenko_pastur(4, 2, v)),
    ],
)
def test_numbers(name: str, call: Callable[[Any], Any], bad: Any) -> None:
    if name == "tol" and bad is None:  # the default
        return
    with pytest.raises(InputError, match="one number is needed"):
        call(bad)


@pytest.mark.parametrize("bad", [np.ones((6, 6)), [1.0], None, 1.0])
@pytest.mark.parametrize(
    "call",
    [
        la.Dense,
        la.Diagonal,
        la.LowRank,
        la.is_symmetric,
        la.effective_rank,
        la.orthonormal_basis,
        la.symmetrise,
        la.fix_signs,
        la.psd_eigh,
        la.thin_svd,
        lambda v: la.subspace_overlap(X, v),
        lambda v: la.long_dot(X, v),
        lambda v: la.column_dots(v, X),
        lambda v: la.kron_matvec(X, v, X),
        lambda v: la.KroneckerOperator(X, v),
        lambda v: la.KroneckerEigen(v, X, X),
        lambda v: la.cg(A, v),
        lambda v: K.solve(v, 0.1),
        lambda v: K.eigen().quadratic_form(v),
        lambda v: la.lanczos_tridiagonal(A, v, 2),
        lambda v: la.marchenko_pastur(4, 2).density(v),
    ],
)
def test_tensors(call: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match="expected a tensor, got"):
        call(bad)


@pytest.mark.parametrize("bad", [torch.eye(6), np.eye(6), None, lambda v: v])
@pytest.mark.parametrize(
    "call",
    [
        la.svds,
        la.randomized_svd,
        lambda v, k: la.damped(v, 0.1),
        lambda v, k: la.frobenius_norm_squared(v),
        lambda v, k: la.lanczos_tridiagonal(v, X, 2),
        lambda v, k: la.cg(A, X, preconditioner=v) if v is not None else la.cg(v, X),
        lambda v, k: la.Sum(A, v),
        lambda v, k: la.Product(v, A),
        lambda v, k: la.Scaled(2.0, v),
        lambda v, k: la.Adjoint(v),
    ],
)
def test_operators(call: Callable[..., Any], bad: Any) -> None:
    with pytest.raises(InputError, match=r"an operator is needed, not .*: wrap it with aslinearoperator"):
        call(bad, 2)


@pytest.mark.parametrize("estimator", [la.hutchinson, la.hutchpp, la.xtrace, la.frobenius_norm_squared])
def test_names_of_probes_are_read_where_the_answer_is_exact_too(estimator: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="probes must be 'rademacher' or 'gaussian', not 'radamacher'"):
        estimator(A, probes="radamacher")


def test_vectors_of_numpy_are_named() -> None:
    for bad in (np.ones(6), [1.0] * 6):
        with pytest.raises(InputError, match="x: expected a tensor"):
            A @ bad  # type: ignore[operator]


def test_a_start_is_read_where_the_matrix_is_small_too() -> None:
    for bad in (torch.ones(5), torch.zeros(6), torch.full((6,), torch.nan)):
        with pytest.raises(InputError, match="start must be"):
            la.eigsh(A, 2, start=bad)


def test_matrices_that_are_not_finite_have_no_singular_values() -> None:
    with pytest.raises(InputError, match=r"matrix \[6, 2\] has no singular values: it holds NaN or infinity"):
        la.thin_svd(X * torch.nan)


def test_devices_there_are_not() -> None:
    with pytest.raises(InputError, match="device 'cpuu'"):
        la.Identity(3, device="cpuu")


def test_columns_of_other_lengths_are_not_paired() -> None:
    """Rows of one would be multiplied by every row of the other."""
    with pytest.raises(InputError, match=r"not \[6, 2\] and \[1, 2\]"):
        la.column_dots(X, X[:1])
