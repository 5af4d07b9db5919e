"""Measures on matrices of the input space (spec 02, checks 7, 9, 11, 13, 14) and their closed-form baselines."""

import math

import pytest
import torch
from torch import Tensor, nn

from biascope.geometry import (
    analytic_geometry,
    average_geometry,
    compare,
    containment,
    correlation,
    data_second_moment,
    gsg,
    subspace_size,
    velocity,
)
from biascope.geometry.data_directions import alignment_score, generalised_directions, matched_count, removed_variance
from biascope.geometry.mlp_theory import (
    active_second_moment,
    both_active_moments,
    expect_angle,
    large_dimension_constants,
    linear_regression_evolution,
    linear_regression_geometry,
    mlp_evolution,
    mlp_evolution_large_dimension,
)
from biascope.support.errors import InputError

RNG = torch.Generator()


def psd(D: int, seed: int = 0, power: float = 1.5) -> Tensor:
    Q = rotation(D, seed)
    return (Q * torch.arange(1, D + 1, dtype=torch.float64) ** -power) @ Q.T


def rotation(D: int, seed: int) -> Tensor:
    Q, R = torch.linalg.qr(torch.randn(D, D, generator=RNG.manual_seed(seed), dtype=torch.float64))
    return Q * R.diagonal().sign()


def test_correlation_and_velocity() -> None:
    A, B, Q = psd(6, 0), psd(6, 1), rotation(6, 2)
    assert correlation(A, A) == pytest.approx(1.0, abs=1e-12)
    assert correlation(A, 3 * A) == pytest.approx(1.0, abs=1e-12)
    assert correlation(Q @ A @ Q.T, Q @ B @ Q.T) == pytest.approx(correlation(A, B), abs=1e-12)
    assert velocity(A, A) == pytest.approx(0.0, abs=1e-12)
    assert 0 < velocity(A, B) < 1
    with pytest.raises(InputError, match="zero matrix"):
        correlation(A, 0 * A)
    with pytest.raises(InputError, match=r"B \[5, 6\] do not fit"):
        correlation(A, B[:5])


def test_null_of_the_correlation_under_rotations() -> None:
    A, B = psd(5, 0), psd(5, 1, 0.7)
    report = compare(A, B)
    assert report.identity[0] == pytest.approx(A.trace().item() / (5**0.5 * A.norm().item()))
    rotated = torch.tensor([correlation(A, (Q := rotation(5, s)) @ B @ Q.T) for s in range(4000)])
    assert rotated.mean().item() == pytest.approx(report.null, abs=4 * report.null_std / 4000**0.5)
    assert rotated.std().item() == pytest.approx(report.null_std, rel=0.05)
    assert compare(A, torch.eye(5)).trace_removed == 0.0
    assert compare(A, A).trace_removed == pytest.approx(1.0)
    assert compare(A, A).z > 3


