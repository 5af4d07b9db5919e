"""Every operation of every representation equals the same operation on its dense matrix."""

import warnings

import pytest
import torch

import biascope as bs
from biascope.curvature.blockwise import BlockMetric
from biascope.support.errors import InputError, UnsupportedError
from curvature.curvature_zoo import case, relative

REPRESENTATIONS = [
    "dense",
    "diagonal",
    "block",
    "quasidiagonal",
    "kfac",
    "ekfac",
    "lowrank",
    "implicit",
    "mixed",
    "eye",
]
EIGEN = ["dense", "diagonal", "block", "kfac", "ekfac", "mixed"]
CASES = ["mlp", "conv2d", "words"]


@pytest.fixture(scope="module")
def metric():
    cache = {}

    def get(name, representation, **options):
        key = (name, representation, *options.items())
        if key not in cache:
            F = bs.fisher(*case(name), representation, **options)
            cache[key] = (F, F.to_dense())
        return cache[key]

    return get


def vectors(p, k=3):
    return torch.randn(p, k, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_products_and_numbers(metric, name, representation):
    F, D = metric(name, representation)
    V = vectors(len(D))
    assert relative(F @ V, D @ V) < 1e-10
    assert relative(F @ V[:, 0], D @ V[:, 0]) < 1e-10
    as_dict = F @ F.space.unflatten(V[:, 0])
    assert list(as_dict) == list(F.space.shapes)
    assert relative(F.space.flatten(as_dict), D @ V[:, 0]) < 1e-10
    assert relative(F.quadratic_form(V), (V * (D @ V)).sum(0)) < 1e-10
    assert F.quadratic_form(V[:, 0]).shape == ()
    assert relative(F.trace(), D.trace()) < 1e-10
    assert relative(F.diagonal(), D.diagonal()) < 1e-10
    assert relative(F.frobenius_norm(), D.norm()) < 1e-10
    assert relative(F.spectral_norm(), torch.linalg.eigvalsh(D).abs().max()) < 1e-7
    assert relative(D, D.T) < 1e-12
    if representation != "quasidiagonal":  # an arrow need not be positive
        assert float(torch.linalg.eigvalsh(D).min()) > -1e-10 * float(D.norm())


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_solve_and_inverse(metric, name, representation):
    F, D = metric(name, representation)
    V, lam = vectors(len(D)), 0.1
    expected = torch.linalg.solve(D + lam * torch.eye(len(D), dtype=D.dtype), V)
    assert relative(F.solve(V, damping=lam), expected) < 1e-8
    assert relative(F.solve(V[:, 0], damping=lam), expected[:, 0]) < 1e-8
    back = F.solve(F.space.unflatten(V[:, 1]), damping=lam)
    assert relative(F.space.flatten(back), expected[:, 1]) < 1e-8
    inverse = F.inverse(lam)
    assert relative(inverse @ V, expected) < 1e-8
    assert relative(inverse.solve(V), D @ V + lam * V) < 1e-8
    if representation != "implicit":  # p solves
        assert relative(inverse.to_dense(), torch.linalg.inv(D + lam * torch.eye(len(D), dtype=D.dtype))) < 1e-8


@pytest.mark.parametrize("representation", EIGEN)
def test_spectrum_powers_and_projections(metric, representation):
    F, D = metric("mlp", representation)
    V = vectors(len(D))
    values = torch.linalg.eigvalsh(D).flip(0)
    assert float((F.eigenvalues() - values).abs().max()) < 1e-10 * float(values[0])
    pairs = F.eigh(4)
    assert relative(D @ pairs.vectors, pairs.vectors * pairs.values) < 1e-8
    assert relative(pairs.vectors.T @ pairs.vectors, torch.eye(4, dtype=D.dtype)) < 1e-10
    assert relative(F.from_eigenbasis(F.to_eigenbasis(V)), V) < 1e-10
    assert relative(F.power(2) @ V, D @ (D @ V)) < 1e-9
    root = F.power(0.5)
    assert relative(root @ (root @ V), D @ V) < 1e-7
    pinv = torch.linalg.pinv(D, rtol=1e-9, hermitian=True)
    if representation != "diagonal":
        assert relative(F.power(-1, cutoff=1e-9) @ V, pinv @ V) < 1e-5


def test_lowrank_spectrum_by_duality(metric):
    F, D = metric("mlp", "lowrank")
    pairs = F.eigh()
    assert relative(D @ pairs.vectors, pairs.vectors * pairs.values) < 1e-8
    rank = int(torch.linalg.matrix_rank(D))
    assert len(pairs.values) == rank <= min(12, len(D))
    V = vectors(len(D))
    assert relative(F.power(2) @ V, D @ (D @ V)) < 1e-9
    gradient = D @ V  # in the span of the rows
    keep = F.solve(gradient, damping=0.1)
    drop = F.solve(gradient, damping=0.1, complement="drop")
    assert relative(keep, drop) < 1e-9
    outside = F.solve(V, damping=0.1, complement="drop")
    assert relative(outside, F.solve(V, damping=0.1)) > 0.1
    assert relative(F @ F.solve(gradient, complement="drop"), gradient) < 1e-8


def test_implicit_spectrum_by_lanczos(metric):
    F, D = metric("conv2d", "implicit")
    values = torch.linalg.eigvalsh(D).flip(0)[:3]
    assert relative(F.eigh(3).values, values) < 1e-8
    with pytest.raises(UnsupportedError, match=r"eigh\(\) of the whole spectrum"):
        F.eigh()
    E = bs.fisher(*case("conv2d"), "ekfac")
    v = vectors(len(D))[:, 0]
    expected = torch.linalg.solve(D + 1e-2 * torch.eye(len(D), dtype=D.dtype), v)
    assert relative(F.solve(v, damping=1e-2, preconditioner=E), expected) < 1e-8
    assert relative(F.solve(v, damping=1e-2, preconditioner=F.jacobi(1e-2)), expected) < 1e-8


def test_small_eigenvalues_of_a_product_are_found_or_named():
    """A linear model has F = X^T X / n, whose spectrum is chosen: float64 finds it, float32 says where it ends."""
    gen = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(200, 200, generator=gen, dtype=torch.float64)).Q for _ in range(2))
    truth = torch.logspace(0, -20, 200, dtype=torch.float64)
    X, net = (U * (200 * truth).sqrt()) @ V.T, torch.nn.Linear(200, 1, bias=False).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = bs.fisher(net, X, "implicit", likelihood="gaussian", precision="float64").eigh(49)
    assert pairs.converged.all()
    assert relative(pairs.values / truth[:49], torch.ones(49, dtype=torch.float64)) < 1e-6
    single = bs.fisher(net.float(), X.float(), "implicit", likelihood="gaussian")
    with pytest.warns(UserWarning, match=r"only the first \d+ of 90 eigenpairs are resolved.*precision='float64'"):
        pairs = single.eigh(90)
    error = (pairs.values.double() / truth[:90] - 1).abs()
    assert float(error.max()) > 1e-2
    assert float(error[pairs.converged].max()) < 1e-3


