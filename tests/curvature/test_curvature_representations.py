"""Every representation on every network against the brute-force Fisher matrix."""

import pytest
import torch

import biascope as bs
from curvature.curvature_zoo import CASES, brute_fisher, case, relative

EXACT = ["dense", "lowrank", "implicit"]


def options(name):
    return {"class_dim": -1} if name == "tied" else {}


@pytest.fixture(scope="module")
def truth():
    """{case: (net, x, F)}, computed once."""
    cache = {}

    def get(name):
        if name not in cache:
            net, x = case(name)
            cache[name] = (net, x, brute_fisher(net, x, classes_last=name == "tied"))
        return cache[name]

    return get


@pytest.mark.parametrize("representation", EXACT)
@pytest.mark.parametrize("name", CASES)
def test_exact_forms_equal_brute_force(truth, name, representation):
    net, x, F = truth(name)
    G = bs.fisher(net, x, representation, **options(name))
    V = torch.randn(len(F), 4, generator=torch.Generator().manual_seed(0), dtype=F.dtype)
    assert relative(G @ V, F @ V) < 1e-10
    assert abs(float(G.trace() - F.trace())) < 1e-10 * float(F.trace())
    assert relative(G.diagonal(), F.diagonal()) < 1e-10
    assert abs(float(G.frobenius_norm() - F.norm())) < 1e-10 * float(F.norm())


@pytest.mark.parametrize("name", CASES)
def test_diagonal_is_the_diagonal(truth, name):
    net, x, F = truth(name)
    D = bs.fisher(net, x, "diagonal", **options(name))
    assert relative(D.to_dense(), torch.diag(F.diagonal())) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_eye_is_the_nearest_multiple_of_the_identity(truth, name):
    net, x, F = truth(name)
    E = bs.fisher(net, x, "eye", **options(name))
    nearest = (F * torch.eye(len(F), dtype=F.dtype)).sum() / len(F) * torch.eye(len(F), dtype=F.dtype)
    assert relative(E.to_dense(), nearest) < 1e-10
    assert {E.plan[name] for name in E.space.shapes} == {"eye"}
    v = torch.arange(1, len(F) + 1, dtype=F.dtype)
    assert relative(E.power(-0.5) @ (E.power(-0.5) @ (E @ v)), v) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_block_is_block_diagonal_of_the_truth(truth, name):
    net, x, F = truth(name)
    B = bs.fisher(net, x, "block", **options(name))
    mask = layer_mask(B)
    assert relative(B.to_dense(), F * mask) < 1e-10
    assert float((B.trace() - F.trace()).abs()) < 1e-10 * float(F.trace())


@pytest.mark.parametrize("name", CASES)
def test_quasidiagonal_equals_truth_on_its_pattern(truth, name):
    net, x, F = truth(name)
    Q = bs.fisher(net, x, "quasidiagonal", **options(name)).to_dense()
    pattern = Q != 0
    assert relative(Q, F * pattern) < 1e-10
    assert relative(Q.diagonal(), F.diagonal()) < 1e-10
    arrows = {"mlp": True, "conv2d": True, "input_major": True, "norms": True}
    if arrows.get(name):
        assert int(pattern.sum()) > len(F), "biases must be coupled with their weights"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sua", [False, True])