def test_sampling_moves_a_correlation_by_no_more_than_is_said() -> None:
    """Root mean squares over samples of 40 networks; the bound is five to six times the movement here."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 3, 2), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(9, 1, bias=False))

    truth, other = analytic_geometry(build, (1, 7)), torch.diag(torch.arange(1.0, 8.0)).double()
    for second in (other, psd(7, 1)):
        found = [average_geometry(build, (1, 7), 40, seed=s).correlation(second) for s in range(60)]
        moved = math.sqrt(sum((one.value - correlation(truth, second)) ** 2 for one in found) / 60)
        told = math.sqrt(sum(one.error_bound**2 for one in found) / 60)
        assert 0.1 * told < moved < told
    assert math.isnan(compare(truth, other).error_bound)
    assert compare(truth, other, (0.0, 0.0)).error_bound == 0.0
    alone = average_geometry(build, (1, 7), n_networks=1)  # one network tells no error; it was said to be 1 + |value|
    for pair in ((math.nan, 0.1), (0.1, math.nan)):
        assert math.isnan(compare(truth, other, pair).error_bound)
    assert math.isnan(alone.correlation(other).error_bound)


def test_matrices_that_are_not_symmetric_are_refused() -> None:
    """A Jacobian or a square data matrix in place of a second moment: eigenvectors of its lower half were taken."""
    A, skew = psd(4, 0), torch.triu(psd(4, 1))
    for call in (
        lambda: compare(A, skew),
        lambda: velocity(skew, A),
        lambda: containment(A, skew, 2),
        lambda: subspace_size(skew, share=0.5),
        lambda: gsg(skew, A),
    ):
        with pytest.raises(InputError, match="is not symmetric"):
            call()
    rounded = A + 1e-6 * skew
    assert correlation(A, rounded) == pytest.approx(1.0, abs=1e-9)


def test_containment_and_its_random_baseline() -> None:
    reference = torch.diag(torch.arange(6.0, 0.0, -1.0)).double()
    delta = torch.zeros(6, 6, dtype=torch.float64)
    delta[:2, :2] = torch.tensor([[-2.0, 1.0], [1.0, 3.0]])
    assert containment(delta, reference, 2).share == (1.0,)
    assert containment(delta, reference, 1).share[0] == pytest.approx(2 / math.sqrt(15))
    found = containment(psd(6, 3) - 0.1 * torch.eye(6), reference, range(1, 7))
    assert found.share[-1] == pytest.approx(1.0)
    assert found.random[-1] == pytest.approx(1.0)
    assert list(found.share) == sorted(found.share)
    matrix, squares = psd(6, 3) - 0.1 * torch.eye(6), []
    for s in range(3000):
        Q = rotation(6, s)[:, :2]
        squares.append(float((Q.T @ matrix @ Q).square().sum() / matrix.square().sum()))
    assert math.sqrt(sum(squares) / 3000) == pytest.approx(found.random[1], rel=0.03)
    assert containment(delta, -reference, range(1, 7)) == containment(delta, reference, range(1, 7))  # as Delta is
    with pytest.raises(InputError, match="between 1 and 6"):
        containment(delta, reference, 7)


def test_second_moment_streams() -> None:
    x = torch.randn(10, 2, 3, generator=RNG.manual_seed(0))
    flat = x.flatten(1).double()
    S = data_second_moment(x)
    assert torch.allclose(S, flat.T @ flat)
    assert torch.allclose(data_second_moment([(x[:4], None), (x[4:], None)], normalise=True), S / 10)
    G = psd(6)
    assert torch.allclose(gsg(G, S), G @ S @ G)
    with pytest.raises(InputError, match="no data"):
        data_second_moment([])


def test_generalised_directions_and_elimination() -> None:
    S, G = psd(6, 0), psd(6, 1)
    found = generalised_directions(S, G, ridge=1e-8)
    V = found.directions
    assert torch.allclose(V @ V.T, torch.eye(6, dtype=V.dtype), atol=1e-10)
    first = V[0]  # the first one is the generalised eigenvector itself, and maximises v S v / v G v
    best = (first @ S @ first) / (first @ G @ first)
    assert best.item() == pytest.approx(found.values[0].item(), rel=1e-5)
    for s in range(50):
        v = torch.randn(6, generator=RNG.manual_seed(s), dtype=torch.float64)
        assert (v @ S @ v) / (v @ G @ v) <= best * (1 + 1e-9)


def test_matched_removal() -> None:
    S, V, R = psd(6, 0), torch.eye(6, dtype=torch.float64), rotation(6, 4).T
    for k in range(7):
        other = matched_count(S, V, R, k)
        wanted = removed_variance(S, V[:k])[-1] if k else 0.0
        assert (removed_variance(S, R[:other])[-1] if other else 0.0) >= wanted - 1e-9
        if other > 1:
            assert removed_variance(S, R[: other - 1])[-1] < wanted


def test_alignment_score() -> None:
    G = psd(6)
    x = torch.randn(20, 6, generator=RNG.manual_seed(0))
    score = alignment_score(x, G)
    values = torch.linalg.eigvalsh(G)
    assert (score >= values[0]).all()
    assert (score <= values[-1]).all()
    assert score[3].item() == pytest.approx(((x[3].double() @ G @ x[3].double()) / x[3].double().square().sum()).item())
    assert torch.allclose(alignment_score(x, 2 * torch.eye(6)), torch.full((20,), 2.0, dtype=torch.float64))
    assert torch.allclose(alignment_score(5 * x, G), score)
    with pytest.raises(InputError, match="example 1 is zero"):
        alignment_score(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.eye(2))


@pytest.mark.parametrize(
    ("D", "second"), [(2, 1 / 12), (3, (math.pi**2 - 4) / (8 * math.pi**2)), (10, 0.0652), (100, 0.0627)]
)
def test_lemma_a6(D: int, second: float) -> None:
    mean, square = both_active_moments(D)
    assert mean == pytest.approx(0.25, abs=1e-10)
    assert square == pytest.approx(second, abs=1.5e-4 if D > 3 else 1e-10)
    assert expect_angle(lambda al: 1.0, D) == pytest.approx(1.0, abs=1e-10)
    # E cos^2 = 1/D, exactly
    assert expect_angle(lambda al: math.cos(al) ** 2, D) == pytest.approx(1 / D, rel=1e-8)


def test_lemmas_a5_and_a7() -> None:
    d = torch.randn(400_000, 3, generator=RNG.manual_seed(0), dtype=torch.float64)
    a, b = torch.tensor([1.0, 0.2, 0.0]).double(), torch.tensor([-0.3, 1.0, 0.5]).double()
    both = ((d @ a > 0) & (d @ b > 0)).double()
    outer = (d[:, :, None] * d[:, None, :]) * both[:, None, None]
    error = outer.std(0) / len(d) ** 0.5
    assert ((outer.mean(0) - active_second_moment(a, b)).abs() < 5 * error).all()
    assert torch.allclose(active_second_moment(a, a), torch.eye(3).double() / 2)
    assert active_second_moment(a, -a).abs().max() < 1e-12
    unit = d / d.norm(dim=1, keepdim=True)
    assert (unit.T @ unit / len(d) - torch.eye(3) / 3).abs().max() < 3e-3


def test_matrices_with_a_nan_are_refused_by_name() -> None:
    """max(-1, min(1, nan)) is 1: a matrix with a NaN would correlate perfectly with everything."""
    good, bad = psd(4), psd(4, 1)
    bad[1, 2] = float("nan")
    infinite = psd(4, 1)
    infinite[0, 0] = math.inf
    x, V = torch.randn(3, 4, generator=RNG.manual_seed(0)), torch.eye(4)
    wrong = x.clone()
    wrong[2, 1] = float("nan")
    for call, name in (
        (lambda: correlation(good, bad), "B "),
        (lambda: correlation(infinite, good), "A "),
        (lambda: compare(bad, good), "A "),
        (lambda: velocity(bad, good), "now "),
        (lambda: velocity(good, infinite), "before "),
        (lambda: containment(bad, good, 2), "delta "),
        (lambda: containment(good, bad, 2), "reference "),
        (lambda: subspace_size(bad, share=0.9), "G "),
        (lambda: gsg(bad, good), "G "),
        (lambda: gsg(good, bad), "S "),
        (lambda: generalised_directions(bad, good), "S "),
        (lambda: generalised_directions(good, bad), "G "),
        (lambda: removed_variance(bad, V), "S "),
        (lambda: removed_variance(good, bad), "directions "),
        (lambda: matched_count(good, V, bad, 1), "directions "),
        (lambda: alignment_score(x, bad), "G "),
    ):
        with pytest.raises(InputError, match=f"^{name}"):
            call()
    for data in (lambda: data_second_moment(wrong), lambda: alignment_score(wrong, V)):
        with pytest.raises(InputError, match="x has a NaN or infinity, first in example 2"):
            data()
    with pytest.raises(InputError, match="batch 1 of x has a NaN"):
        data_second_moment([x, (wrong, None)])


def test_correlation_outside_the_range_of_squares() -> None:
    """Entries whose squares overflow or vanish in float64."""
    A, B = psd(4, 0), psd(4, 1)
    assert correlation(1e200 * A, B) == pytest.approx(correlation(A, B), abs=1e-12)
    assert correlation(1e-200 * A, 1e-200 * B) == pytest.approx(correlation(A, B), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_singular_geometry_needs_a_ridge(dtype: torch.dtype) -> None:
    """Rank 5 in 6 dimensions: rounding leaves a tiny eigenvalue of either sign, here in all of 20 draws refused."""
    S = psd(6, 0)
    for seed in range(20):
        half = rotation(6, seed)[:, :5] * torch.arange(1.0, 6.0, dtype=torch.float64)
        G = (half @ half.T).to(dtype)
        with pytest.raises(InputError, match="give a ridge"):
            generalised_directions(S, G, ridge=0.0)
        found = generalised_directions(S, G, ridge=1e-6)
        missing = rotation(6, seed)[:, 5]  # the direction that G does not see comes first
        assert abs(float(found.directions[0] @ missing)) > 0.99
        assert float(found.values[0]) <= torch.linalg.eigvalsh(S)[-1] / (1e-6 * 25) * 1.01
    regular = generalised_directions(S, psd(6, 1).to(dtype), ridge=0.0)
    exact = torch.linalg.eigvals(torch.linalg.solve(psd(6, 1), S)).real.sort(descending=True).values
    assert torch.allclose(regular.values, exact, rtol=1e-9 if dtype == torch.float64 else 1e-4)
    for ridge in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="ridge="):
            generalised_directions(S, S, ridge=ridge)
    Delta = psd(6, 2) - 0.5 * psd(6, 3)  # of both signs; negative eigenvalues were taken for zero
    for pair, message in (
        ((S, Delta), "G must be positive"),
        ((Delta, S), "S must be positive"),
        ((S, 0 * S), "G is singular: its eigenvalues go from"),
    ):
        with pytest.raises(InputError, match=message):
            generalised_directions(*pair)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, V = torch.ones(3, 2, 2), torch.eye(4)
    for call, message in (
        (lambda: alignment_score(x, torch.eye(3)), r"G \[3, 3\] do not fit"),
        (lambda: alignment_score(x, torch.ones(4, 3)), r"G \[4, 3\] does not fit"),
        (lambda: alignment_score(torch.ones(4), V), r"x \[4\] does not fit"),
        (lambda: data_second_moment(torch.ones(4)), r"x \[4\] does not fit"),
        (lambda: data_second_moment(x[:0], normalise=True), "x is empty"),
        (lambda: removed_variance(V, torch.eye(3)), r"4 entries each, got \[3, 3\]"),
        (lambda: matched_count(V, V[:2], V, 3), "between 0 and the 2"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_cut_off_of_the_architecture_subspace() -> None:
    """Eigenvalues 8, 4, 2, 1, 1: shares of the trace 0.5, 0.75, 0.875, 0.9375, 1 by hand."""
    Q, values = rotation(5, 3), torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    G = (Q * values) @ Q.T
    by_share = [subspace_size(G, share=s) for s in (0.1, 0.5, 0.51, 0.75, 0.8, 0.9, 0.99, 1.0)]
    assert by_share == [1, 1, 2, 2, 3, 4, 5, 5]
    assert [subspace_size(G, threshold=t) for t in (0.6, 0.3, 0.2, 0.1, 0.0)] == [1, 2, 3, 5, 5]
    half = Q[:, :2] * values[:2].sqrt()
    assert subspace_size(half @ half.T, share=1.0) == 2  # what rounding leaves of the other three does not count
    delta = -psd(5, 8)
    cut = containment(delta, G, share=0.8)
    assert cut == containment(delta, G, 3)
    assert cut.share[0] == pytest.approx(float((Q[:, :3].T @ delta @ Q[:, :3]).norm() / delta.norm()))
    assert containment(delta, G, threshold=0.3).k == (2,)
    assert containment(delta, -G, share=0.8) == cut  # by magnitude, as Delta at initialisation needs it
    for call, message in (
        (lambda: subspace_size(G), r"give a threshold in \[0, 1\) or a share"),
        (lambda: subspace_size(G, threshold=0.1, share=0.5), r"give a threshold in \[0, 1\) or a share"),
        (lambda: subspace_size(G, share=0.0), r"give a threshold in \[0, 1\) or a share"),
        (lambda: subspace_size(G, threshold=1.0), r"give a threshold in \[0, 1\) or a share"),
        (lambda: subspace_size(-G, share=0.5), "positive semi-definite"),
        (lambda: subspace_size(0 * G, share=0.5), "zero matrix"),
        (lambda: containment(delta, G), r"give a threshold in \[0, 1\) or a share"),
        (lambda: containment(delta, G, 2, share=0.5), "not both"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_no_number_depends_on_the_scale(scale: float) -> None:
    """Squares of such entries are zero or infinite in float64; the null's spread was NaN, and an example "zero"."""
    rng = torch.Generator().manual_seed(0)
    A, B = (M @ M.T for M in torch.randn(2, 4, 4, generator=rng, dtype=torch.float64))
    x = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    plain, scaled = compare(A, B), compare(scale * A, B)
    for name in ("value", "trace_removed", "null", "null_std", "z"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-12)
    torch.testing.assert_close(alignment_score(scale * x, A), alignment_score(x, A), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("scale", "time"), [(1.0, 0.7), (1e-7, 5e14), (1e-8, 1e16)])