def test_estimates_carry_standard_errors(metric):
    F, D = metric("conv2d", "implicit")
    trace = F.estimate_trace(samples=40, seed=3)
    assert abs(float(trace) - float(D.trace())) < 4 * float(trace.standard_error)
    norm = F.estimate_frobenius_norm(samples=40, seed=3)
    assert abs(float(norm) - float(D.norm())) < 4 * float(norm.standard_error)
    diagonal = F.estimate_diagonal(samples=40, seed=3)
    z = (diagonal.value - D.diagonal()) / diagonal.standard_error
    assert float(z.square().mean()) < 3


@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
def test_factored_damping(metric, representation):
    F, _ = metric("mlp", representation)
    V, lam = vectors(F.shape[0]), 0.3
    out = F.solve(V, damping=lam, mode="factored")
    for piece in F.pieces:
        X = F.space.take(piece.names, V)
        if representation == "kfac":
            A, B = piece.A[0], piece.B[0]
            pi = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
            A = A + pi * lam**0.5 * torch.eye(len(A), dtype=A.dtype)
            B = B + lam**0.5 / pi * torch.eye(len(B), dtype=B.dtype)
            dense = torch.kron(B, A)
        else:
            Q = torch.kron(piece.U_B[0], piece.U_A[0])
            root = lam**0.5
            damping = torch.outer(piece.s_B[0] + root, piece.s_A[0] + root) - torch.outer(piece.s_B[0], piece.s_A[0])
            dense = Q @ torch.diag((piece.s[0, 0] + damping).flatten()) @ Q.T
        # homogeneous order [W | b] row by row, against the flat order [W, b]
        o, i = piece.layout.d_out, piece.layout.d_in
        order = torch.cat([torch.arange(o * i).reshape(o, i), o * i + torch.arange(o)[:, None]], 1).flatten()
        expected = torch.empty_like(X)
        expected[order] = torch.linalg.solve(dense, X[order])
        assert relative(F.space.take(piece.names, out), expected) < 1e-9
    inverse = F.inverse(lam, mode="factored")
    assert relative(inverse @ V, out) < 1e-9


