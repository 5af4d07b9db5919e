"""Amplitudes of harmonics against polynomial multiplication, Bessel functions and the networks themselves."""

import math
import re
from collections import defaultdict

import pytest
import torch
from scipy.special import airy, jv
from torch import Tensor, nn

from biascope.fields import Polynomial, bessel_harmonics, frozen_siren, harmonics
from biascope.fields.networks import MultiplicativeFilter, encoding, order_of, seeded
from biascope.fields.series import bandwidth
from biascope.nets import FFN, MLP, SIREN
from biascope.support.errors import InputError, UnsupportedError

Series = dict[tuple[int, ...], complex]  # s -> coefficient of exp(i <s, theta>)


def times(a: Series, b: Series) -> Series:
    out: Series = defaultdict(complex)
    for s, x in a.items():
        for t, y in b.items():
            out[tuple(i + j for i, j in zip(s, t))] += x * y
    return out


def plus(parts: list[tuple[complex, Series]]) -> Series:
    out: Series = defaultdict(complex)
    for factor, series in parts:
        for s, x in series.items():
            out[s] += factor * x
    return out


def by_hand(net: FFN, T: int, coefficients: tuple[float, ...]) -> Series:
    """The slow obvious expansion: sines as two exponentials, powers by multiplication."""
    zero = (0,) * T
    unit = [tuple(int(i == t) for i in range(T)) for t in range(T)]
    minus = [tuple(-i for i in u) for u in unit]
    z: list[Series] = [{u: -0.5j, m: 0.5j} for u, m in zip(unit, minus)]
    z += [{u: 0.5, m: 0.5} for u, m in zip(unit, minus)]
    linears = [m for m in net.mlp.layers if isinstance(m, nn.Linear)]
    for layer, linear in enumerate(linears):
        pre = [
            plus([(w, v) for w, v in zip(row, z)] + [(b, {zero: 1.0})])
            for row, b in zip(linear.weight.tolist(), linear.bias.tolist())
        ]
        if layer == len(linears) - 1:
            return pre[0]
        z = []
        for v in pre:
            power: Series = {zero: 1.0}
            terms = []
            for c in coefficients:
                terms.append((c, power))
                power = times(power, v)
            z.append(plus(terms))
    raise AssertionError


def points(d: int, n: int = 50) -> Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1


def test_polynomials_by_multiplication() -> None:
    B, coefficients = torch.tensor([[3.1, 0.2], [-1.7, 2.2]]), (0.2, 1.0, -0.4)
    net = FFN(hidden=(3, 2), frequencies=B, activation=lambda: Polynomial(coefficients)).double()
    found, wanted = harmonics(net), by_hand(net, 2, coefficients)
    assert found.residual < 1e-13
    assert len(found.s) == 21  # (41 points of the ball of radius 4 + 1) / 2
    for s, c in zip(found.s.tolist(), found.coefficients[:, 0].tolist()):
        assert abs(c - wanted[tuple(s)] * (2 if any(s) else 1)) < 1e-12
    r = points(2)
    torch.testing.assert_close(found(r), net(r).detach(), rtol=1e-11, atol=1e-12)


def test_equal_frequencies_are_added_up() -> None:
    """3 + 3 = 6: two first-layer frequencies, one harmonic; against the DFT."""
    B = torch.tensor([[3.0], [6.0]])
    net = FFN(in_features=1, hidden=(4,), frequencies=B, activation=lambda: Polynomial([0.1, 1.0, 1.0])).double()
    found = harmonics(net).merged()
    assert found.frequencies[:, 0].tolist() == [0, 3, 6, 9, 12]
    r = torch.arange(64, dtype=torch.float64)[:, None] / 64
    dft = torch.fft.rfft(net(r).detach()[:, 0], norm="forward") * torch.where(torch.arange(33) > 0, 2, 1)
    torch.testing.assert_close(found.coefficients[:, 0], dft[[0, 3, 6, 9, 12]], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found(r), net(r).detach(), rtol=1e-11, atol=1e-13)
    assert float(found.energies().sum()) == pytest.approx(float(net(r).detach().square().mean()), rel=1e-12)  # Parseval


def siren(T: int, F: int, w_h: float, seed: int = 0) -> SIREN:
    net = seeded(SIREN, seed, in_features=2, hidden=(T, F), outputs=3, w0=7.0, w_h=w_h, output_offset=0.5)
    return net.double()


def test_bessel_is_the_series_of_the_network() -> None:
    net = siren(2, 4, 1.0)
    exact, sampled = bessel_harmonics(net, 16), harmonics(net, 16)
    assert exact.residual < 1e-12
    assert torch.equal(exact.s, sampled.s)
    torch.testing.assert_close(exact.coefficients, sampled.coefficients, rtol=0, atol=1e-12)
    r = points(2)
    torch.testing.assert_close(exact(r), net(r).detach(), rtol=1e-11, atol=1e-12)