def test_linear_regression_at_every_scale_of_the_data(scale: float, time: float) -> None:
    """By matrix exponentials; small data that are trained for long had their eigenvalues taken for zero."""
    rng = torch.Generator().manual_seed(0)
    X = scale * torch.randn(6, 3, generator=rng, dtype=torch.float64)
    y, S = torch.randn(6, generator=rng, dtype=torch.float64), X.T @ X
    decay = torch.linalg.matrix_exp(-S * time)
    w = (torch.eye(3, dtype=torch.float64) - decay) @ torch.linalg.solve(S, X.T @ y)
    expected = decay @ decay + torch.outer(w, w)
    found = linear_regression_geometry(X, y, time)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_the_flow_of_regression_stands_still_where_the_data_are_zero() -> None:
    """Two examples of three entries, up to the end of time: I - P + w w^T, P onto the data and w of least norm."""
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        X, y = (torch.randn(*size, generator=rng, dtype=torch.float64) for size in ((2, 3), (2,)))
        P, w = torch.linalg.pinv(X) @ X, torch.linalg.pinv(X) @ y
        limit = torch.eye(3, dtype=torch.float64) - P + torch.outer(w, w)
        for time in (1e10, 1e16, math.inf):
            assert torch.allclose(linear_regression_geometry(X, y, time), limit, atol=1e-10)
    with pytest.raises(InputError, match="starts at 0"):
        linear_regression_geometry(X, y, -1.0)
    with pytest.raises(InputError, match=r"y_train \[1\]"):
        linear_regression_geometry(X, y[:1], 1.0)