@pytest.mark.parametrize("representation", ["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank"])
@pytest.mark.parametrize("mode", ["exact", "factored"])
def test_samples_have_the_inverse_as_covariance(metric, representation, mode):
    F, D = metric("mlp", representation)
    if mode == "factored" and representation not in {"kfac", "ekfac"}:
        with pytest.raises(UnsupportedError, match="kfac and ekfac have it"):
            F.sample(2, 0.5, mode=mode)
        return
    n, lam = 40_000, 2.0 if representation == "quasidiagonal" else 0.5
    draws = F.sample(n, damping=lam, generator=torch.Generator().manual_seed(0), mode=mode)
    covariance = F.inverse(lam, mode=mode).to_dense()
    assert draws.shape == (n, len(D))
    error = (draws.T @ draws / n - covariance) * (n / (covariance.diagonal()[:, None] * covariance.diagonal())) ** 0.5
    assert 0.3 < float(error.square().mean()) < 2.0  # every entry off by about one standard error


@pytest.mark.parametrize("representation", ["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank"])
def test_sums_multiples_and_products(metric, representation):
    F, D = metric("mlp", representation)
    net, x = case("mlp")
    G = bs.fisher(net, x.flip(1), representation)
    V, E = vectors(len(D)), G.to_dense()
    assert relative((3.0 * F) @ V, 3 * D @ V) < 1e-10
    assert relative((F / 2.0).to_dense(), D / 2) < 1e-10
    assert relative((-1.0 * F) @ V, -D @ V) < 1e-10
    total = F + G
    assert relative(total @ V, (D + E) @ V) < 1e-10
    assert relative((F - G) @ V, (D - E) @ V) < 1e-10
    assert isinstance(total, BlockMetric) == (representation not in {"kfac", "ekfac"})
    product = F @ G
    assert relative(product @ V, D @ (E @ V)) < 1e-10
    assert isinstance(product, BlockMetric) == (representation in {"dense", "diagonal", "block", "kfac"})
    if representation == "kfac":
        assert relative(product.trace(), (D @ E).trace()) < 1e-9
        with pytest.raises(UnsupportedError, match="not symmetric"):
            product.solve(V, damping=1.0)


