"""label_alignment against the dense kernel in float64; the sketch's error bars against the binomial law."""

import math
import weakref

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import pullback
from biascope.support.errors import InputError

F64 = torch.float64


def make(n=30, c=3, seed=0):
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, c)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=F64) / p.shape[-1] ** 0.5)
    return net, torch.randn(n, 5, generator=gen, dtype=F64), torch.randint(0, c, (n,), generator=gen)


def check(result, K, y, centered):
    if centered:
        K = K.centered("per-output" if centered is True else centered)
    Y = nn.functional.one_hot(y, 3).double()
    Y = {True: Y - Y.mean(0), "per-output": Y - Y.mean(0), "global": Y - Y.mean(), False: Y}[centered]
    v = Y.flatten()
    top = float(v @ K.matrix() @ v)
    assert result.numerator == pytest.approx(top, rel=1e-10)
    assert result.alpha == pytest.approx(top / len(y) ** 2, rel=1e-10)
    assert result.alpha_normalized == pytest.approx(top / float(v @ v), rel=1e-10)
    assert result.target_norm_squared == pytest.approx(float(v @ v), rel=1e-12)
    assert abs(result.frobenius - K.frobenius_norm()) <= 3 * result.frobenius_standard_error


@pytest.mark.parametrize("centered", [True, "global", False])
def test_numerator_is_exact_and_the_ratio_within_three_errors(centered):
    net, x, y = make()
    K = bs.ntk(net, x, by_layer=True)
    result = bs.label_alignment(net, x, y, centered, sketch=60, seed=3, by_layer=True)
    check(result, K, y, centered)
    assert abs(float(result) - K.alignment(y, centered)) <= 3 * result.standard_error
    assert 0 < result.standard_error < 0.3 * result.value
    assert sum(r.numerator for r in result.layers.values()) == pytest.approx(result.numerator, rel=1e-12)
    for name, layer in K.by_layer().items():
        check(result.layers[name], layer, y, centered)


def test_enough_probes_make_it_exact():
    net, x, y = make(n=10)
    result = bs.label_alignment(net, x, y, sketch=30)
    K = bs.ntk(net, x)
    assert result.value == pytest.approx(K.alignment(y), rel=1e-12)
    assert result.frobenius == pytest.approx(K.centered().frobenius_norm(), rel=1e-12)
    assert result.standard_error == 0
    assert result.sketch == 30


@pytest.mark.slow
def test_error_bars_cover_the_truth_and_the_square_is_unbiased():
    net, x, y = make(n=25)
    truth = bs.ntk(net, x).centered().frobenius_norm()
    runs = [bs.label_alignment(net, x, y, sketch=24, seed=s) for s in range(120)]
    squares = torch.tensor([r.frobenius**2 for r in runs], dtype=F64)
    z = float((squares.mean() - truth**2) / (squares.std() / len(runs) ** 0.5))
    assert abs(z) < 4
    covered = sum(abs(r.frobenius - truth) <= 2 * r.frobenius_standard_error for r in runs)
    # 95 % nominal: below 0.86 has probability < 1e-4 for a correct 95 % interval; jackknife with 24 probes is near it
    assert covered >= 0.86 * len(runs)
    assert covered < len(runs)
    spread = float(torch.tensor([r.value for r in runs]).std())
    told = sum(r.standard_error for r in runs) / len(runs)
    assert 0.7 < told / spread < 1.4


def test_groups_of_probes_give_the_same_numerator_and_honest_errors(monkeypatch):
    net, x, y = make()
    whole = bs.label_alignment(net, x, y, sketch=20)
    monkeypatch.setattr(pullback, "HELD", 8 * 60 * 5)  # room for few pulled-back vectors: several passes
    parts = bs.label_alignment(net, x, y, sketch=20)
    assert parts.numerator == pytest.approx(whole.numerator, rel=1e-12)
    truth = bs.ntk(net, x).centered().frobenius_norm()
    assert abs(parts.frobenius - truth) <= 4 * parts.frobenius_standard_error


class Generated:
    """Batches made on the fly, again and again the same."""

    def __init__(self, count, size, labelled=True):
        self.count, self.size, self.labelled, self.passes = count, size, labelled, 0

    def __iter__(self):
        self.passes += 1
        for i in range(self.count):
            gen = torch.Generator().manual_seed(i)
            x = torch.randn(self.size, 5, generator=gen, dtype=F64)
            y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
            yield (x, y) if self.labelled else x


