import pytest
import torch

from biascope.data import random_orthogonal
from biascope.data.bases import complete_basis
from biascope.data.fourier import dft_basis, fourier_vectors, frequency_map
from biascope.support.errors import InputError


def test_counts_and_gram_at_32x32() -> None:
    b = dft_basis((32, 32))
    assert b.parts.count("re") == 514
    assert b.parts.count("im") == 510
    flat = b.vectors.flatten(1)
    assert float((flat @ flat.T - torch.eye(1024, dtype=torch.float64)).abs().max()) < 1e-12
    assert torch.allclose(b.vectors[0], torch.full((32, 32), 1 / 32, dtype=torch.float64), atol=1e-15)
    assert repr(b) == "FourierBasis(shape=(32, 32), 514 re + 510 im)"


@pytest.mark.parametrize("shape", [(8,), (7,), (1,), (6, 4), (5, 5), (4, 3)])
def test_each_vector_is_the_definition(shape: tuple[int, ...]) -> None:
    """v_Re = F^-1(e_b + e_-b)/sqrt 2 (or /2), v_Im = F^-1(j e_b - j e_-b)/sqrt 2, by torch's unitary inverse DFT."""
    basis = dft_basis(shape)
    assert len(basis) == torch.Size(shape).numel()
    for v, b, part in zip(basis.vectors, basis.bins, basis.parts):
        e = torch.zeros(shape, dtype=torch.complex128)
        conjugate = tuple((-int(k)) % n for k, n in zip(b, shape))
        e[tuple(b)] += 1 if part == "re" else 1j
        e[conjugate] += 1 if part == "re" else -1j
        e = e / e.abs().square().sum().sqrt()
        expected = torch.fft.ifftn(e, norm="ortho")
        assert float(expected.imag.abs().max()) < 1e-14
        assert torch.allclose(v, expected.real, atol=1e-14)


def test_support_on_one_conjugate_pair() -> None:
    basis = dft_basis((6, 6))
    power = torch.fft.fft2(basis.vectors, norm="ortho").abs() ** 2
    for p, b in zip(power, basis.bins):
        pair = p[tuple(b)] + (0 if ((2 * b) % 6 == 0).all() else p[tuple((-b) % 6)])
        assert float(pair) == pytest.approx(1, abs=1e-12)


def test_no_im_vector_at_self_conjugate_bins() -> None:
    with pytest.raises(InputError, match="no Im vector"):
        fourier_vectors((8,), torch.tensor([[4]]), "im")
    with pytest.raises(InputError, match=r"shape\[0\] must be at least 1, not 0|shape="):
        dft_basis((0, 4))


def test_frequency_map_and_gaps() -> None:
    basis = dft_basis((32, 32))
    f = basis.frequencies.double()
    radius = f.square().sum(1)
    m = frequency_map(radius, basis)
    k = torch.arange(-16, 16).double()
    assert torch.equal(m, k[:, None] ** 2 + k[None] ** 2)
    assert int(frequency_map(radius, basis, "im").isnan().sum()) == 4
    # symmetric under conjugation: map[k] == map[-k]
    values = torch.rand(len(basis), generator=torch.Generator().manual_seed(0))
    plain = torch.fft.ifftshift(frequency_map(values, basis))
    assert torch.equal(plain, torch.roll(plain.flip(0, 1), (1, 1), (0, 1)))
    with pytest.raises(IndexError, match="does not match"):
        frequency_map(torch.zeros(3), basis)


def test_map_of_1d_basis() -> None:
    basis = dft_basis(6).part("re")
    assert frequency_map(basis.bins[:, 0].double(), basis).tolist() == [3, 2, 1, 0, 1, 2]