@pytest.mark.parametrize("representation", EIGEN)
def test_negative_multiples_have_negative_spectra(metric, representation):
    F, D = metric("mlp", representation)
    values = torch.linalg.eigvalsh(-D)
    minus = -1.0 * F
    assert float((minus.eigenvalues() - values.flip(0)).abs().max()) < 1e-10 * float(values.abs().max())
    assert relative(minus.spectral_norm(), values.abs().max()) < 1e-10
    v, shift = vectors(len(D))[:, 0], 2 * float(values.abs().max())
    expected = torch.linalg.solve(shift * torch.eye(len(D), dtype=D.dtype) - D, v)
    assert relative(minus.solve(v, damping=shift), expected) < 1e-9


@pytest.mark.parametrize("representation", ["kfac", "ekfac"])
def test_factored_damping_scales_with_the_metric(metric, representation):
    F, _ = metric("mlp", representation)
    v = vectors(F.shape[0])[:, 0]
    four = (4.0 * F).solve(v, damping=0.4, mode="factored")
    assert relative(four, F.solve(v, damping=0.1, mode="factored") / 4) < 1e-10


def test_a_multiple_of_a_product_is_not_symmetric(metric):
    F, _ = metric("mlp", "kfac")
    G = bs.fisher(*(lambda net, x: (net, x.flip(1)))(*case("mlp")), "kfac")
    with pytest.raises(UnsupportedError, match="not symmetric"):
        (0.5 * (F @ G)).eigh()


def test_what_no_representation_holds_is_still_a_metric(metric):
    F, D = metric("mlp", "kfac")
    G, E = metric("mlp", "implicit")
    V, eye = vectors(len(D)), torch.eye(len(D), dtype=D.dtype)
    total = F + 0.5 * G
    S = D + 0.5 * E
    assert relative(total.solve(V, damping=0.1), torch.linalg.solve(S + 0.1 * eye, V)) < 1e-8
    assert relative(total.quadratic_form(V), (V * (S @ V)).sum(0)) < 1e-10
    assert relative(total.trace(), S.trace()) < 1e-10
    assert relative(total.eigh(2).values, torch.linalg.eigvalsh(S).flip(0)[:2]) < 1e-8
    assert relative(total.space.flatten(total @ total.space.unflatten(V[:, 0])), S @ V[:, 0]) < 1e-10
    damped = G + 0.1 * bs.linalg.elementary.Identity(len(D), D.dtype)
    assert relative(damped.solve(V), torch.linalg.solve(E + 0.1 * eye, V)) < 1e-8
    with pytest.raises(UnsupportedError, match="representation='dense'"):
        total.sample(1, 0.1)
    with pytest.raises(UnsupportedError, match="not symmetric"):
        (F @ G).solve(V, damping=1.0)


def test_ekfac_adds_in_one_basis(metric):
    F, D = metric("mlp", "ekfac")
    assert relative((F + 2.0 * F).to_dense(), 3 * D) < 1e-10
    assert relative((F @ F).to_dense(), D @ D) < 1e-10


def test_factored_damping_of_sums_and_products_in_one_basis(metric):
    F, _ = metric("mlp", "ekfac")
    v = vectors(F.shape[0])[:, 0]

    def solved(G):
        return G.solve(v, damping=0.3, mode="factored")

    assert relative(solved(F + F), solved(2.0 * F)) < 1e-10
    assert relative(solved(0.5 * F + 3.0 * F), solved(3.5 * F)) < 1e-10
    assert relative(solved(0.0 * F + F), solved(F)) < 1e-10
    square = F @ F
    for piece, product in zip(F.pieces, square.pieces, strict=True):  # (B (x) A)^2 = B^2 (x) A^2
        b, a, root = piece.s_B[0] ** 2, piece.s_A[0] ** 2, 0.3**0.5
        expected = piece.s[0, 0] ** 2 + torch.outer(b + root, a + root) - torch.outer(b, a)
        assert relative(product.damped(0.3, "factored"), expected.flatten()) < 1e-12


