"""Theorem 5.1: which frequencies can be there, against brute force and against the DFT of polynomial networks."""

import doctest
import importlib
import itertools
import pkgutil
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import biascope.fields
from biascope.fields import Polynomial, coordinates, harmonic_support, missing_bins, nyquist_check, single_frequency
from biascope.fields.support import canonical, integer_ball, spectrum_leakage
from biascope.nets import FFN, SIREN
from biascope.support.errors import InputError, UnsupportedError

MODULES = [m.name for m in pkgutil.iter_modules(biascope.fields.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"biascope.fields.{name}"))
    assert result.failed == 0


def polynomial_net(frequencies: Tensor, activations: int, coefficients: tuple[float, ...], width: int = 5) -> FFN:
    return FFN(
        in_features=frequencies.shape[1],
        hidden=(width,) * activations,
        frequencies=frequencies,
        activation=lambda: Polynomial(coefficients),
    ).double()


def lines(net: nn.Module, n: int) -> list[int]:
    with torch.no_grad():
        power = torch.fft.rfft(net(coordinates(n, 0.0, 1.0, torch.float64))[:, 0]).abs()
    return (power > 1e-10 * power.max()).nonzero()[:, 0].tolist()


def test_d1_two_tones_through_two_squares() -> None:
    """Check D1: the printed support, found by the DFT of a random network and by the theorem."""
    wanted = [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 14, 16, 17, 19, 20, 23, 26, 27, 30, 33, 40]
    omega = torch.tensor([[3.0], [10.0]])
    net = polynomial_net(omega, 2, (0.3, 1.0, 0.7))
    found = harmonic_support(omega, degree=2, layers=3)
    assert found.frequencies[:, 0].tolist() == wanted
    assert lines(net, 128) == wanted
    assert found.frequencies.max() == 2**2 * 10
    assert spectrum_leakage(net, omega, 2, 3, n=128) < 1e-25
    assert spectrum_leakage(net, omega, 2, 2, n=128) > 1e-4  # one layer less does not hold it


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_degree_k_on_one_tone_gives_k_plus_one_lines(degree: int) -> None:
    net = polynomial_net(torch.tensor([[4.0]]), 1, (0.5,) * (degree + 1))
    assert lines(net, 64) == [4 * k for k in range(degree + 1)]
    assert len(harmonic_support(torch.tensor([4.0]), degree, 2)) == degree + 1


@pytest.mark.parametrize(
    "tones", [[[3], [10]], [[1], [1]], [[2], [-3], [5]], [[1, 0], [0, 1]], [[1, 2], [2, 4], [0, 3]]]
)
def test_frequencies_orders_and_multiplicities_by_brute_force(tones: list[list[int]]) -> None:
    order, T = 4, len(tones)
    ways: Counter[tuple[int, ...]] = Counter()
    least: dict[tuple[int, ...], int] = {}
    for s in itertools.product(range(-order, order + 1), repeat=T):
        size = sum(map(abs, s))
        if size <= order:
            w = tuple(sum(a * tone[j] for a, tone in zip(s, tones)) for j in range(len(tones[0])))
            ways[w] += 1
            least[w] = min(least.get(w, size), size)
    half = sorted(w for w in ways if w >= tuple(-x for x in w))
    found = harmonic_support(torch.tensor(tones, dtype=torch.float32), degree=2, layers=3)
    assert [tuple(w) for w in found.frequencies.long().tolist()] == half
    assert found.multiplicities.tolist() == [ways[w] for w in half]
    assert found.orders.tolist() == [least[w] for w in half]


@pytest.mark.parametrize("scale", [1.0, 102.4, 1e-6, 3.3e7])
def test_rounded_frequencies_are_one(scale: float) -> None:
    """0.1 + 0.2 is not 0.3 in floating point; as frequencies they are the same."""
    tenths = harmonic_support(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64) * scale, 3, 2)
    whole = harmonic_support(torch.tensor([1.0, 2.0, 3.0]), 3, 2)
    assert torch.equal(tenths.multiplicities, whole.multiplicities)
    torch.testing.assert_close(tenths.frequencies, whole.frequencies * 0.1 * scale, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.7, 1e3])
def test_rounded_frequencies_are_one_in_every_type(dtype: torch.dtype, scale: float) -> None:
    """Tenths in float32 are off by 1e-8, more than 1e-9; the support is that of 1, 2, 3."""
    tenths = (torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64) * scale).to(dtype)
    found, whole = harmonic_support(tenths, 2, 2), harmonic_support(torch.tensor([1, 2, 3]), 2, 2)
    assert len(found) == len(whole) == 7
    assert torch.equal(found.multiplicities, whole.multiplicities)
    assert torch.equal(found.orders, whole.orders)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.frequencies, whole.frequencies * 0.1 * scale, rtol=0, atol=eps * scale)
    pair = torch.stack([tenths, -tenths.flip(0)], 1)  # 0.1, 0.2, 0.3 against -0.3, -0.2, -0.1
    two = harmonic_support(pair, 2, 2)
    exact = harmonic_support(torch.tensor([[1, -3], [2, -2], [3, -1]]), 2, 2)
    assert torch.equal(two.multiplicities, exact.multiplicities)