def test_ekfac_scalings_are_the_diagonal_of_the_truth_in_its_basis(truth, name, sua):
    """s* = diag(Q^T F Q) for the orthonormal Q, so trace exact and ||F - E||^2 = ||F||^2 - ||s||^2 per layer."""
    net, x, F = truth(name)
    E = bs.fisher(net, x, "ekfac", sua=sua, **options(name))
    K = bs.fisher(net, x, "kfac", sua=sua, **options(name))
    p = len(F)
    Q = E.from_eigenbasis(torch.eye(p, dtype=F.dtype))
    assert relative(Q.T @ Q, torch.eye(p, dtype=F.dtype)) < 1e-10
    s = torch.cat([piece.eigenvalues() for piece in E.pieces])
    assert relative(s, (Q.T @ F @ Q).diagonal()) < 1e-10
    assert abs(float(E.trace() - F.trace())) < 1e-10 * float(F.trace())
    for piece, other in zip(E.pieces, K.pieces):
        index = E.space.take(piece.names, torch.arange(p))
        block = F[index[:, None], index]
        error = float((block - piece.to_dense()).norm() ** 2)
        expected = float(block.norm() ** 2 - piece.eigenvalues().norm() ** 2)
        assert abs(error - expected) < 1e-10 * float(block.norm() ** 2)
        assert error <= float((block - other.to_dense()).norm() ** 2) * (1 + 1e-10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("representation", ["kfac", "ekfac", "mixed", "quasidiagonal", "block", "diagonal"])
def test_no_parameter_is_left_out(truth, name, representation):
    net, x, F = truth(name)
    G = bs.fisher(net, x, representation, **options(name))
    assert sorted(n for piece in G.pieces for n in piece.names) == sorted(k for k, _ in net.named_parameters())
    assert [row[0] for row in G.plan.rows] == [k for k, _ in net.named_parameters()]
    used = F.diagonal() > 0
    assert bool((G.diagonal()[used] > 0).all())


def test_a_random_diagonal_never_beats_ekfac(truth):
    net, x, F = truth("mlp")
    E = bs.fisher(net, x, "ekfac")
    Q = E.from_eigenbasis(torch.eye(len(F), dtype=F.dtype))
    s = torch.cat([piece.eigenvalues() for piece in E.pieces])
    best = float((F - Q @ torch.diag(s) @ Q.T).norm())
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        other = s + 0.1 * s.mean() * torch.randn(len(s), generator=generator, dtype=s.dtype)
        assert float((F - Q @ torch.diag(other) @ Q.T).norm()) > best


def test_eigenbasis_of_the_truth_makes_the_diagonal_exact(truth):
    """Theorem 3: with U the eigenbasis of F, diag(U^T F U) gives F back; the dense form is that."""
    net, x, F = truth("mlp")
    D = bs.fisher(net, x, "dense")
    pairs = D.eigh()
    assert relative(pairs.vectors @ torch.diag(pairs.values) @ pairs.vectors.T, F) < 1e-10


def test_mixed_takes_a_map(truth):
    net, x, F = truth("norms")
    G = bs.fisher(net, x, {"conv": "kfac", "5": "quasidiagonal", "6.*": "block", "affine": "diagonal"})
    assert (G.plan["0.weight"], G.plan["1.weight"], G.plan["5.weight"], G.plan["6.bias"]) == (
        "kfac",
        "diagonal",
        "quasidiagonal",
        "dense",
    )
    index = G.space.take(("6.weight", "6.bias"), torch.arange(len(F)))
    assert relative(G.to_dense()[index[:, None], index], F[index[:, None], index]) < 1e-10
    assert "kfac" in str(G.plan)
    with pytest.raises(bs_error(), match="no layer, parameter or rule matches 'nonsense'"):
        bs.fisher(net, x, {"nonsense": "kfac"})
    with pytest.raises(bs_error(), match="not a layer's representation"):
        bs.fisher(net, x, {"conv": "dense"})


@pytest.mark.parametrize("name", ["conv2d", "tokens", "words", "bare"])
@pytest.mark.parametrize(
    "representation", ["dense", "diagonal", "quasidiagonal", "kfac", "ekfac", "lowrank", "implicit"]
)
def test_batches_and_chunks_do_not_matter(truth, name, representation):
    net, x, _ = truth(name)
    whole = bs.fisher(net, x, representation)
    parts = bs.fisher(net, [x[:2], x[2:3], (x[3:], None)], representation, batch_size=1)
    assert parts.info["n"] == len(x)
    V = torch.randn(whole.shape[0], 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative(parts @ V, whole @ V) < 1e-10


def test_a_tiny_budget_splits_cotangents_and_is_still_right(truth):
    net, x, F = truth("conv2d")
    E = bs.fisher(net, x, "ekfac", max_memory="300KB")
    assert relative(E.to_dense(), bs.fisher(net, x, "ekfac").to_dense()) < 1e-10
    D = bs.fisher(net, x, "lowrank", max_memory="4KB")
    assert relative(D.to_dense(), F) < 1e-10


def test_float32_is_close(truth):
    net, x, F = truth("conv2d")
    single = bs.fisher(net.float(), x.float(), "ekfac")
    net.double()
    assert single.dtype == torch.float32
    assert abs(float(single.trace()) - float(F.trace())) < 1e-5 * float(F.trace())


def layer_mask(metric):
    mask = torch.zeros(metric.shape, dtype=torch.float64)
    for piece in metric.pieces:
        index = metric.space.take(piece.names, torch.arange(metric.shape[0]))
        mask[index[:, None], index] = 1.0
    layers = {n.rpartition(".")[0] or n for n in metric.space.shapes}
    assert len(metric.pieces) <= len(layers)  # a weight and bias without a module form one layer
    return mask


def bs_error():
    from biascope.support.errors import BiascopeError

    return BiascopeError