def test_factored_damping_without_factors_is_refused(metric, tmp_path):
    F, D = metric("mlp", "ekfac")
    v = vectors(len(D))[:, 0]
    without = {
        "F + F^2": F + F @ F,
        "2 F - F": 2.0 * F - F,
        "-F": -1.0 * F,
        "root": F.power(0.5),
        "inverse": F.inverse(0.1),
        "multiple of a root": 2.0 * F.power(0.5),
    }
    for G in without.values():
        with pytest.raises(UnsupportedError, match=r"0\.weight.*no Kronecker factors.*mode='exact'"):
            G.solve(v, damping=0.3, mode="factored")
    eye = torch.eye(len(D), dtype=D.dtype)
    for G, E in ((without["F + F^2"], D + D @ D), (without["2 F - F"], D)):
        assert relative(G.solve(v, damping=0.3), torch.linalg.solve(E + 0.3 * eye, v)) < 1e-9
    loaded = bs.load_curvature(F.power(0.5).save(tmp_path / "root.safetensors"))
    with pytest.raises(UnsupportedError, match="no Kronecker factors"):
        loaded.solve(v, damping=0.3, mode="factored")


def test_row_major_order():
    """(B (x) A) vec_row(V) = vec_row(B V A): a weight gradient in torch's own order."""
    net, x = case("mlp")
    K = bs.fisher(net, x, "kfac")
    piece = K.pieces[0]
    v = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    v["0.weight"] = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v["0.bias"] = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = K @ v
    H = piece.B[0] @ torch.cat([v["0.weight"], v["0.bias"][:, None]], 1) @ piece.A[0]
    assert relative(out["0.weight"], H[:, :-1]) < 1e-12
    assert relative(out["0.bias"], H[:, -1]) < 1e-12


@pytest.mark.parametrize("representation", ["dense", "diagonal", "block", "kfac", "ekfac", "lowrank", "quasidiagonal"])
def test_singular_solves_are_refused(metric, representation):
    F, D = metric("words", representation)  # the padding word has no gradient: zero rows
    v = vectors(len(D))[:, 0]
    with pytest.raises(InputError, match="singular"):
        F.solve(v)
    with pytest.raises(InputError, match=r"damping=.*a finite number from 0 on"):
        F.solve(v, damping=-1.0)
    with pytest.raises(InputError, match=r"damping=.*a finite number from 0 on"):
        F.sample(2, damping=float("nan"))


def test_what_is_impossible_says_who_can(metric):
    F, D = metric("conv2d", "implicit")
    for call in (lambda: F.power(2), lambda: F.sample(1, 0.1), lambda: F.save("x")):
        with pytest.raises(UnsupportedError, match="representation='dense'"):
            call()
    with pytest.raises(UnsupportedError, match="kfac and ekfac have it"):
        F.solve(D[0], damping=1.0, mode="factored")
    Q, R = metric("mlp", "quasidiagonal")
    with pytest.raises(UnsupportedError, match="representation='block' or 'dense'"):
        Q.eigh(2)
    with pytest.raises(UnsupportedError, match="cannot be damped again"):
        Q.inverse(1.0).solve(R[0], damping=1.0)
    B, D = metric("mlp", "block")
    with pytest.raises(UnsupportedError, match="lowrank"):
        B.solve(D[0], damping=1.0, complement="drop")
    with pytest.raises(UnsupportedError, match="kfac and ekfac have it"):
        B.solve(D[0], damping=1.0, mode="factored")


def test_vectors_are_checked(metric):
    F, D = metric("mlp", "ekfac")
    for bad, message in [
        (D[0, :-1], "v must be a dict, flat"),
        (D[0].float(), "torch.float64 on cpu, got .* torch.float32 on cpu"),
        ({"0.weight": torch.zeros(2, 2)}, r"'0.weight' \(2, 2\) on cpu does not fit"),
        ({"nobody": torch.zeros(1)}, "'nobody' .* no such parameter"),
    ]:
        with pytest.raises(InputError, match=message):
            F @ bad
    meta = {"0.bias": torch.zeros(5, device="meta")}
    with pytest.raises(InputError, match="on meta does not fit the metric"):
        F @ meta