def test_streaming_over_a_loader_made_on_the_fly():
    net, *_ = make()
    loader = Generated(5, 11)
    x, y = (torch.cat(parts) for parts in zip(*loader))
    loader.passes = 0
    result = bs.label_alignment(net, loader, sketch=40, seed=1)
    assert loader.passes == 2  # labels, then one pass of vector-Jacobian products
    check(result, bs.ntk(net, x), y, True)
    given = bs.label_alignment(net, Generated(5, 11, labelled=False), y, sketch=40, seed=1)
    assert given.value == pytest.approx(result.value, rel=1e-12)
    split = bs.label_alignment(net, x, y, sketch=40, batch_size=11, seed=1)
    assert split.value == pytest.approx(result.value, rel=1e-12)


def test_a_long_stream_keeps_at_most_two_batches():
    net, *_ = make()
    alive: list[weakref.ref] = []
    most = 0

    class Watched(Generated):
        def __iter__(self):
            nonlocal most
            for x, y in super().__iter__():
                alive.append(weakref.ref(x))
                most = max(most, sum(r() is not None for r in alive[-10:]))
                yield x, y

    result = bs.label_alignment(net, Watched(60, 500), sketch=4)
    assert result.samples == 30_000
    assert most <= 2  # the batch at work and the one being made
    assert math.isfinite(result.value)


def test_shuffling_loaders_work_with_their_own_labels_only():
    net, x, y = make()
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))
    result = bs.label_alignment(net, loader, sketch=30)
    check(result, bs.ntk(net, x), y, True)
    with pytest.raises(InputError, match="shuffles"):
        bs.label_alignment(net, loader, y)
    fixed = torch.utils.data.DataLoader(data, batch_size=7)
    with pytest.raises(InputError, match="differs from the labels that x itself gives"):
        bs.label_alignment(net, fixed, y.flip(0))


def test_single_output_signs():
    net, x, _ = make(c=1)
    y = torch.where(x[:, 0] > 0, 1, -1)
    K = bs.ntk(net, x, outputs=0)
    result = bs.label_alignment(net, x, y, sketch=30)
    assert result.value == pytest.approx(K.alignment(y), rel=1e-10)


def test_global_random_state_and_model_are_untouched():
    net, x, y = make()
    state, before = torch.get_rng_state(), [p.clone() for p in net.parameters()]
    bs.label_alignment(net, x, y, sketch=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, net.parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y[:5]), "y has 5 labels"),
        (lambda x, y: (x, torch.cat([y, y])), "60 labels for 30 examples"),
        (lambda x, y: (x, y + 1), "classes 1 to 3, but the model has outputs 0 to 2"),
        (lambda x, y: (x, torch.full((30, 3), float("nan"))), "y has a NaN or infinity"),
        (lambda x, y: (x, torch.zeros(30, dtype=torch.long)), "all labels are equal"),
        (lambda x, y: (x, None), "no labels"),
        (lambda x, y: (iter([x]), y), "one-shot iterator"),
        (lambda x, y: (x, torch.ones(30, 2)), "2 columns for 3 outputs"),
    ],
)
def test_bad_input_is_named(change, message):
    net, x, y = make()
    a, b = change(x, y)
    with pytest.raises(InputError, match=message):
        bs.label_alignment(net, a, b)


def test_too_few_probes_are_refused():
    net, x, y = make()
    with pytest.raises(InputError, match="at least 3 probes"):
        bs.label_alignment(net, x, y, sketch=2)


def test_the_papers_alpha_is_that_of_labels_as_they_are():
    net, x, y = make()
    y = y.clamp_max(1)  # unbalanced: centring changes much
    J = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(
        {k: p.detach() for k, p in net.named_parameters()}
    )
    Y = nn.functional.one_hot(y, 3).double()
    mean = [torch.einsum("ia,ia...->...", Y, j) / len(y) for j in J.values()]
    truth = float(sum(m.square().sum() for m in mean))
    assert bs.label_alignment(net, x, y, centered=False, sketch=3).alpha == pytest.approx(truth, rel=1e-10)
    centred = [torch.einsum("ia,ia...->...", Y - Y.mean(0), j) / len(y) for j in J.values()]
    by_default = bs.label_alignment(net, x, y, sketch=3).alpha
    assert by_default == pytest.approx(float(sum(m.square().sum() for m in centred)), rel=1e-10)
    assert by_default < 0.5 * truth