def test_one_neuron_without_biases_is_jacobi_anger() -> None:
    """sin(b sin x) = 2 sum_k J_{2k+1}(b) sin((2k+1) x)."""
    net, b = seeded(SIREN, 0, in_features=1, hidden=(1, 1), w0=2 * math.pi, w_h=1.0).double(), 1.7
    with torch.no_grad():
        for p, value in zip(net.parameters(), (1.0, 0.0, b, 0.0, 1.0, 0.0)):
            p.fill_(value)
    found = bessel_harmonics(net, 7)
    assert found.frequencies[:, 0].tolist() == list(range(8))
    wanted = [2 * jv(n, b) if n % 2 else 0.0 for n in range(8)]
    torch.testing.assert_close(found.coefficients[:, 0].imag, -torch.tensor(wanted, dtype=torch.float64))
    assert found.coefficients.real.abs().max() < 1e-15


def test_d2_truncation_error() -> None:
    """Check D2: |W1| <= 1.5, T = 2: errors of about 9e-2, 8e-4, 1e-8, 3e-14 at N = 2, 4, 8, 12."""
    net = seeded(SIREN, 3, in_features=1, hidden=(2, 8), w_h=1.0).double()
    with torch.no_grad():
        net.layers[2].weight.uniform_(-1.5, 1.5, generator=torch.Generator().manual_seed(0))
        net.layers[4].weight.fill_(1 / 8)
    r = points(1, 200)
    for order, printed in ((2, 9e-2), (4, 8e-4), (8, 1e-8), (12, 3e-14)):
        error = float((bessel_harmonics(net, order)(r) - net(r).detach()).abs().max())
        sizes = [abs(jv(n, 1.5)) for n in range(40)]
        beyond = 2 * sum(sizes[order + 1 :])
        assert error <= 2 * beyond * (sizes[0] + 2 * sum(sizes[1:])) + 1e-14  # one of two angles is beyond
        assert printed / 30 < error < printed * 30, order


@pytest.mark.parametrize("b", [0.0, 0.3, 1.5, 10.0, 40.0])
def test_parseval_and_bandwidth(b: float) -> None:
    n = bandwidth(b, 0.98)
    inside = sum(jv(k, b) ** 2 for k in range(-n, n + 1))
    assert inside >= 0.98
    assert n == 0 or sum(jv(k, b) ** 2 for k in range(-n + 1, n)) < 0.98
    assert abs(n - (b + 1)) <= 1  # Carson
    assert sum(jv(k, b) ** 2 for k in range(-100, 101)) == pytest.approx(1, abs=1e-12)


def miller(b: float) -> list[float]:
    """2 J_k(b)^2 for k = 0, 1, ... by the recurrence downwards, which is stable, and J_0^2 + 2 sum J_k^2 = 1."""
    top = int(b + 80 + 30 * b ** (1 / 3))
    J = [0.0] * (top + 2)
    J[top] = 1e-300
    for k in range(top, 0, -1):
        J[k - 1] = 2 * k / b * J[k] - J[k + 1]
        if abs(J[k - 1]) > 1e100:
            J[k - 1 :] = [v * 1e-200 for v in J[k - 1 :]]
    largest = max(map(abs, J))
    J = [v / largest for v in J]  # squares of numbers near 1e-300 would be zero
    total = math.fsum([J[0] ** 2, *(2 * v**2 for v in J[1:])])
    return [2 * v**2 / total for v in J]


@pytest.mark.parametrize(
    ("b", "share"),
    [(1e3, 1 - 1e-12), (1e4, 0.9999999), (1e4, 0.5), (2e5, 0.999999), (7.5, 1 - 2**-53), (0.01, 1 - 2**-53)],
)
def test_bandwidth_of_large_arguments_and_shares_near_one(b: float, share: float) -> None:
    energy = miller(b)
    beyond, n = 0.0, len(energy) - 1
    while n > 0 and beyond + energy[n] <= 1 - share:
        beyond, n = beyond + energy[n], n - 1
    assert bandwidth(b, share) == bandwidth(-b, share) == n
    assert n > 0.7 * b


def test_bandwidth_of_a_million_and_of_too_much() -> None:
    """Near n = b, J_n is an Airy function, and the energy beyond z is 2 (2 / b)^(1/3) (Ai'(z)^2 - z Ai(z)^2)."""
    n, scale = bandwidth(1e6, 0.999999), (2 / 1e6) ** (1 / 3)

    def beyond(n: float) -> float:
        z = scale * (n + 0.5 - 1e6)  # the sum over k > n is the integral from n + 1/2
        ai, slope, _, _ = airy(z)
        return float(2 * scale * (slope**2 - z * ai**2))

    assert beyond(n + 1) < 1e-6 < beyond(n - 2)
    for b in (1e8, math.inf, math.nan):
        with pytest.raises(InputError, match=re.escape(f"b={b:g}: Bessel functions")):
            bandwidth(b)


