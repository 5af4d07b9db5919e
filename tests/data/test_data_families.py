"""Circles, simplicity contest, boundaries, Gaussians with a given covariance, planar tasks."""

import math

import pytest
import torch

from biascope.data import (
    circles,
    disk,
    disk_labels,
    geometry_gaussian,
    isotropic,
    random_orthogonal,
    relabel,
    simplicity_contest,
    square_grid,
    yin_yang,
    yin_yang_labels,
)
from biascope.data.boundaries import _noise_scale
from biascope.data.dataset import project_out
from biascope.data.planar import in_yin_yang_disks
from biascope.geometry.data_directions import flip_spectrum
from biascope.support.errors import InputError


@pytest.fixture(scope="module")
def u() -> torch.Tensor:
    return random_orthogonal(16, seed=0).T.reshape(16, 1, 4, 4)


def dot(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.flatten(1) @ v.flatten()


def test_circles_radius_noise_and_angle(u: torch.Tensor) -> None:
    n = 20_000
    d = circles(u[0], u[3], n, radii=(0.3, 1.7), sigma=1.5, seed=1)
    a, b = dot(d.x, u[0]), dot(d.x, u[3])
    assert torch.allclose((a**2 + b**2).sqrt(), torch.tensor([0.3, 1.7], dtype=torch.float64)[d.y], atol=1e-10)
    w = project_out(d.x, u[0], u[3]).flatten(1)
    expected = 1.5**2 * (
        torch.eye(16, dtype=torch.float64) - sum(torch.outer(v.flatten(), v.flatten()) for v in u[[0, 3]])
    )
    assert float((w.T @ w / n - expected).abs().max()) < 5 * 2**0.5 * 1.5**2 / n**0.5
    assert float(torch.stack([a, b]).mean(1).abs().max()) < 5 * 2 / n**0.5  # uniform angle
    assert int(d.y.sum()) == n // 2
    with pytest.raises(InputError, match="radii"):
        circles(u[0], u[1], 4, radii=(1.0, 1.0))
    with pytest.raises(InputError, match="not orthogonal"):
        circles(u[0], u[0] + u[1], 4)


@pytest.mark.parametrize(("gap", "offset"), [("full", 1.0), ("half", 0.5)])
def test_simplicity_contest_is_exact(u: torch.Tensor, gap: str, offset: float) -> None:
    d = simplicity_contest(u[0], u[1], u[2], 500, eps=1.0, gap=gap, radii=(0.3, 1.7), seed=2)  # type: ignore[arg-type]
    s = 2 * d.y.double() - 1
    assert torch.allclose(dot(d.x, u[0]), offset * s, atol=1e-10)
    radius = (dot(d.x, u[1]) ** 2 + dot(d.x, u[2]) ** 2).sqrt()
    assert torch.allclose(radius, torch.tensor([0.3, 1.7], dtype=torch.float64)[d.y], atol=1e-10)
    signal = d.x - project_out(d.x, u[0], u[1], u[2])
    noise = d.x - signal
    assert float(noise.flatten(1).matmul(u[:3].flatten(1).T).abs().max()) < 1e-10
    linear_only = project_out(d.x, u[1], u[2])
    assert torch.allclose(dot(linear_only, u[0]), offset * s, atol=1e-10)
    assert float(dot(linear_only, u[1]).abs().max()) < 1e-10


def test_simplicity_contest_puts_the_classes_at_plus_minus_eps_by_default(u: torch.Tensor) -> None:
    d = simplicity_contest(u[0], u[1], u[2], 100, eps=0.7, seed=2)
    assert torch.allclose(dot(d.x, u[0]), 0.7 * (2 * d.y.double() - 1), atol=1e-10)
    assert d.info["gap"] == "full"


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
def test_isotropic_boundaries(u: torch.Tensor, boundary: str) -> None:
    d = isotropic(u[4], 2000, boundary, eps=2.0, sigma=0.5, seed=3)  # type: ignore[arg-type]
    p = dot(d.x, u[4])
    inner = {"linear": p, "quadratic": p**2, "sinusoidal": (math.pi * p / 2.0).sin()}[boundary]
    assert torch.equal(d.y, (inner + d.info["bias"] > 0).long())
    assert int(d.y.sum()) == 1000
    assert float(p.std()) == pytest.approx(2.0, abs=5 * 2 / 4000**0.5)
    test = isotropic(u[4], 2000, boundary, eps=2.0, sigma=0.5, reference=d, seed=4)  # type: ignore[arg-type]
    assert test.info["bias"] == d.info["bias"]
    assert abs(float(test.y.double().mean()) - 0.5) < 0.06


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
@pytest.mark.parametrize("sinusoid", ["projection", "channel"])
def test_relabel_matches_an_independent_formula(boundary: str, sinusoid: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = 0.3 + 0.2 * torch.randn(400, 3, 4, 4, generator=g, dtype=torch.float64) * torch.tensor([1.0, 2, 3]).view(
        3, 1, 1
    )
    v = torch.randn(3, 4, 4, generator=g, dtype=torch.float64)
    v /= v.norm()
    d = relabel(x, v, boundary, sinusoid=sinusoid)  # type: ignore[arg-type]
    assert d.x is x
    p = torch.einsum("nchw,chw->n", x, v)
    bar = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True)
    angle = (
        torch.einsum("nchw,chw->n", bar, v) if sinusoid == "channel" else math.pi * (p - p.mean()) / p.std(correction=0)
    )
    inner = {"linear": p, "quadratic": p**2, "sinusoidal": angle.sin()}[boundary]
    assert torch.equal(d.y, (inner > inner.quantile(0.5)).long())
    assert int(d.y.sum()) == 200
    # a test set takes over the training set's bias and statistics
    half = relabel(x[:100], v, boundary, sinusoid=sinusoid, reference=d)  # type: ignore[arg-type]
    assert torch.equal(half.y, d.y[:100])
    fixed = relabel(x, v, "linear", bias=-1e9)
    assert int(fixed.y.sum()) == 0


@pytest.mark.parametrize("rule", ["variance", "range"])
def test_label_noise_leaves_inputs_bit_identical(rule: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 3, 4, 4, generator=g)
    before = x.clone()
    v = torch.ones(3, 4, 4)
    clean = relabel(x, v)
    noisy = relabel(x, v, noise=0.2, noise_rule=rule, seed=1)  # type: ignore[arg-type]
    assert noisy.x is x
    assert torch.equal(x, before)
    assert abs(float(noisy.y.double().mean()) - 0.5) < 0.01
    assert 0.02 < float((noisy.y != clean.y).double().mean()) < 0.4
    scale = _noise_scale(x.double(), 0.2, rule)  # type: ignore[arg-type]
    if rule == "variance":
        assert torch.allclose(scale.flatten() ** 2, 0.2 * x.double().var((0, 2, 3), correction=0))
    else:
        assert torch.allclose(scale[:, :, 0, 0], 0.2 * (x.double().amax((2, 3)) - x.double().amin((2, 3))))
        assert _noise_scale(torch.rand(5, 7).double(), 0.2, "range").shape == (5, 1)


def test_boundary_errors(u: torch.Tensor) -> None:
    x = torch.rand(4, 1, 4, 4)
    with pytest.raises(InputError, match="u has shape"):
        relabel(x, torch.ones(4))
    with pytest.raises(InputError, match=r"boundary=.cubic. is not known; there is linear"):
        relabel(x, torch.ones(1, 4, 4), "cubic")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"sinusoid=.x. is not known; there is channel, projection"):
        relabel(x, torch.ones(1, 4, 4), sinusoid="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="noise_rule"):
        relabel(x, torch.ones(1, 4, 4), noise=1.0, noise_rule="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not made by relabel"):
        relabel(x, torch.ones(1, 4, 4), reference=isotropic(u[0], 4))
    for eps in (0.0, math.nan, math.inf):
        with pytest.raises(InputError, match="eps"):
            isotropic(u[0], 4, eps=eps)
    for value in (math.nan, math.inf):
        bad = x.clone()
        bad[2, 0, 1, 1] = value
        with pytest.raises(InputError, match="x has a NaN or infinity, first in example 2"):
            relabel(bad, torch.ones(1, 4, 4))
        with pytest.raises(InputError, match=r"bias=.*: a number or 'median' is needed"):
            relabel(x, torch.ones(1, 4, 4), bias=value)
        with pytest.raises(InputError, match=r"noise=.*: a finite number from 0 on"):
            relabel(x, torch.ones(1, 4, 4), noise=value)
    with pytest.raises(InputError, match=r"noise=-1\.0: a finite number from 0 on"):
        relabel(x, torch.ones(1, 4, 4), noise=-1.0)
    with pytest.raises(InputError, match="x is empty"):
        relabel(x[:0], torch.ones(1, 4, 4))


def spd(dim: int) -> torch.Tensor:
    q = random_orthogonal(dim, seed=5)
    return (q * torch.logspace(0, 2, dim, dtype=torch.float64)) @ q.T


def test_flip_spectrum_is_an_involution() -> None:
    g = spd(8)
    f = flip_spectrum(g)
    assert torch.allclose(flip_spectrum(f), g, atol=1e-10)
    assert float(f.trace()) == pytest.approx(float(g.trace()), rel=1e-12)
    assert float(torch.linalg.matrix_norm(f, 2)) == pytest.approx(100, rel=1e-12)
    top = torch.linalg.eigh(g).eigenvectors[:, -1]
    assert float(top @ f @ top) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("flip", [False, True])
def test_geometry_gaussian_covariance(flip: bool) -> None:
    g, n = spd(6), 100_000
    d = geometry_gaussian(g, n, flip=flip, seed=1)
    expected = (flip_spectrum(g) if flip else g) / 100
    assert float(torch.linalg.matrix_norm(expected, 2)) == pytest.approx(1)
    cov = d.x.T @ d.x / n
    assert float((cov - expected).abs().max()) < 5 * 2**0.5 / n**0.5
    # energies along the top direction of the two sets differ by the condition number
    top = torch.linalg.eigh(g).eigenvectors[:, -1]
    energy = float((d.x @ top).square().mean())
    assert energy == pytest.approx(1 / 100 if flip else 1.0, rel=0.05)
    assert abs(float((d.x * (2.0 * d.y - 1)[:, None]).mean(0).abs().max())) < 5 / n**0.5  # labels independent of x
    assert d.info["trace"] == pytest.approx(float(g.trace()) / 100)


def test_geometry_gaussian_errors() -> None:
    for crooked in (torch.ones(2, 3), torch.tensor([[1.0, 2.0], [0.0, 1.0]])):
        with pytest.raises(InputError, match="not symmetric"):
            geometry_gaussian(crooked, 4)
    with pytest.raises(InputError, match="positive semi-definite"):
        geometry_gaussian(-torch.eye(3), 4)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        geometry_gaussian(torch.eye(3), 4, input_shape=(2, 2))


def test_yin_yang_labels_by_hand() -> None:
    points = torch.tensor(
        [[0.5, -0.5], [-0.5, 0.5], [0.0, -0.9], [0.0, 0.9], [0.5, -0.81], [0.5, -0.79], [-0.5, -0.5], [0.9, 0.0]]
    )
    assert yin_yang_labels(points, labels="pm1").tolist() == [-1, 1, 1, -1, 1, -1, 1, 1]
    assert yin_yang_labels(points, 2, labels="pm1").tolist() == [1, 1, 1, -1, 1, 1, -1, 1]
    with pytest.raises(InputError, match="variant"):
        in_yin_yang_disks(points, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", [1, 2])
def test_yin_yang_areas(variant: int) -> None:
    n = 200_000
    d = yin_yang(n, variant=variant, seed=0)  # type: ignore[arg-type]
    assert float(d.x.abs().max()) <= 1
    assert float(d.y.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / n**0.5)
    assert d.group is not None
    assert float(d.group.double().mean()) == pytest.approx(2 * math.pi * 0.09 / 4, abs=5 * 0.35 / n**0.5)
    assert len(yin_yang()) == 100


def test_disk_covers_half_of_the_square() -> None:
    n = 200_000
    assert float(disk(n, seed=0).y.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / n**0.5)
    fine = square_grid(1501, torch.float64)
    assert float(disk_labels(fine).double().mean()) == pytest.approx(0.5, abs=1e-3)
    assert len(disk()) == 500
    grid = square_grid()
    assert grid.shape == (2500, 2)
    assert grid[1].tolist() == pytest.approx([-1 + 2 / 49, -1])


def test_a_reference_along_another_direction_or_of_another_width_is_refused() -> None:
    """Its bias is that of other values: half of the labels would be wrong."""
    rng = torch.Generator().manual_seed(0)
    x, test = torch.randn(200, 3, 2, 2, generator=rng) + 1, torch.randn(100, 3, 2, 2, generator=rng) + 1
    u, other = torch.ones(3, 2, 2), torch.zeros(3, 2, 2)
    other[0] = 1
    train = relabel(x, u)
    assert 0.3 < float(relabel(test, 5 * u, reference=train).y.float().mean()) < 0.7  # the length does not matter
    for wrong in (other, -u):
        with pytest.raises(InputError, match="has another direction"):
            relabel(test, wrong, reference=train)
    with pytest.raises(InputError, match="give one of the two"):
        relabel(test, u, reference=train, bias=1.0)
    narrow = isotropic(u, 100, "quadratic", eps=1.0)
    with pytest.raises(InputError, match=r"eps=1\.0: its bias fits sets with the same eps only"):
        isotropic(u, 100, "quadratic", eps=3.0, reference=narrow)
    waves = isotropic(u, 100, "sinusoidal", eps=1.0)  # of al itself, whatever eps
    assert isotropic(u, 100, "sinusoidal", eps=3.0, reference=waves).info["bias"] == waves.info["bias"]


def test_a_reference_of_another_boundary_is_refused() -> None:
    """Its bias is minus the median of other values: of x.u, not of its square."""
    x = torch.randn(20, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    u = torch.ones(1, 2, 2)
    with pytest.raises(InputError, match="boundary='linear'"):
        relabel(x, u, "quadratic", reference=relabel(x, u))
    with pytest.raises(InputError, match="sinusoid='projection'"):
        relabel(x, u, "sinusoidal", sinusoid="channel", reference=relabel(x, u, "sinusoidal"))
    with pytest.raises(InputError, match="boundary='quadratic'"):
        isotropic(u, 20, reference=isotropic(u, 20, "quadratic"))
    with pytest.raises(InputError, match="not made by isotropic"):
        isotropic(u, 20, reference=disk(20))
    same = relabel(x, u, sinusoid="channel", reference=relabel(x, u))  # a line has no sinusoid
    assert torch.equal(same.y, relabel(x, u).y)


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
def test_bias_of_isotropic_data(boundary: str) -> None:
    """The same inputs as with the median, labelled by the sign of the inner value plus the bias."""
    u = torch.eye(5, dtype=torch.float64)[2]
    usual = isotropic(u, 500, boundary, eps=2.0, seed=3)  # type: ignore[arg-type]
    d = isotropic(u, 500, boundary, eps=2.0, bias=-0.7, labels="pm1", seed=3)  # type: ignore[arg-type]
    assert torch.equal(d.x, usual.x)
    along = d.x @ u
    inner = {"linear": along, "quadratic": along**2, "sinusoidal": (torch.pi * along / 2).sin()}[boundary]
    assert torch.equal(d.y, torch.where(inner > 0.7, 1, -1))
    assert d.info["bias"] == -0.7
    again = isotropic(u, 500, boundary, eps=2.0, bias=usual.info["bias"], seed=3)  # type: ignore[arg-type]
    assert torch.equal(again.y, usual.y)
    test = isotropic(u, 500, boundary, eps=2.0, reference=d, seed=4)  # type: ignore[arg-type]
    assert test.info["bias"] == -0.7
    with pytest.raises(InputError, match=r"bias=0\.5 and a reference"):
        isotropic(u, 500, boundary, eps=2.0, bias=0.5, reference=d)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="bias=nan: a number or 'median' is needed"):
        isotropic(u, 500, boundary, bias=float("nan"))  # type: ignore[arg-type]
