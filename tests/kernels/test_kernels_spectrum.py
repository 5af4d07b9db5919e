"""Parts of large spectra against spectra in closed form: each eigenpair is held to its own eigenvalue."""

import functools
import warnings

import pytest
import torch

import biascope as bs
from biascope import linalg
from biascope.kernels import nystrom_extension, rotation_gain, spectrum
from biascope.support.errors import InputError

F64 = torch.float64


def geometric(n, rank, decay, dtype=F64):
    """K = Q diag(10^(-j / decay)) Q^T and its eigenpairs."""
    gen = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, rank, generator=gen, dtype=F64))[0]
    lam = 10 ** (-torch.arange(rank, dtype=F64) / decay)
    return bs.Kernel(((Q * lam) @ Q.T).to(dtype), "trace", "trace", True), lam, Q


def stop_early(A, k, tol, seed):
    return linalg.eigsh(A, k, tol=1e-3, seed=seed, subspace=k + 5, verify=False)


def loose(monkeypatch, affordable=0):
    """Lanczos for matrices of more than 100 rows, which stops at 1e-3 of the largest eigenvalue."""
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 100)
    monkeypatch.setattr(spectrum, "DENSE_AFFORDABLE", affordable)
    monkeypatch.setattr(spectrum, "eigsh", stop_early)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_small_eigenvalues_of_a_large_kernel(dtype):
    K, lam, Q = geometric(3100, 200, 25, dtype)
    spec = K.eigh(150)
    assert spec.values.dtype == spec.vectors.dtype == dtype
    # float32 entries move an eigenvalue by about 1e-11 of the largest
    torch.testing.assert_close(spec.values.double(), lam[:150], rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0)
    cosines = (spec.vectors.double() * Q[:, :150]).sum(0).abs()
    assert float(cosines.min()) > 0.9999
    assert bool(spec.resolved.all())
    phi = bs.eigenfunction_targets(spec, 125, binarize=False).double()
    assert abs(float(phi @ Q[:, 125])) / 3100**0.5 > 0.9999
    y = (Q[:, :150] * torch.randn(150, generator=torch.Generator().manual_seed(1), dtype=F64)).sum(1)
    assert K.energy_concentration(y, 150) == pytest.approx(1, abs=1e-6)


def test_what_lanczos_does_not_resolve_is_decomposed_whole(monkeypatch):
    K, lam, Q = geometric(400, 200, 10)
    loose(monkeypatch, affordable=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = K.eigh(50)
    torch.testing.assert_close(spec.values, lam[:50], rtol=1e-9, atol=0)
    assert float((spec.vectors * Q[:, :50]).sum(0).abs().min()) > 1 - 1e-9


def test_what_stays_unresolved_is_said_and_refused(monkeypatch):
    K, lam, Q = geometric(400, 200, 10)
    loose(monkeypatch)
    with pytest.warns(UserWarning, match="of 50 eigenpairs are resolved"):
        spec = K.eigh(50)
    assert not bool(spec.resolved.all())
    right = ((spec.values - lam[:50]).abs() < 1e-3 * lam[:50]) & ((spec.vectors * Q[:, :50]).sum(0).abs() > 0.99)
    assert bool(right[spec.resolved].all())
    bad = int((~spec.resolved).nonzero()[0])
    assert bad > 0
    assert bs.eigenfunction_targets(spec, bad - 1).shape == (400,)
    with pytest.raises(InputError, match=f"eigenpair {bad} is not resolved"):
        bs.eigenfunction_targets(spec, bad)
    with pytest.raises(InputError, match="is not resolved"):
        nystrom_extension(K, spec)
    with pytest.raises(InputError, match="is not resolved"):
        rotation_gain(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), torch.ones(400, 2), spec)
    with pytest.warns(UserWarning, match="of 50 eigenpairs"), pytest.raises(InputError, match="is not resolved"):
        K.energy_concentration(Q[:, 0], 50)


def test_without_memory_for_float64_what_float32_does_not_resolve_is_said(monkeypatch):
    K, lam, Q = geometric(400, 200, 10, torch.float32)
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 100)
    monkeypatch.setattr(spectrum, "budget", lambda size, device: 0)
    with pytest.warns(UserWarning, match="of 80 eigenpairs are resolved"):
        spec = K.eigh(80)  # down to 1e-8 of the largest
    good = spec.resolved
    assert 20 <= int(good.sum()) < 80
    right = (spec.values.double() / lam[:80] - 1).abs() < 1e-2
    assert bool(right[good].all())
    assert float((spec.vectors.double() * Q[:, :80]).sum(0).abs()[good].min()) > 0.99


def test_zeros_are_not_resolved_and_no_reason_for_a_dense_decomposition(monkeypatch):
    K, lam, _ = geometric(400, 5, 10)
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 100)
    monkeypatch.setattr(spectrum, "psd_eigh", functools.partial(pytest.fail, "a dense decomposition"))
    with pytest.warns(UserWarning, match="only the first 5 of 8"):
        spec = K.eigh(8)
    assert spec.resolved.tolist() == [True] * 5 + [False] * 3
    torch.testing.assert_close(spec.values[:5], lam, rtol=1e-10, atol=0)


def test_zero_eigenvalues_of_small_kernels():
    K, _, Q = geometric(40, 3, 10)
    assert K.energy_concentration(Q[:, 0], 3) == pytest.approx(1, rel=1e-12)
    with pytest.warns(UserWarning, match="only 3 of the first 6 eigenvalues are above zero"):
        K.energy_concentration(Q[:, 0], 6)
    with pytest.raises(InputError, match="eigenpair 4 is not resolved"):
        bs.eigenfunction_targets(K, [0, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert K.energy_concentration(Q[:, 0], 40) == pytest.approx(1, rel=1e-12)  # all there is: nothing to choose


def test_rotation_refuses_eigenfunctions_that_are_rounding():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=gen)
    net = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen))
    vectors = torch.linalg.eigh(bs.ntk(net, x, outputs=0).tensor.double())[1].flip(1).float()  # rank 4
    gains = rotation_gain(net, net, x, vectors[:, :4]).gains
    torch.testing.assert_close(gains, torch.ones(4, dtype=F64), rtol=1e-12, atol=0)
    with pytest.raises(InputError, match=r"target 4 has no alignment with the initial kernel .* is rounding"):
        rotation_gain(net, net, x, vectors[:, :9])