def test_a_multiple_of_the_identity_is_no_more_than_that() -> None:
    """Rounding is neither a spread, nor an order of examples."""
    rng = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(33, 33, generator=rng, dtype=torch.float64))[0]
    A = torch.randn(33, 33, generator=rng, dtype=torch.float64)
    assert compare(Q @ Q.T, A @ A.T).z == 0
    assert compare(A @ A.T, A @ A.T).z > 5
    x = torch.randn(1000, 64, generator=rng)
    assert len(alignment_score(x, 0.3 * torch.eye(64, dtype=torch.float64)).unique()) == 1
    G = torch.diag(torch.linspace(1, 2, 64, dtype=torch.float64)) + 0.1
    unit = (x / x.norm(dim=1, keepdim=True)).double()
    expected = torch.einsum("ni,ij,nj->n", unit, G, unit)
    assert torch.allclose(alignment_score(x, G), expected, rtol=1e-6)


def test_directions_that_are_not_orthonormal_remove_no_share() -> None:
    eye = torch.eye(3)
    for wrong in (2 * eye, torch.ones(3, 3) / 3**0.5):
        for use in (removed_variance, lambda S, V: matched_count(S, eye, V, 2)):
            with pytest.raises(InputError, match="must be orthonormal rows"):
                use(eye, wrong)


