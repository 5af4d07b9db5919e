import pytest
import torch

from biascope.data import directional
from biascope.data.directions import directional_inputs
from biascope.support.errors import InputError


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    v = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return v / v.norm()


@pytest.mark.parametrize(("gap", "offset"), [("full", 2.0), ("half", 1.0)])
@pytest.mark.parametrize("shape", [(7,), (1, 6, 6), (3, 4, 4)])
def test_projection_is_exact_and_labels_balance(gap: str, offset: float, shape: tuple[int, ...]) -> None:
    v = unit(*shape)
    d = directional(v, 200, eps=2.0, sigma=3.0, gap=gap, seed=1)  # type: ignore[arg-type]
    p = (d.x * v).flatten(1).sum(1)
    assert torch.allclose(p, offset * (2 * d.y.double() - 1), atol=1e-10)
    assert int(d.y.sum()) == 100
    assert d.x.shape == (200, *shape)
    train, test = d.train_test(60)
    assert int(train.y.sum()) == 30
    assert int(test.y.sum()) == 70


def test_noise_covariance_is_sigma2_times_the_projector() -> None:
    v, n, sigma = unit(5), 200_000, 3.0
    d = directional(v, n, eps=1.0, sigma=sigma, seed=2)
    w = d.x - (2.0 * d.y - 1)[:, None] * v
    cov = w.T @ w / n
    expected = sigma**2 * (torch.eye(5, dtype=torch.float64) - torch.outer(v, v))
    # the standard error of an entry is at most sqrt(2) sigma^2 / sqrt n = 0.028
    assert float((cov - expected).abs().max()) < 5 * 2**0.5 * sigma**2 / n**0.5
    assert float((cov @ v).abs().max()) < 1e-10


def test_v_is_normalised_and_float32_kept() -> None:
    v = unit(1, 32, 32).float()
    a, b = directional(v, 4, seed=3), directional(10 * v, 4, seed=3)
    assert a.x.dtype == torch.float32
    assert torch.allclose(a.x, b.x, atol=1e-5)
    assert directional(v, 4, labels="pm1").y.tolist() == [-1, 1, -1, 1]


def test_given_labels_and_seeds() -> None:
    v = unit(4)
    y = torch.tensor([1, 1, -1, 1, -1])
    x = directional_inputs(y, v, eps=0.5, seed=0)
    assert torch.allclose(x @ v, 0.5 * y.double(), atol=1e-12)
    assert torch.equal(x, directional_inputs(y, v, eps=0.5, seed=torch.Generator().manual_seed(0)))
    assert not torch.equal(x, directional_inputs(y, v, eps=0.5, seed=1))


def test_errors() -> None:
    with pytest.raises(InputError, match="gap"):
        directional(unit(3), 4, gap="quarter")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sigma"):
        directional(unit(3), 4, sigma=-1)
    with pytest.raises(InputError, match="norm 0"):
        directional(torch.zeros(3), 4)
    with pytest.raises(InputError, match="floating"):
        directional(torch.ones(3, dtype=torch.long), 4)