def test_a_module_that_stands_twice_counts_twice() -> None:
    """The square of a square, one module: degree 4, and the expansion is exact."""
    square = Polynomial([0.2, 0.5, 1.0])
    assert order_of(nn.Sequential(nn.Linear(2, 2), square, nn.Linear(2, 2), square)) == 4
    block = nn.Sequential(nn.Linear(2, 2), square)
    assert order_of(nn.Sequential(block, block, block)) == 8
    shared, own = (
        seeded(FFN, 0, in_features=1, hidden=(4, 4), frequencies=torch.tensor([[3.0]]), activation=make)
        for make in (lambda: square, lambda: Polynomial([0.2, 0.5, 1.0]))
    )
    found = harmonics(shared)
    assert found.frequencies.flatten().tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert found.residual < 1e-12
    torch.testing.assert_close(found.coefficients, harmonics(own).coefficients)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = square

        def forward(self, z: Tensor) -> Tensor:
            out: Tensor = self.square(self.square(z))
            return out

    assert order_of(nn.Sequential(nn.Linear(2, 2), Twice())) is None


def test_terms_of_rounded_frequencies_are_merged() -> None:
    """0.1 + 0.2 = 0.3 in a network of float32: as many lines as with 1, 2, 3, and of the same amplitudes."""
    tenths, whole = (
        seeded(FFN, 0, in_features=1, hidden=(4,), frequencies=B, activation=lambda: Polynomial([0.0, 0.0, 1.0]))
        for B in (torch.tensor([[0.1], [0.2], [0.3]]), torch.tensor([[1.0], [2.0], [3.0]]))
    )
    found, exact = harmonics(tenths).merged(), harmonics(whole).merged()
    assert len(found.frequencies) == len(exact.frequencies) == 7
    torch.testing.assert_close(found.amplitudes, exact.amplitudes)
    r = torch.rand(50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found(r), tenths.double()(r).detach(), rtol=0, atol=1e-6)


def test_other_activations_have_a_residual_that_falls() -> None:
    net = seeded(FFN, 0, in_features=1, hidden=(16, 16), frequencies=torch.tensor([[1.0], [2.7]])).double()
    residuals = [harmonics(net, n).residual for n in (1, 4, 16, 64)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[0] > 1e-2 > 1e-3 > residuals[-1]
    found = harmonics(net, 64)
    shares = [found.share(n) for n in (0, 2, 8, 128)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    with pytest.raises(InputError, match="give order="):
        harmonics(net)


def test_products_of_sines_are_sums_of_sines() -> None:
    """A multiplicative filter network: every harmonic adds +-1 angle of the last filters, and the series is exact."""
    net = seeded(MultiplicativeFilter, 0, in_features=2, width=2, filters=3, sigma=3.0).double()
    found = harmonics(net, order=1)
    r = points(2)
    torch.testing.assert_close(found(r), net(r).detach(), rtol=1e-11, atol=1e-12)
    big = found.amplitudes[:, 0] > 1e-13
    per_filter = found.s[big].abs().reshape(-1, 3, 2).sum(2)
    patterns = {tuple(row) for row in per_filter.tolist()}
    assert patterns == {(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0)}  # a bias leaves earlier filters out
    assert int(big.sum()) == 1 + 2 + 2 * 4 + 4 * 8  # w^k choices times 2^(k-1) signs
    assert encoding(net).order == 3


def test_frozen_siren_repeats_itself() -> None:
    """The erratum of C.2: period 1 / f0 needs w0 = 2 pi f0, not w0 = f0."""
    r = points(2)
    for f0 in (1.0, 0.5):
        net = frozen_siren(f0 * torch.eye(2), hidden=(8, 8)).double()
        one, half = (net(r + torch.tensor([step / f0, 0.0])) for step in (1.0, 0.5))
        torch.testing.assert_close(one, net(r))
        assert (half - net(r)).abs().max() > 1e-2
    assert [p.requires_grad for p in net.parameters()] == [False, False] + [True] * 6


def test_nothing_of_the_user_is_touched() -> None:
    net = siren(2, 3, 2.0).float()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    harmonics(net, 3)
    bessel_harmonics(net, 3)
    frozen_siren(torch.eye(2), hidden=(4,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="two layers of sines, not 3"):
        bessel_harmonics(SIREN(hidden=(2, 2, 2)), 3)
    with pytest.raises(InputError, match="terms, more than"):
        harmonics(SIREN(hidden=(256, 4)), 3)
    with pytest.raises(UnsupportedError, match="no layer of sines"):
        encoding(SIREN(hidden=()))
    with pytest.raises(UnsupportedError, match="MLP has no known"):
        harmonics(MLP(), 3)
    with pytest.raises(InputError, match="frequencies has shape"):
        frozen_siren(torch.ones(3))
    with pytest.raises(InputError, match="empty"):
        Polynomial([])
    assert Polynomial([1.0, 2.0, 0.0]).degree == 1