def test_different_frequencies_stay_different() -> None:
    """What float32 can tell apart, it does; and float64 more."""
    near = torch.tensor([1.0, 1.0 + 1e-6])
    assert len(harmonic_support(near, 1, 1)) == 3
    nearer = torch.tensor([1.0, 1.0 + 1e-8], dtype=torch.float64)
    assert len(harmonic_support(nearer, 1, 1)) == 3
    assert len(harmonic_support(nearer.float(), 1, 1)) == 2


def test_dense_frequencies_do_not_become_one() -> None:
    """Gaps below the rounding of float32 form a chain over the whole range, which is cut into pieces of four steps."""
    w = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
    keys, _ = canonical(w, 1.6e-5)
    assert (keys.diff(dim=0) >= 0).all()
    sizes = torch.bincount(keys[:, 0])[1:]
    assert 6 <= sizes[:-1].min() <= sizes.max() <= 7  # pieces of 6.4e-5 hold six or seven steps of 1e-5


def test_bins_of_rounded_frequencies() -> None:
    """256 times 0.1 in float32 is 4e-6 of a bin beside a bin of a box of 10."""
    tenth = torch.tensor([0.1])
    assert not missing_bins(tenth, degree=256, layers=2, n=8, extent=10.0).any()


def test_equal_frequencies_half_way_between_two_whole_numbers() -> None:
    """3 / 7 and 1 / 7 + 2 / 7 relative to 4 * 256 / 7, in units of 1e-9, are on both sides of a half."""
    whole = torch.tensor([1.0, 2.0, 3.0, 256.0], dtype=torch.float64)
    sevenths = harmonic_support(whole / 7, degree=4, layers=2)
    assert torch.equal(sevenths.multiplicities, harmonic_support(whole, degree=4, layers=2).multiplicities)


def test_the_ball_is_counted_right() -> None:
    for T, radius in ((1, 5), (2, 4), (4, 3), (3, 0)):
        brute = [s for s in itertools.product(range(-radius, radius + 1), repeat=T) if sum(map(abs, s)) <= radius]
        assert sorted(map(tuple, integer_ball(T, radius).tolist())) == sorted(brute)


def test_missing_bins_of_one_frequency_on_an_image() -> None:
    missing = missing_bins(torch.eye(2), degree=16, layers=2, n=8, extent=2.0)
    even = torch.arange(8) % 2 == 0
    assert torch.equal(~missing, even[:, None] & even[None])
    assert not missing_bins(0.5 * torch.eye(2), degree=16, layers=2, n=8, extent=2.0).any()


def test_leakage_of_a_relu_falls_with_the_degree() -> None:
    net = single_frequency(1.0, in_features=1, hidden=(32,), outputs=1).double()
    leak = [spectrum_leakage(net, net, degree, 2, n=256) for degree in (1, 2, 4, 8, 16)]
    assert all(a > b for a, b in itertools.pairwise(leak))
    assert leak[0] > 1e-4
    assert leak[-1] < 1e-5


def test_nyquist_aliases_take_the_same_values() -> None:
    B = 200 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = nyquist_check(B, rate=64.0, order=3)
    r = coordinates((8, 8), 0.0, 8 / 64, torch.float64).reshape(-1, 2)
    same = (2 * torch.pi * r @ B.T).cos() - (2 * torch.pi * r @ found.aliases.T).cos()
    assert same.abs().max() < 1e-10
    assert found.aliases.abs().max() <= 32
    assert torch.equal(found.above, (B.abs() > 32).any(1))
    assert found.share == found.above.double().mean()
    assert found.reach == 3 * B.abs().max()
    assert not found.safe


def test_nyquist_of_siren() -> None:
    """W_0 ~ U(-1/d, 1/d), so that 2 pi times the frequency is at most w0 / d; 300 aliases in section 5.3.2, 30 not."""
    slow, fast = (SIREN(in_features=1, hidden=(2000, 4), w0=w0) for w0 in (30.0, 300.0))
    assert nyquist_check(slow, 128.0).reach == pytest.approx(30 / (2 * torch.pi), rel=1e-2)
    assert nyquist_check(slow, 128.0, order=8).safe
    assert not nyquist_check(fast, 128.0, order=8).safe
    assert nyquist_check(fast, 64.0).share == pytest.approx(1 - 2 * torch.pi * 32 / 300, abs=0.03)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="combinations"):
        harmonic_support(torch.ones(256, 2), 2, 4)
    with pytest.raises(InputError, match="does not fall on a bin"):
        missing_bins(torch.tensor([0.3]), 2, 2, n=8)
    with pytest.raises(InputError, match="shape"):
        harmonic_support(torch.ones(2, 2, 2), 2, 2)
    with pytest.raises(InputError, match="at least 1"):
        harmonic_support(torch.ones(2), 0, 2)
    with pytest.raises(InputError, match="rate"):
        nyquist_check(torch.ones(2), 0.0)
    with pytest.raises(UnsupportedError, match="Linear has no known"):
        harmonic_support(nn.Linear(2, 2), 2, 2)
    with pytest.raises(InputError, match=r"shape must be at least 1|shape=0"):
        coordinates(0)