def test_subgrids() -> None:
    basis = dft_basis((32, 32))
    low = basis.lowest(16)
    m = frequency_map(torch.ones(len(low)), low)
    assert int((~m.isnan())[8:24, 8:24].sum()) == 256  # the 16 x 16 window is filled
    assert int((~m.isnan()).sum()) == 256 + 31  # plus the conjugates of row and column -8
    step = basis.stride(2).part("re")
    m = frequency_map(torch.ones(len(step)), step)
    assert int((~m.isnan()).sum()) == 256
    assert len(dft_basis(9).lowest(9)) == 9
    assert len(basis.lowest(33)) == len(basis)  # all there are


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_orthogonal_is_in_so(dim: int, seed: int) -> None:
    u = random_orthogonal(dim, seed=seed)
    assert torch.allclose(u @ u.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    assert float(torch.linalg.det(u)) == pytest.approx(1, abs=1e-10)


def test_random_orthogonal_is_uniform() -> None:
    """Haar moments: E u_ij^2 = 1/D, E u_ij^4 = 3/(D(D+2)), E u_11 u_22 = 0 (without the sign fix it is not)."""
    draws = torch.stack([random_orthogonal(4, seed=s) for s in range(3000)])
    assert float(draws.square().mean(0).sub(1 / 4).abs().max()) < 0.02
    assert float(draws.pow(4).mean()) == pytest.approx(3 / 24, abs=0.003)
    assert abs(float(draws[:, 0, 0].mean())) < 5 * 0.5 / 3000**0.5
    assert abs(float((draws[:, 0, 0] * draws[:, 1, 1]).mean())) < 5 * 0.28 / 3000**0.5
    with pytest.raises(InputError, match="dim"):
        random_orthogonal(0)


def test_complete_basis() -> None:
    u = random_orthogonal(6, seed=0)
    full = complete_basis(u[:4])
    assert torch.equal(full[:4], u[:4])
    assert torch.allclose(full @ full.T, torch.eye(6, dtype=torch.float64), atol=1e-12)
    assert complete_basis(u) is u
    with pytest.raises(InputError, match="not orthonormal"):
        complete_basis(2 * u[:2])
    with pytest.raises(InputError, match="not orthonormal"):
        complete_basis(torch.ones(3, 2))


@pytest.mark.parametrize("shape", [(4,), (7,), (6, 4), (4, 3), (2, 2, 3)])
def test_signed_frequencies_and_whole_turns_are_the_same_bins(shape: tuple[int, ...]) -> None:
    """-n/2 is the Nyquist bin n/2, which is its own conjugate: it has length 1 too, and no sine."""
    basis = dft_basis(shape)
    for part in ("re", "im"):
        own = basis.part(part)  # type: ignore[arg-type]
        for bins in (own.frequencies, own.bins + 2 * torch.tensor(shape)):
            assert torch.equal(fourier_vectors(shape, bins, part), own.vectors)  # type: ignore[arg-type]
    nyquist = torch.tensor([[-(n // 2) if n % 2 == 0 else 0 for n in shape]])
    assert float(fourier_vectors(shape, nyquist, "re").norm()) == pytest.approx(1, abs=1e-14)
    with pytest.raises(InputError, match="own conjugate"):
        fourier_vectors(shape, nyquist, "im")


@pytest.mark.parametrize(("side", "step"), [(15, 2), (15, 4), (10, 4), (9, 3), (32, 2), (32, 4), (12, 5)])
def test_a_stride_keeps_multiples_of_signed_frequencies(side: int, step: int) -> None:
    """Rows and columns, a frequency and its negative alike; in the order of the basis."""
    basis = dft_basis((side, side)).part("re")
    kept = basis.stride(step)
    expected = [f for f in basis.frequencies.tolist() if f[0] % step == 0 and f[1] % step == 0]
    assert kept.frequencies.tolist() == expected
    filled = ~torch.fft.ifftshift(frequency_map(torch.ones(len(kept)), kept)).isnan()
    assert torch.equal(filled, filled.T)


def test_a_stride_that_divides_the_side_keeps_every_so_many_th_bin() -> None:
    basis = dft_basis((32, 32))
    for step in (1, 2, 4, 8, 16, 32):
        kept = (basis.bins % step == 0).all(1)
        assert torch.equal(basis.stride(step).bins, basis.bins[kept])


def test_strides_positions_and_precisions_that_make_no_basis() -> None:
    basis = dft_basis((4, 4))
    for step in (0, -2):
        with pytest.raises(InputError, match=f"step must be at least 1, not {step}"):
            basis.stride(step)
    for index in (torch.tensor([3, 16]), torch.tensor([-17])):
        with pytest.raises(IndexError, match=f"index {int(index[-1])} is out of bounds"):
            basis.select(index)
    for index in (torch.ones(3, dtype=torch.bool), torch.tensor([0.5])):
        with pytest.raises(IndexError, match=r"does not match|must be long"):
            basis.select(index)
    assert basis.select(torch.tensor([-1])).bins.tolist() == basis.bins[-1:].tolist()
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(InputError, match=f"dtype={dtype}: a floating-point dtype is needed"):
            dft_basis(4, dtype=dtype)
        with pytest.raises(InputError, match=f"dtype={dtype}: a floating-point dtype is needed"):
            fourier_vectors((4,), torch.tensor([[1]]), "re", dtype=dtype)
        with pytest.raises(InputError, match=f"dtype={dtype}: a floating-point dtype is needed"):
            random_orthogonal(3, dtype=dtype)
    with pytest.raises(InputError, match=r"rows is torch\.int64"):
        complete_basis(torch.eye(3, dtype=torch.int64)[:2])
