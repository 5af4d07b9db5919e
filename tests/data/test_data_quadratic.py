import math

import pytest
import torch

from biascope.data import quadratic_example1, quadratic_example2, quadratic_example3
from biascope.data.quadratic_model import QuadraticTask, quadratic_task
from biascope.support.errors import InputError


def assert_modes(t: QuadraticTask) -> None:
    n = len(t.y)
    eye = torch.eye(n, dtype=torch.float64)
    assert torch.allclose(t.u.T @ t.u, eye, atol=1e-10)
    assert torch.allclose(t.v.T @ t.v, eye, atol=1e-10)
    assert torch.allclose((t.u * t.mu.sqrt()) @ t.v.T, t.x, atol=1e-10)  # X = sum sqrt(mu) u v^T
    assert torch.allclose(t.u @ t.y_mode, t.y, atol=1e-10)
    assert float(t.y_mode.min()) >= 0
    assert torch.allclose(t.y_tilde, t.mu * t.theta_star, atol=1e-10)
    assert bool((t.mu.diff() <= 1e-9 * t.mu[0]).all())


def test_example1() -> None:
    t = quadratic_example1()
    assert_modes(t)
    assert torch.allclose(t.mu, torch.tensor([9.0, 8, 7, 6, 5]).double(), atol=1e-12)
    assert torch.allclose(t.y_tilde, torch.tensor([5.0, 6, 7, 8, 9]).double(), atol=1e-12)
    with pytest.raises(InputError, match="descending"):
        quadratic_example1((1.0, 2.0))


@pytest.mark.parametrize("basis", ["lapack", "aligned", 0, 7])
def test_example2(basis: str | int) -> None:
    n, q, eta = 20, 5, 5.0
    t = quadratic_example2(n, q, eta, basis=basis)  # type: ignore[arg-type]
    assert_modes(t)
    assert float(t.mu[0]) == pytest.approx(n + eta**2, abs=1e-10)
    assert torch.allclose(t.mu[1:], torch.full((n - 1,), eta**2).double(), atol=1e-10)
    assert float(t.y_mode[0]) == pytest.approx((1 - 2 * q / n) * math.sqrt(n), abs=1e-10)
    assert float(t.y_tilde[0]) == pytest.approx(15, abs=1e-10)
    clean = torch.where(t.group == 1, -t.y, t.y)
    assert abs(float(t.u[:, 0] @ clean)) == pytest.approx(math.sqrt(n), abs=1e-10)  # u_1 = ybar / sqrt n
    assert int(t.group.sum()) == q
    # whatever the basis, the residual has the same norm
    assert float(t.y_mode[1:].norm()) == pytest.approx(2 * math.sqrt(q * (n - q) / n), abs=1e-10)
    if basis == "aligned":
        assert float(t.y_tilde[1]) == pytest.approx(2 * eta * math.sqrt(q * (n - q) / n), abs=1e-10)
        assert float(t.y_tilde[1]) == pytest.approx(19.365, abs=5e-4)
        assert float(t.y_tilde[2:].max()) < 1e-10
    else:
        assert float(t.y_tilde[1:].max()) < 15.0


def test_example2_bases_differ_and_repeat() -> None:
    a, b = quadratic_example2(basis=1), quadratic_example2(basis=2)
    assert not torch.allclose(a.y_tilde, b.y_tilde, atol=1e-3)
    assert torch.equal(a.u, quadratic_example2(basis=1).u)


def test_example3() -> None:
    for basis in ("lapack", "aligned", 3):
        t = quadratic_example3(basis=basis)  # type: ignore[arg-type]
        assert_modes(t)
        assert t.mu[:3].tolist() == pytest.approx([130, 110, 100], abs=1e-9)
        assert t.y_tilde[:2].tolist() == pytest.approx([44.159, 23.452], abs=5e-4)
        assert float(t.y_tilde[2:].max()) < 1e-6  # only two modes matter
    assert quadratic_example3(lam=0.5).y_tilde[:2].tolist() == pytest.approx([29.6, 36.4], abs=0.05)
    # with q = 2 (lam 0.5, as the spec's pair of numbers has it) the order is right again
    assert quadratic_example3(q=2, lam=0.5).y_tilde[:2].tolist() == pytest.approx([42.8, 22.9], abs=0.05)


def test_dataset_view_and_errors() -> None:
    d = quadratic_example2().dataset
    assert d.x.shape == (20, 200)
    assert d.group is not None
    assert "y_tilde" in d.info
    for f, lowest in ((quadratic_example2, 20), (quadratic_example3, 21)):
        with pytest.raises(InputError, match=r"d >= n \+ "):
            f(d=lowest)
    with pytest.raises(InputError, match=r"need q in 0\.\.20"):
        quadratic_example2(q=21)
    with pytest.raises(InputError, match="full row rank"):
        quadratic_task(torch.ones(2, 3), torch.ones(2), "bad", torch.zeros(2))
    with pytest.raises(InputError, match=r"basis='other' is not known; there is aligned, lapack"):
        quadratic_example2(basis="other")  # type: ignore[arg-type]