def test_targets_beside_inputs_are_no_second_batch() -> None:
    eye = torch.eye(3)
    assert torch.equal(data_second_moment((eye, eye)), eye.double())
    assert torch.equal(data_second_moment([eye, eye]), 2 * eye.double())  # a list is one of batches
    assert torch.equal(data_second_moment([(eye, eye)]), eye.double())


def test_what_the_theory_cannot_take_is_named() -> None:
    with pytest.raises(InputError, match=r"b \[3\] do not fit"):
        active_second_moment(torch.ones(2), torch.ones(3))
    for X, n in ((torch.ones(3), 2), (torch.ones(2, 3), -1), (torch.full((2, 3), math.nan), 2)):
        with pytest.raises(InputError):
            mlp_evolution(X, n)
    eye, nan = torch.eye(3), math.nan
    for call, message in (
        (lambda: mlp_evolution(eye, 2, sw=nan), "sw=nan"),
        (lambda: large_dimension_constants(2, 0), "D must be at least 1"),
        (lambda: large_dimension_constants(-2, 3), "n must be at least 1"),
        (lambda: mlp_evolution_large_dimension(torch.ones(2, 3), 2), r"S \[2, 3\] does not fit"),
        (lambda: linear_regression_evolution(eye.tril() + eye.roll(1, 1)), r"S is not symmetric \(0\.5 of its norm is"),
        (lambda: linear_regression_geometry(eye, nan * torch.ones(3), 1.0), "y_train has a NaN"),
        (lambda: active_second_moment(nan * eye[0], eye[1]), "a has a NaN"),
    ):
        with pytest.raises(InputError, match=message):
            call()
