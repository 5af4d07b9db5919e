"""Pairs are judged by their own eigenvalue: what counts as found is right, and what is not right does not count."""

import warnings

import pytest
import torch

from biascope.linalg import eigsh
from biascope.linalg.elementary import Dense
from biascope.linalg.resolved import resolved, settled, warn_unresolved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [10, 49])
def test_what_is_resolved_is_right_and_the_rest_is_named(with_spectrum, dtype, k) -> None:  # type: ignore[no-untyped-def]
    truth = torch.cat([torch.logspace(0, -8, 60), torch.zeros(140)]).double()
    pairs = eigsh(Dense(with_spectrum(truth).to(dtype), symmetric=True), k)
    found, error = resolved(pairs.values, pairs.residuals), (pairs.values.double() / truth[:k] - 1).abs()
    assert (error[found] <= 1e-3).all()  # a residual of 1e-3 bounds the error of the value
    if dtype == torch.float64 or k == 10:
        assert found.all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_unresolved(pairs, "ask for fewer")
        return
    assert error.max() > 0.1  # the bug: yet nearly all of them call themselves converged
    assert pairs.converged.sum() > found.sum()
    first = int((~found).nonzero()[0])
    with pytest.warns(UserWarning, match=f"only the first {first} of {k} eigenpairs are resolved.*ask for fewer"):
        warn_unresolved(pairs, "ask for fewer")


def test_zero_up_to_rounding_is_settled_but_not_resolved() -> None:
    values = torch.tensor([1.0, -1e-6, 1e-15, 1e-9]).double()
    residuals = torch.tensor([1e-15, 1e-15, 1e-15, 1e-9]).double()
    assert resolved(values, residuals).tolist() == [True, True, False, False]
    assert settled(values, residuals, 100).tolist() == [True, True, True, False]
