import pytest
import torch

from biascope.data import random_orthogonal
from biascope.data.images import carriers, class_mean_energies, nad_flip, poison, underspecified, zero_channels
from biascope.support.errors import InputError


@pytest.fixture(scope="module")
def nads() -> torch.Tensor:
    return random_orthogonal(16, seed=0).view(16, 4, 4)


def in_channel(u: torch.Tensor, channel: int, n_channels: int) -> torch.Tensor:
    """A direction [h, w] in one channel of [n_channels, h, w]."""
    out = u.new_zeros(n_channels, *u.shape)
    out[channel] = u
    return out


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
    with pytest.raises(InputError, match=r"9 directions of shape \[9\], but images have the shape \[4, 4\]"):
        poison(x, y, torch.eye(9))
    with pytest.raises(InputError, match=r"x has shape .*4 dimension"):
        poison(x[0], y, nads)


@pytest.mark.parametrize("spoil", ["scaled", "oblique", "repeated", "nan"])
def test_poison_refuses_directions_that_are_not_orthonormal(nads: torch.Tensor, spoil: str) -> None:
    """Ten classes of three channels use two directions, here 3 and 4; others are nobody's business."""
    x, y = images(), torch.arange(40) % 10
    bad = nads.clone()
    if spoil == "scaled":
        bad[4] *= 1.01
    elif spoil == "oblique":
        bad[4] = (nads[4] + 0.1 * nads[3]) / 1.01**0.5
    elif spoil == "repeated":
        bad[4] = nads[3]
    else:
        bad[4, 0, 0] = torch.nan
    with pytest.raises(InputError, match=r"nads 3\.\.4 are not orthonormal"):
        poison(x, y, bad, index=3)
    assert torch.equal(poison(x, y, bad, index=5), poison(x, y, nads, index=5))
    slightly = nads.float() * (1 + 1e-5)  # as stored in single precision
    assert torch.allclose(poison(x, y, slightly, index=3), poison(x, y, nads, index=3), atol=1e-3)


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
    with pytest.raises(InputError, match=r"x has shape .* 4 dimension"):
        nad_flip(x[0], nads)
    with pytest.raises(InputError, match="0 directions"):
        nad_flip(x, nads[:0])


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


def test_underspecified_places_the_classes_where_the_studies_do(nads: torch.Tensor) -> None:
    """At +-eps v by default, as `directional` and the studies' protocol."""
    from biascope_papers.nad.directional import PAPER

    x, y = images(), torch.arange(40) % 2
    d = underspecified(x, y, nads[2], eps=2.0, seed=1)
    assert d.info["gap"] == PAPER.gap == "full"
    assert torch.allclose((d.x[:, 3] * nads[2]).sum((1, 2)), 2 * (2 * y.double() - 1), atol=1e-10)


# coefficients of the class means along the directions, and how many images each class has
MEANS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, -1.0], [-1.0, 3.0, -1.0]], dtype=torch.float64)
COUNTS = [6, 2, 12]


