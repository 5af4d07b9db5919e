import pytest
import torch

from biascope.data import carriers, in_channel, nad_flip, poison, random_orthogonal, underspecified, zero_channels
from biascope.errors import InputError


@pytest.fixture(scope="module")
def nads() -> torch.Tensor:
    return random_orthogonal(16, seed=0).view(16, 4, 4)


def images(n: int = 40) -> torch.Tensor:
    return torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_ten_distinct_carriers() -> None:
    for rule in ("choice", "code"):
        table = carriers(10, 3, rule)  # type: ignore[arg-type]
        assert len(set(table)) == 10
        assert max(o for o, _, _ in table) == 1
    code = carriers(10, 3, "code")
    assert [o for o, _, _ in code] == [0] * 6 + [1] * 4
    assert [c for _, c, _ in code] == [y % 3 for y in range(10)]
    assert [s for _, _, s in code] == [-1, 1] * 5
    assert carriers(10)[9] == (1, 1, 1)  # p = 4: direction 4 // 3, channel 4 % 3
    with pytest.raises(InputError, match="one carrier"):
        carriers(4, 2, "code")
    with pytest.raises(InputError, match="rule"):
        carriers(4, rule="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["choice", "code"])
def test_poison_sets_own_carrier_and_nothing_else(nads: torch.Tensor, rule: str) -> None:
    x, y = images(), torch.arange(40) % 10
    out = poison(x, y, nads, index=3, eps=0.05, rule=rule)  # type: ignore[arg-type]
    table = carriers(10, 3, rule)  # type: ignore[arg-type]
    for image, new, label in zip(x, out, y):
        o, c, s = table[int(label)]
        k = in_channel(nads[3 + o], c, 3)
        assert float((new * k).sum()) == pytest.approx(s * 0.05, abs=1e-12)
        rest = (new - image) - ((new - image) * k).sum() * k
        assert float(rest.abs().max()) < 1e-12


def test_poison_all_makes_the_set_linearly_separable(nads: torch.Tensor) -> None:
    x, y = images(), torch.arange(40) % 10
    out = poison(x, y, nads, overwrite="all")
    table = carriers(10)
    used = torch.stack([in_channel(nads[o], c, 3) for o, c, s in table if s > 0])
    coefficients = torch.einsum("nchw,kchw->nk", out, used)
    expected = torch.zeros(40, 5, dtype=torch.float64)
    expected[torch.arange(40), y // 2] = 0.05 * (2 * (y % 2).double() - 1)
    assert torch.allclose(coefficients, expected, atol=1e-12)
    # and nothing outside the five carriers has moved
    moved = (out - x) - torch.einsum("nk,kchw->nchw", torch.einsum("nchw,kchw->nk", out - x, used), used)
    assert float(moved.abs().max()) < 1e-12


def test_poison_errors(nads: torch.Tensor) -> None:
    x, y = images(2), torch.tensor([0, 1])
    with pytest.raises(InputError, match=r"needs directions 15\.\.16"):
        poison(x, y, nads, index=15)
    with pytest.raises(InputError, match="n_classes"):
        poison(x, y, nads, n_classes=1)
    with pytest.raises(InputError, match="overwrite"):
        poison(x, y, nads, overwrite="none")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="9 entries"):
        poison(x, y, torch.eye(9))
    with pytest.raises(InputError, match="expected x"):
        poison(x[0], y, nads)


def test_flip_is_an_orthogonal_involution(nads: torch.Tensor) -> None:
    x = images()
    out = nad_flip(x, nads)
    assert torch.allclose(nad_flip(out, nads), x, atol=1e-12)
    assert torch.allclose(out.norm(dim=(2, 3)), x.norm(dim=(2, 3)), atol=1e-12)
    assert torch.allclose(nad_flip(nads[0].view(1, 1, 4, 4), nads)[0, 0], nads[-1], atol=1e-12)
    u = nads.flatten(1).T  # columns
    dense = u @ torch.flip(u.T @ x[5, 2].flatten(), (0,))
    assert torch.allclose(out[5, 2].flatten(), dense, atol=1e-12)
    # D - 1 stored vectors are enough
    short = nad_flip(x, nads[:-1])
    assert torch.allclose(nad_flip(short, nads[:-1]), x, atol=1e-12)
    with pytest.raises(InputError, match="h w"):
        nad_flip(x[0], nads)


def test_underspecified_channels(nads: torch.Tensor) -> None:
    x, y = images(), torch.arange(40) % 2
    d = underspecified(x, y, nads[2], eps=2.0, gap="half", seed=1)
    assert torch.equal(d.x[:, :3], x)
    assert torch.allclose((d.x[:, 3] * nads[2]).sum((1, 2)), 2 * y.double() - 1, atol=1e-10)
    only_images = zero_channels(d.x, d.info["directional_channels"])
    assert torch.equal(only_images[:, :3], x)
    assert float(only_images[:, 3].abs().max()) == 0
    only_direction = zero_channels(d.x, d.info["image_channels"])
    assert float(only_direction[:, :3].abs().max()) == 0
    assert torch.equal(d.x[:, 3], only_direction[:, 3])
    with pytest.raises(InputError, match="v"):
        underspecified(x, y, torch.ones(3, 3))
