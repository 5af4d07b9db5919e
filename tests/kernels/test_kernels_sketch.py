"""Sketched kernels: unbiased over seeds, error bars that cover, variance as stated, cross kernels consistent."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import sketch as module
from biascope.support.errors import InputError

F64 = torch.float64
KINDS = [("rademacher", True), ("rademacher", False), ("gaussian", True), ("gaussian", False), ("sparse", False)]


class Zoo(nn.Module):
    """Convolutions (grouped too), a norm, an embedding used with a padding index, a bare parameter."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4, padding_idx=0)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        h = torch.tanh(self.conv(self.emb(tokens).mT)).mT
        return self.head(self.norm(h * self.scale)).mean(1)


def seeded(net, seed=0):
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) / p.shape[-1] ** 0.5)
    return net.double()


def mlp():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    return seeded(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))), x


def zoo():
    return seeded(Zoo()), torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("kind", "factored"), KINDS)
@pytest.mark.parametrize("model", [mlp, zoo])
def test_unbiased_over_seeds_and_error_bars_cover(model, kind, factored):
    net, x = model()
    truth = bs.ntk(net, x).tensor
    sketches = [bs.sketched_ntk(net, x, dim=160, kind=kind, seed=s, factored=factored) for s in range(60)]
    K = torch.stack([s.kernel().tensor for s in sketches])
    errors = torch.stack([s.standard_error() for s in sketches])
    z = (K.mean(0) - truth) / (K.std(0) / 60**0.5)
    assert float(z.abs().max()) < 5  # at most 64 different entries
    # nominal 95 %; entries of one sketch are dependent, so only the mean coverage is bounded
    covered = float(((K - truth).abs() <= 2 * errors).double().mean())
    assert 0.90 < covered < 0.99
    ratio = errors.square().mean(0).sqrt() / K.std(0)
    assert 0.75 < float(ratio.median()) < 1.33


@pytest.mark.parametrize("factored", [True, False])
def test_stated_variance_of_one_layer(factored):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 5, generator=gen, dtype=F64)  # M = sum over 6 positions
    net = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Flatten(), nn.Linear(24, 1, bias=False)).double()
    M = bs.Jacobian(net, x, params="0").to_dense().view(4, 5)
    single = bs.sketched_ntk(net, x, dim=200_000, kind="gaussian", params="0", factored=factored)
    told = float(single.standard_error().flatten()) ** 2 * 200_000
    plain = 2 * float(M.square().sum()) ** 2
    extra = 6 * float((M.T @ M).square().sum()) if factored else 0.0
    assert told == pytest.approx(plain + extra, rel=0.1)


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", "sum", 1])
def test_all_choices_of_outputs(outputs):
    net, x = mlp()
    sketch = bs.sketched_ntk(net, x, dim=20_000, outputs=outputs)
    K, truth, se = sketch.kernel(), bs.ntk(net, x, outputs=outputs), sketch.standard_error()
    assert K.tensor.shape == truth.tensor.shape == se.shape
    assert float(((K.tensor - truth.tensor).abs() / se).max()) < 5
    relative = float((K.tensor - truth.tensor).norm() / truth.tensor.norm())
    assert 0.3 < relative / K.error < 2.5


@pytest.mark.parametrize(("kind", "factored"), KINDS)
def test_same_seed_gives_consistent_cross_kernels_whatever_the_batches(kind, factored):
    net, x = zoo()
    options = {"dim": 50, "kind": kind, "seed": 3, "factored": factored}
    whole = bs.sketched_ntk(net, x, **options)
    one, two = bs.sketched_ntk(net, x[:1], **options), bs.sketched_ntk(net, [x[1:2], x[2:]], **options)
    torch.testing.assert_close(torch.cat([one.features, two.features]), whole.features, rtol=1e-10, atol=1e-12)
    small = bs.sketched_ntk(net, x, **options, batch_size=1)
    torch.testing.assert_close(small.features, whole.features, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.kernel(two).tensor, whole.kernel().tensor[:1, :, 1:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one.standard_error(two), whole.standard_error()[:1, :, 1:], rtol=1e-7, atol=1e-9)


def test_scratch_size_changes_nothing(monkeypatch):
    net, x = zoo()
    whole = {k: bs.sketched_ntk(net, x, dim=30, kind=k, factored=f).features for k, f in KINDS if f or k == "sparse"}
    monkeypatch.setattr(module, "WORK", 30 * 8 * 16)  # one example at a time
    for kind, features in whole.items():
        torch.testing.assert_close(bs.sketched_ntk(net, x, dim=30, kind=kind).features, features)


def test_another_seed_gives_other_features_and_the_same_seed_the_same():
    net, x = mlp()
    state = torch.get_rng_state()
    a, b, c = (bs.sketched_ntk(net, x, dim=8, seed=s).features for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    assert torch.equal(state, torch.get_rng_state())


def test_reshaped_positions_form_the_gradient_first():
    """More positions than channels: M is formed, with the same numbers as position by position."""
    net = seeded(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 1)))
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    got = bs.sketched_ntk(net, x, dim=20_000, params="0").kernel()
    truth = bs.ntk(net, x, params="0")
    assert float((got.matrix() - truth.matrix()).norm() / truth.matrix().norm()) < 3 * got.error
    assert got.error < 0.05


def test_bad_input_is_named():
    net, x = mlp()
    with pytest.raises(InputError, match="did you mean rademacher"):
        bs.sketched_ntk(net, x, kind="hadamard")
    with pytest.raises(InputError, match="at least 2"):
        bs.sketched_ntk(net, x, dim=1)
    a, b = bs.sketched_ntk(net, x, dim=8, seed=0), bs.sketched_ntk(net, x, dim=8, seed=1)
    with pytest.raises(InputError, match="differ in seed"):
        a.kernel(b)
    with pytest.raises(InputError, match="differ in parameters"):
        a.kernel(bs.sketched_ntk(net, x, dim=8, params="0"))