def labelled(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Images around class means [classes, ...], shuffled; their noise comes in pairs of +-, so the means are exact."""
    rng = torch.Generator().manual_seed(3)
    x, y = [], []
    for label, (mean, count) in enumerate(zip(means, COUNTS)):
        noise = torch.randn(count // 2, *mean.shape, generator=rng, dtype=torch.float64)
        x += [mean + noise, mean - noise]
        y += [7 * label - 3] * count  # any integers
    order = torch.randperm(sum(COUNTS), generator=rng)
    return torch.cat(x)[order], torch.tensor(y)[order]


def energies_by_hand(means: torch.Tensor) -> torch.Tensor:
    """sum_c p_c (m_c - m)^2 over its total, for coefficients [classes, k]."""
    shares = torch.tensor(COUNTS, dtype=torch.float64) / sum(COUNTS)
    spread = shares @ (means - shares @ means) ** 2
    return spread / spread.sum()


def test_class_mean_energies_in_closed_form(nads: torch.Tensor) -> None:
    x, y = labelled(torch.einsum("ck,khw->chw", MEANS, nads[4:7]))
    found = class_mean_energies(x, y, nads)
    expected = torch.zeros(16, dtype=torch.float64)
    expected[4:7] = energies_by_hand(MEANS)
    assert torch.allclose(found, expected, atol=1e-12)
    assert float(found[6]) == pytest.approx(0, abs=1e-12)  # the same for all classes: in the grand mean alone
    # p = (0.3, 0.1, 0.6): means 0 and 1.9 along the first two; 1.8 and 1.89 about them
    assert found[4:6].tolist() == pytest.approx([1.8 / 3.69, 1.89 / 3.69], abs=1e-12)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert torch.allclose(class_mean_energies(x * 1e-9, y, nads), expected, atol=1e-9)
    assert torch.allclose(class_mean_energies(1e3 + x.float(), y, nads.float()), expected, atol=1e-3)
    few = class_mean_energies(x, y, nads[4:5])  # normalised by all of the energy, not that of the directions
    assert float(few) == pytest.approx(1.8 / 3.69, abs=1e-12)


def test_class_mean_energies_per_channel(nads: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions of one channel placed in each of three: the same as the directions of all channels, one by one."""
    coefficients = torch.stack([MEANS, 2 * MEANS.flip(0), 0 * MEANS], 1)  # [classes, channels, k]
    x, y = labelled(torch.einsum("cjk,khw->cjhw", coefficients, nads[:3]))
    expected = energies_by_hand(coefficients.flatten(1)).view(3, 3).T  # [k, channels]
    for form in (nads, nads.flatten(1), nads[:, None]):
        found = class_mean_energies(x, y, form)
        assert found.shape == (16, 3)
        assert torch.allclose(found[:3], expected, atol=1e-12)
        assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    for channel in range(3):
        placed = torch.stack([in_channel(u, channel, 3) for u in nads])
        assert torch.allclose(class_mean_energies(x, y, placed), found[:, channel], atol=1e-14)
    assert torch.allclose(class_mean_energies(nad_flip(x, nads), y, nads), found.flip(0), atol=1e-12)
    monkeypatch.setattr("biascope.data.images.CHUNK", 3)
    assert torch.allclose(class_mean_energies(x, y, nads), found, atol=1e-14)


def test_noise_of_the_means_is_what_the_docstring_says(nads: torch.Tensor) -> None:
    """E sum_c p_c <mu_c - mu, u>^2 = (C - 1) / n of the noise's variance: 4 errors of 4,000 sets."""
    rng = torch.Generator().manual_seed(5)
    y = torch.arange(8) // 6  # six of one class, two of the other
    raw = []
    for _ in range(4000):
        x = torch.randn(8, 2, generator=rng, dtype=torch.float64)
        means = torch.stack([x[y == c].mean(0) for c in (0, 1)])
        energy = torch.tensor([6.0, 2.0], dtype=torch.float64) / 8 @ (means - x.mean(0)).square()
        raw.append(energy)
        if len(raw) <= 20:
            found = class_mean_energies(x, y, torch.eye(2, dtype=torch.float64))
            assert torch.allclose(found, energy / energy.sum(), atol=1e-12)
    along = torch.stack(raw)
    error = along.std(0) / 4000**0.5
    assert ((along.mean(0) - 1 / 8).abs() < 4 * error).all()


def test_class_mean_energies_errors(nads: torch.Tensor) -> None:
    x, y = images(8), torch.arange(8) % 2
    with pytest.raises(InputError, match="not orthonormal"):
        class_mean_energies(x, y, 2 * nads)
    with pytest.raises(InputError, match=r"9 directions of shape \[9\]"):
        class_mean_energies(x, y, torch.eye(9))
    with pytest.raises(RuntimeError, match="Number of indices"):
        class_mean_energies(x, y[:4], nads)
    with pytest.raises(InputError, match="x has a NaN or infinity"):
        class_mean_energies(x / 0, y, nads)
    with pytest.raises(InputError, match=r"1 class\(es\) do not differ"):
        class_mean_energies(x, torch.zeros(8), nads)
    with pytest.raises(InputError, match=r"2 class\(es\) do not differ"):
        class_mean_energies(torch.cat([x, x]), torch.arange(16) // 8, nads)


def test_directions_of_the_other_orientation_are_refused() -> None:
    """Images of 2 x 4 pixels and directions of 4 x 2: as many entries, but other pixels."""
    x, y = torch.rand(6, 3, 2, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
    turned = torch.eye(8).view(8, 4, 2)
    for directions in (turned, turned[:, None], turned.reshape(8, 8, 1), turned.reshape(8, 2, 2, 2)):
        shape = str(list(directions.shape[1:])).replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(InputError, match=f"nads: 8 directions of shape {shape}, but images have"):
            poison(x, y, directions)
        with pytest.raises(InputError, match=f"nads: 8 directions of shape {shape}"):
            nad_flip(x, directions)
        with pytest.raises(InputError, match=f"v: 1 directions of shape {shape}"):
            underspecified(x, y, directions[0])
        with pytest.raises(InputError, match=f"directions: 8 directions of shape {shape}"):
            class_mean_energies(x, y, directions)
    rows = torch.eye(8)
    for same in (rows, rows.view(8, 2, 4), rows.view(8, 1, 2, 4)):
        assert torch.equal(poison(x, y, same), poison(x, y, rows))
        assert torch.equal(nad_flip(x, same), nad_flip(x, rows))
        assert torch.equal(underspecified(x, y, same[0]).x, underspecified(x, y, rows[0]).x)
        assert torch.equal(class_mean_energies(x, y, same), class_mean_energies(x, y, rows))
