import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biascope.errors import InputError
from biascope.linalg import Dense, KroneckerEigen, KroneckerOperator, deep_net_damping, eigsh, kron_matvec, psd_eigh

close = torch.testing.assert_close
sizes = st.integers(1, 5)


def gen(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def psd(n: int, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    R = gen(n, rank or n + 2, seed=seed)
    return R @ R.T / n


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return psd(3), psd(4, seed=1)


@settings(deadline=None)
@given(p=sizes, q=sizes, r=sizes, s=sizes, k=sizes, seed=st.integers(0, 99))
def test_row_major_product(p: int, q: int, r: int, s: int, k: int, seed: int) -> None:
    B, A, X, Y = (
        gen(p, q, seed=seed),
        gen(r, s, seed=seed + 1),
        gen(q * s, k, seed=seed + 2),
        gen(p * r, k, seed=seed + 3),
    )
    full = torch.kron(B, A)
    close(kron_matvec(B, A, X), full @ X)
    V = X[:, 0].reshape(q, s)
    close(kron_matvec(B, A, X[:, 0]), (B @ V @ A.T).reshape(-1))  # the ordering trap
    K = KroneckerOperator(B, A)
    close(K @ X, full @ X)
    close(K.T @ Y, full.T @ Y)
    close(K.to_dense(), full)
    close(K.frobenius_norm(), full.norm())
    close(K.singular_values(), torch.linalg.svdvals(full)[: min(p, q) * min(r, s)], atol=1e-10, rtol=0)
    close(K.spectral_norm(), torch.linalg.matrix_norm(full, 2))


@settings(deadline=None)
@given(p=sizes, q=sizes, r=sizes, s=sizes, t=sizes, u=sizes)
def test_mixed_product(p: int, q: int, r: int, s: int, t: int, u: int) -> None:
    left, right = (
        KroneckerOperator(gen(p, q), gen(r, s, seed=1)),
        KroneckerOperator(gen(q, t, seed=2), gen(s, u, seed=3)),
    )
    product = left @ right
    assert isinstance(product, KroneckerOperator)
    close(product.to_dense(), left.to_dense() @ right.to_dense())


def test_factors_that_do_not_fit_multiply_lazily() -> None:
    left, right = KroneckerOperator(gen(2, 2), gen(3, 3)), KroneckerOperator(gen(3, 3), gen(2, 2))
    product = left @ right
    assert not isinstance(product, KroneckerOperator)
    close(product.to_dense(), left.to_dense() @ right.to_dense())


def test_identities(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    B, A = pair
    K, full = KroneckerOperator(B, A), torch.kron(B, A)
    close(K.inverse().to_dense(), torch.linalg.inv(full), atol=1e-8, rtol=1e-8)
    close(
        torch.kron(torch.linalg.inv(B), torch.linalg.inv(A)),
        K.inverse(mode="factored").to_dense(),
        atol=1e-8,
        rtol=1e-8,
    )
    close(K.T.to_dense(), full.T)
    close(K.diagonal(), full.diagonal())
    close(K.trace(), full.trace())
    close((2.5 * K).to_dense(), 2.5 * full)
    close((-K / 2).to_dense(), -full / 2)
    close((0 * K).to_dense(), 0 * full)
    assert isinstance(2.5 * K, KroneckerOperator)
    close((K + Dense(full)).to_dense(), 2 * full)
    assert KroneckerOperator(psd(5, rank=2), psd(4, rank=3)).rank() == 6
    assert repr(K) == "<KroneckerOperator 12x12 float64: B 3x3 (x) A 4x4>"
    close(eigsh(K, 2).values, torch.linalg.eigvalsh(full).flip(0)[:2])


@pytest.mark.parametrize("lam", [1e-3, 0.1, 3.0])
def test_damping(pair: tuple[torch.Tensor, torch.Tensor], lam: float) -> None:
    B, A = pair
    K, full = KroneckerOperator(B, A), torch.kron(B, A)
    v = gen(12, 2)
    exact = torch.linalg.solve(full + lam * eye(12), v)
    close(K.solve(v, lam), exact, atol=1e-9, rtol=1e-9)
    close(K.solve(v[:, 0], lam), exact[:, 0], atol=1e-9, rtol=1e-9)
    pi = ((A.trace() / 4) / (B.trace() / 3)).sqrt()
    damped = torch.kron(B + lam**0.5 / pi * eye(3), A + pi * lam**0.5 * eye(4))
    close(K.solve(v, lam, mode="factored"), torch.linalg.solve(damped, v), atol=1e-9, rtol=1e-9)
    assert not torch.allclose(damped, full + lam * eye(12), atol=lam * 1e-3)  # the two are not the same matrix
    # scaling one factor up and the other down is the same operator: both kinds of damping must not notice
    other = KroneckerOperator(100 * B, A / 100)
    for mode in ("exact", "factored"):
        close(other.solve(v, lam, mode), K.solve(v, lam, mode), atol=1e-8, rtol=1e-8)


def test_singular_factors() -> None:
    K = KroneckerOperator(psd(3, rank=1), psd(4, rank=2))
    v = gen(12)
    for lam in (0.1, 1e-4):
        close(K.solve(v, lam), torch.linalg.solve(K.to_dense() + lam * eye(12), v), atol=1e-8, rtol=1e-8)
    with pytest.raises(InputError, match=r"singular, .* give damping > 0"):
        KroneckerOperator(torch.zeros(2, 2), torch.eye(2)).solve(torch.ones(4))
    with pytest.raises(InputError, match="factor B is singular"):
        K.solve(v, mode="factored")
    close(K.power(-1).to_dense(), torch.linalg.pinv(K.to_dense(), hermitian=True, rtol=1e-10), atol=1e-7, rtol=1e-7)
    zero = KroneckerOperator(torch.zeros(2, 2).double(), eye(2))
    close(zero.solve(gen(4), 0.25, "factored"), gen(4) / (0.5 * 1.5))  # pi = 1 where a trace is zero


def test_powers(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    K, full = KroneckerOperator(*pair), torch.kron(*pair)
    close((K.power(0.5) @ K.power(0.5)).to_dense(), full, atol=1e-10, rtol=0)
    close(K.power(3).to_dense(), full @ full @ full, atol=1e-9, rtol=1e-9)
    close(K.power(-0.5).to_dense() @ full @ K.power(-0.5).to_dense(), eye(12), atol=1e-8, rtol=0)
    E = K.eigen()
    for e in (0.5, 2, -1, -0.5):
        close(E.power(e).to_dense(), K.power(e).to_dense(), atol=1e-7, rtol=1e-8)


@pytest.mark.parametrize("extra", [(), (6,)])
def test_eigen_form_equals_dense(extra: tuple[int, ...]) -> None:
    """With a third dimension the matrix is diagonal blocks over unrotated positions."""
    U_B, U_A = torch.linalg.qr(gen(3, 3))[0].contiguous(), torch.linalg.qr(gen(4, 4, seed=1))[0].contiguous()
    s = gen(3, 4, *extra, seed=2).square() + 0.1
    E = KroneckerEigen(U_B, U_A, s)
    U = torch.kron(torch.kron(U_B, U_A), eye(extra[0]) if extra else eye(1))
    full = U @ torch.diag(s.reshape(-1)) @ U.T
    n = len(full)
    v = gen(n, 2, seed=3)
    close(E.to_dense(), full)
    close(E @ v, full @ v)
    close(E.to_eigenbasis(v), U.T @ v)
    close(E.to_eigenbasis(v[:, 0]), U.T @ v[:, 0])
    close(E.from_eigenbasis(E.to_eigenbasis(v)), v)
    close(E.diagonal(), full.diagonal())
    close(E.trace(), full.trace())
    close(E.frobenius_norm(), full.norm())
    close(E.spectral_norm(), torch.linalg.matrix_norm(full, 2))
    close(E.eigenvalues(), torch.linalg.eigvalsh(full).flip(0))
    close(E.quadratic_form(v), torch.einsum("ik,ij,jk->k", v, full, v))
    close(E.quadratic_form(v[:, 0]), v[:, 0] @ full @ v[:, 0])
    close(E.solve(v, 0.3), torch.linalg.solve(full + 0.3 * eye(n), v))
    close(E.inverse(0.3).to_dense(), torch.linalg.inv(full + 0.3 * eye(n)))
    close((E + 2 * E).to_dense(), 3 * full)
    assert isinstance(E + 2 * E, KroneckerEigen)
    close((E + Dense(full)).to_dense(), 2 * full)
    damping = gen(3, 4, *extra, seed=5).square()
    want = U @ torch.diag(1 / (s + damping).reshape(-1)) @ U.T @ v
    close(E.solve(v, damping), want)


def test_ekfac_is_the_best_diagonal_in_its_basis() -> None:
    """||F - EKFAC||^2 = ||F||^2 - ||s||^2 <= ||F - KFAC||^2, and no other diagonal does better."""
    a, g = gen(50, 4), gen(50, 3, seed=1)
    a[:, 0] = g[:, 0].abs()  # make inputs and gradients dependent
    grads = torch.einsum("no,ni->noi", g, a).reshape(50, -1)
    F = grads.T @ grads / 50
    K = KroneckerOperator(g.T @ g / 50, a.T @ a / 50)
    E = K.eigen()
    s = E.to_eigenbasis(grads.T).square().mean(1).reshape(3, 4)
    close(s, (g @ E.U_B).square().T @ (a @ E.U_A).square() / 50)
    ekfac = E.with_scalings(s)
    error = (F - ekfac.to_dense()).norm().square()
    close(error, F.norm().square() - s.norm().square(), atol=1e-10, rtol=1e-10)
    assert error < (F - K.to_dense()).norm().square()
    close(ekfac.trace(), F.trace())
    for seed in range(5):
        assert (F - E.with_scalings(s + 0.1 * gen(3, 4, seed=seed)).to_dense()).norm().square() > error


def test_deep_net_damping(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    s_B, s_A = psd_eigh(pair[0]).values, psd_eigh(pair[1]).values
    eps = 0.04
    want = torch.outer(s_B + eps**0.5, s_A + eps**0.5) - torch.outer(s_B, s_A)
    close(deep_net_damping(s_B, s_A, eps), want)


@pytest.mark.parametrize("mode", ["exact", "factored"])
def test_sampling_covariance(pair: tuple[torch.Tensor, torch.Tensor], mode: str) -> None:
    K, lam, n = KroneckerOperator(*pair), 0.2, 40_000
    x = K.sample(n, lam, mode, seed=3)
    assert x.shape == (n, 12)
    want = K.inverse(lam, mode).to_dense()
    got = x.T @ x / n
    # standard error of an entry of a Gaussian sample covariance
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / n).sqrt()
    assert ((got - want).abs() < 5 * error).all()
    assert torch.equal(x, K.sample(n, lam, mode, seed=3))
    assert not torch.equal(x, K.sample(n, lam, mode, seed=4))


def test_float32_and_device(device: str, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    B, A = (t.float().to(device) for t in pair)
    K = KroneckerOperator(B, A)
    v = gen(12).float().to(device)
    got = K.solve(v, 0.1)
    assert got.device.type == device
    assert got.dtype == torch.float32
    full = torch.kron(B.double(), A.double()).cpu()
    close(got.cpu().double(), torch.linalg.solve(full + 0.1 * eye(12), v.cpu().double()), atol=1e-4, rtol=1e-4)


def test_bad_input(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    B, A = pair
    K = KroneckerOperator(B, A)
    with pytest.raises(InputError, match=r"\(B 3x3\) \(x\) \(A 4x4\) takes \[12\]"):
        kron_matvec(B, A, gen(11))
    with pytest.raises(InputError, match="needs matrices"):
        kron_matvec(gen(3), A, gen(12))
    with pytest.raises(InputError, match="B must be a matrix"):
        KroneckerOperator(gen(3), A)
    with pytest.raises(InputError, match=r"B is torch.float32 on cpu, A is torch.float64"):
        KroneckerOperator(B.float(), A)
    for lam in (-1.0, float("nan")):
        for mode in ("exact", "factored"):
            with pytest.raises(InputError, match="damping must be a number >= 0"):
                K.solve(gen(12), lam, mode)
    with pytest.raises(InputError, match="mode must be one of"):
        K.solve(gen(12), 0.1, "pi")
    crooked = KroneckerOperator(gen(3, 3), A)
    for call in (crooked.eigen, lambda: crooked.power(2)):
        with pytest.raises(InputError, match="symmetric factors"):
            call()
    wide = KroneckerOperator(gen(2, 3), gen(3, 2))
    for call in (wide.trace, wide.diagonal, lambda: wide.damped_factors(0.1)):
        with pytest.raises(InputError, match=r"needs square factors; B is \[2, 3\]"):
            call()
    with pytest.raises(InputError, match=r"needs U_B \[p, p\]"):
        KroneckerEigen(eye(3), eye(4), gen(4, 3))
    with pytest.raises(InputError, match="must agree"):
        KroneckerEigen(eye(3).float(), eye(4), gen(3, 4))
    with pytest.raises(InputError, match="shaped as s"):
        K.eigen().inverse(gen(4, 3))
    with pytest.raises(InputError, match="negative eigenvalues"):
        K.eigen().with_scalings(-K.eigen().s).power(0.5)
    with pytest.raises(InputError, match=r"takes \[12\]"):
        K.eigen().to_eigenbasis(gen(5))
    with pytest.raises(InputError, match="n >= 1"):
        K.sample(0, 0.1)
    with pytest.raises(InputError, match=r"needs eigenvalues \[p\]"):
        deep_net_damping(B, A, 0.1)
