"""Every metric against an independent float64 version: dense Jacobians by jacrev, numpy, finite differences."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.curvature.complexity import PathComplexity
from biascope.probes import View, metric, ntk_alignment, representation_alignment, sign_similarity
from biascope.probes.function_metrics import fourier, group_losses
from biascope.probes.kernel_metrics import (
    effective_rank,
    group_alignment,
    kernel_velocity,
    label_alignment,
    layer_alignment,
    spectrum,
    trace_ratio,
)
from biascope.probes.metrics import REGISTER, as_metrics
from biascope.probes.weight_metrics import (
    complexity,
    input_velocity,
    linearisation_error,
    parameter_distance,
    path_complexity,
    spectral_norm,
)
from biascope.support.errors import InputError, UnsupportedError
from probes.probe_zoo import batch, centre_rows, cosine, jacobian_rows, mlp, moved

NET = mlp(3, 6, 5, 2)
AFTER = moved(NET)
X, Y = batch()
HOT = F.one_hot(Y, 2).double()


def views(x: Tensor = X, y: Tensor | None = Y, **options: object) -> tuple[View, View]:
    start = View.of(NET, x, y, **options)
    return start, View.of(AFTER, x, y, init=start, previous=start, step=10, **options)


def gram(net: nn.Module, centred: bool = False, prefix: str = "") -> Tensor:
    J = jacobian_rows(net, X, prefix)
    J = centre_rows(J, len(X)) if centred else J
    return J @ J.T


# ----------------------------------------------------------------------------------------------------- the kernel


def test_ntk_alignment() -> None:
    start, now = views()
    assert ntk_alignment(now) == pytest.approx(cosine(gram(AFTER), gram(NET)), rel=1e-10)
    assert ntk_alignment(now, centered=True) == pytest.approx(cosine(gram(AFTER, True), gram(NET, True)), rel=1e-10)
    assert ntk_alignment(start) == pytest.approx(1.0, rel=1e-12)
    assert ntk_alignment(now) < 0.99


def test_label_alignment_is_centred_per_output() -> None:
    _, now = views()
    y = (HOT - HOT.mean(0)).reshape(-1)
    K = gram(AFTER, True)
    expected = float(y @ K @ y / (K.norm() * y.square().sum()))
    assert label_alignment(now) == pytest.approx(expected, rel=1e-10)


def test_label_alignment_of_the_identity_kernel() -> None:
    """Spec 04, check 23: CKA(I, y y^T) = 1 / sqrt(c (n - 1)) with per-output centring."""
    n, c = 12, 3
    net = nn.Linear(n, c, bias=False).double()  # on x = I its kernel is the identity
    view = View.of(net, torch.eye(n, dtype=torch.float64), torch.arange(n) % c)
    assert label_alignment(view) == pytest.approx(1 / math.sqrt(c * (n - 1)), rel=1e-10)


def test_layer_alignment() -> None:
    _, now = views(by_layer=True)
    y = (HOT - HOT.mean(0)).reshape(-1)
    found, start = layer_alignment(now), layer_alignment(now, to="init")
    assert set(found) == {"0", "2", "4"}
    for layer in found:
        K = gram(AFTER, True, f"{layer}.")
        assert found[layer] == pytest.approx(float(y @ K @ y / (K.norm() * y.square().sum())), rel=1e-9)
        expected = cosine(gram(AFTER, False, f"{layer}."), gram(NET, False, f"{layer}."))
        assert start[layer] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(InputError, match=r"to=.* is not known; there is init, labels"):
        layer_alignment(now, to="start")


def test_a_layer_without_features_has_no_alignment() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3, 4, 2)
            self.shift = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.shift  # the same features for all examples: zero after centring

    found = layer_alignment(View.of(Shifted(), X, Y, by_layer=True))
    empty = [name for name, value in found.items() if math.isnan(value)]
    assert len(empty) == 1
    assert len(found) == 3


def test_group_alignment_restricts_kernel_and_labels() -> None:
    easy, hard = torch.tensor([0, 1, 3]), torch.tensor([2, 5, 6, 4])
    own = (X[hard], Y[hard])
    _, now = views(groups={"easy": easy, "hard": hard, "own": own})
    found = group_alignment(now)
    for name, i in (("easy", easy), ("hard", hard)):
        J = centre_rows(jacobian_rows(AFTER, X[i]), len(i))
        y = (HOT[i] - HOT[i].mean(0)).reshape(-1)
        assert found[name] == pytest.approx(float((J.T @ y).square().sum() / ((J @ J.T).norm() * y @ y)), rel=1e-9)
    assert found["own"] == pytest.approx(found["hard"], rel=1e-9)


def test_kernel_velocity() -> None:
    start, now = views()
    assert kernel_velocity(start) == {}
    found = kernel_velocity(now)
    assert found["distance"] == pytest.approx(1 - cosine(gram(AFTER), gram(NET)), rel=1e-9)
    assert found["per_step"] == pytest.approx(found["distance"] / 10)


@pytest.mark.parametrize("centred", [True, False])
def test_spectral_statistics(centred: bool) -> None:
    _, now = views()
    values = np.clip(np.linalg.eigvalsh(gram(AFTER, centred).numpy())[::-1], 0, None)
    mu = values[values > 1e-14 * values.max()] / values.sum()
    assert effective_rank(now, centred) == pytest.approx(math.exp(-(mu * np.log(mu)).sum()), rel=1e-9)
    ratios = trace_ratio(now, ks=(1, 3, 400), centered=centred)
    assert ratios["3"] == pytest.approx(values[:3].sum() / values.sum(), rel=1e-10)
    assert ratios["400"] == pytest.approx(1.0)
    top = spectrum(now, k=4, centered=centred)
    assert [top[str(j)] for j in range(1, 5)] == pytest.approx(values[:4].tolist(), rel=1e-9)
    assert top["mean"] == pytest.approx(values.mean(), rel=1e-9)
    assert top["median"] == pytest.approx(float(np.median(values)), rel=1e-6, abs=1e-12)


def test_one_kernel_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    import biascope.probes.view as module

    calls = []
    original = module.ntk
    monkeypatch.setattr(module, "ntk", lambda *a, **k: calls.append(1) or original(*a, **k))
    view = View.of(NET, X, Y, by_layer=True)
    for f in (ntk_alignment, label_alignment, layer_alignment, effective_rank, spectrum, kernel_velocity, complexity):
        f(view)
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------ the function, its inside


def test_sign_similarity_by_hand() -> None:
    net, x = mlp(3, 6, 5, 2, act=nn.ReLU), batch(11)[0]
    after = moved(net)

    def pattern(m: nn.Module) -> Tensor:
        first = m[0](x)
        return torch.cat([first > 0, m[2](first.relu()) > 0], 1)

    expected = float((pattern(net) == pattern(after)).double().mean())
    found = sign_similarity(View.of(after, x, init=View.of(net, x)))
    assert found == expected
    assert 0.3 < found < 1
    assert sign_similarity(View.of(net, x)) == 1


def test_signs_of_functional_and_in_place_activations_are_seen() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.b(self.act(self.a(x)))) + F.gelu(self.a(x))

    view = View.of(Net(), torch.randn(5, 3))
    assert [tuple(s.shape) for s in view.signs] == [(5, 4)] * 3
    assert torch.equal(view.signs[0], view.signs[2])
    with pytest.raises(InputError, match="no activation"):
        sign_similarity(View.of(nn.Linear(3, 2), torch.randn(5, 3)))


def test_representation_alignment() -> None:
    start, now = views()
    r0, r = (torch.tanh(m[2](torch.tanh(m[0](X)))).detach() for m in (NET, AFTER))
    C = torch.eye(len(X), dtype=torch.float64) - 1 / len(X)
    found = representation_alignment(now)
    assert found["init"] == pytest.approx(cosine(r @ r.T, r0 @ r0.T), rel=1e-10)
    assert found["labels"] == pytest.approx(cosine(C @ r @ r.T @ C, C @ HOT @ HOT.T @ C), rel=1e-10)
    centred = representation_alignment(now, centered=True)["init"]
    assert centred == pytest.approx(cosine(C @ r @ r.T @ C, C @ r0 @ r0.T @ C), rel=1e-10)
    features = representation_alignment(now, features=True)["init"]
    assert features == pytest.approx(cosine(r.T @ r, r0.T @ r0), rel=1e-10)
    h0, h = (torch.tanh(m[0](X)).detach() for m in (NET, AFTER))
    assert representation_alignment(now, layer="2")["init"] == pytest.approx(cosine(h @ h.T, h0 @ h0.T), rel=1e-10)
    with pytest.raises(InputError, match="layer='body' is not known"):
        representation_alignment(now, layer="body")
    assert representation_alignment(start)["init"] == pytest.approx(1)


def test_group_losses_classes() -> None:
    mask = torch.arange(7) < 3
    own = batch(9, seed=8)
    _, now = views(groups={"clean": mask, "noisy": [6, 2], "test": own})
    found = group_losses(now)
    out = AFTER(X).detach()
    losses = out.logsumexp(1) - out[torch.arange(7), Y]
    assert found["clean/loss"] == pytest.approx(float(losses[:3].mean()), rel=1e-12)
    assert found["noisy/loss"] == pytest.approx(float(losses[[6, 2]].mean()), rel=1e-12)
    assert found["noisy/accuracy"] == float((out.argmax(1) == Y)[[6, 2]].double().mean())
    assert found["test/loss"] == pytest.approx(float(F.cross_entropy(AFTER(own[0]), own[1])), rel=1e-12)
    assert list(group_losses(View.of(NET, X, Y))) == ["all/loss", "all/accuracy"]


def test_group_losses_signs_bits_and_values() -> None:
    net = mlp(3, 4, 1)
    out = net(X)[:, 0].detach()
    signs = 2 * Y - 1
    for labels in (signs, Y):
        found = group_losses(View.of(net, X, labels))
        assert found["all/loss"] == pytest.approx(float(torch.log1p((-signs * out).exp()).mean()), rel=1e-12)
        assert found["all/accuracy"] == float((signs * out > 0).double().mean())
    values = torch.randn(7, dtype=torch.float64)
    assert group_losses(View.of(net, X, values)) == {"all/loss": pytest.approx(float((out - values).pow(2).mean()))}
    half = group_losses(View.of(net, X, values, loss_fn=lambda f, y: 0.5 * (f[:, 0] - y).square()))
    assert half["all/loss"] == pytest.approx(0.5 * float((out - values).pow(2).mean()))


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (torch.tensor([0, 1, 5, 0, 1, 0, 1]), {}, "whole numbers from 0 to 1, not torch.int64 up to 5"),
        (torch.zeros(7, 3), {}, r"squared loss of 2 outputs: y has shape \[7, 3\]; 2 value"),
        (Y, {"loss_fn": "hinge"}, "loss='hinge' is not known; there is cross_entropy"),
        (Y, {"loss_fn": lambda f, y: f.sum()}, "one loss per example"),
    ],
)
def test_bad_labels_and_losses(y: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        group_losses(View.of(NET, X, y, **options))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"easy": [0, 9]}, "'easy'.*indices from 0 to 6"),
        ({"easy": torch.tensor([True])}, r"'easy'.*a mask \[7\]"),
        ({"easy": []}, "'easy'.*indices from 0 to 6"),
        ({"easy": (X, Y[:2])}, "'easy'.*7 labels, got .2"),
    ],
)
def test_bad_groups(groups: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        View.of(NET, X, Y, groups=groups)


def test_fourier_amplitudes_of_a_known_function() -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([2.0, 0.5, -0.7, 0.25], dtype=torch.float64))

        def forward(self, z: Tensor) -> Tensor:
            t = 2 * torch.pi * z
            return self.a[0] + self.a[1] * (3 * t + 0.4).sin() + self.a[2] * (5 * t).cos() + self.a[3] * (8 * t).cos()

    z = torch.arange(16, dtype=torch.float64)[:, None] / 16
    found = fourier(View.of(Known(), z), [0, 3, 4, 5, 8])
    assert list(found.values()) == pytest.approx([2.0, 0.5, 0.0, 0.7, 0.25], abs=1e-12)
    assert fourier(View.of(Known(), z), [3], amplitudes=[0.5]) == {"3": pytest.approx(1.0)}
    assert fourier(View.of(Known(), z[:1]), [3], grid=z) == {"3": pytest.approx(0.5)}
    with pytest.raises(InputError, match="0 to 8 on 16 points, got \\[9\\]"):
        fourier(View.of(Known(), z), [9])


# ------------------------------------------------------------------------------------------------------- the path


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_parameter_distance() -> None:
    _, now = views()
    found = parameter_distance(now)
    expected = float((flat(AFTER) - flat(NET)).norm())
    assert found == pytest.approx({"absolute": expected, "relative": expected / float(flat(NET).norm())}, rel=1e-12)


def test_linearisation_error() -> None:
    start, now = views()
    Jv = (jacobian_rows(NET, X) @ (flat(AFTER) - flat(NET))).reshape(7, 2)
    f0, f = NET(X).detach(), AFTER(X).detach()
    assert linearisation_error(now) == pytest.approx(float((f - f0 - Jv).norm() / Jv.norm()), rel=1e-9)
    assert math.isnan(linearisation_error(start))


def test_complexity_of_three_points() -> None:
    nets = [NET, AFTER, moved(AFTER, seed=5)]
    expected, last, totals = 0.0, None, []
    for i, net in enumerate(nets):
        view = View.of(net, X, previous=last)
        totals.append(complexity(view))
        if i:
            step = float((flat(net) - flat(nets[i - 1])).norm())
            expected += step * float(jacobian_rows(nets[i - 1], X).norm())
        last = view
    assert totals[0] == 0
    assert totals[2] == pytest.approx(expected, rel=1e-9)


def test_complexity_is_that_of_the_curvature_room() -> None:
    path, last = PathComplexity(X), None
    for net in (NET, AFTER, moved(AFTER, seed=5)):
        view = View.of(net, X, previous=last)
        assert complexity(view) == pytest.approx(path.update(net), rel=1e-9)
        last = view


def test_complexity_of_a_linear_model_is_path_length_times_feature_norm() -> None:
    """Spec 04, check 31."""
    net = nn.Linear(3, 1).double()
    after = moved(net)
    before = View.of(net, X)
    complexity(before)
    features = math.sqrt(float(X.square().sum()) + len(X))
    expected = float((flat(after) - flat(net)).norm()) * features
    assert complexity(View.of(after, X, previous=before)) == pytest.approx(expected, rel=1e-9)


def test_path_complexity_uses_the_path() -> None:
    before = View.of(NET, X)
    path_complexity(before)
    now = View.of(AFTER, X, previous=before)
    now.path = 2.5
    assert path_complexity(now) == pytest.approx(2.5 * float(jacobian_rows(NET, X).norm()), rel=1e-9)


@pytest.mark.parametrize("std", [None, 0.1])
def test_input_velocity(std: float | None) -> None:
    start, now = views()
    x = X if std is None else std * torch.randn(X.shape, generator=torch.Generator().manual_seed(0)).double()

    def G(net: nn.Module) -> Tensor:
        rows = torch.func.vmap(torch.func.jacrev(net))(x).detach().reshape(-1, 3)
        return rows.T @ rows

    assert input_velocity(start, std) == {}
    found = input_velocity(now, std)
    assert found["distance"] == pytest.approx(1 - cosine(G(AFTER), G(NET)), rel=1e-8)
    assert found["per_step"] == pytest.approx(found["distance"] / 10)


def test_input_velocity_needs_real_inputs() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(UnsupportedError, match="floating-point input"):
        input_velocity(View.of(net, torch.randint(5, (4, 2))))


def test_spectral_norm() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    found = spectral_norm(View.of(net, torch.randn(1, 2, 4, 4).double()))
    assert found["0.weight"] == pytest.approx(np.linalg.svd(net[0].weight.detach().reshape(3, -1).numpy())[1][0])
    assert found["2.weight"] == pytest.approx(np.linalg.svd(net[2].weight.detach().numpy())[1][0])
    assert set(found) == {"0.weight", "2.weight"}


def test_all_metrics_on_other_networks() -> None:
    """Convolutions with BatchNorm, attention, lazy and linearised networks: all values are finite at the start."""
    images, tokens = torch.randn(6, 1, 6, 6), torch.randn(6, 4, 8)
    labels = torch.arange(6) % 2
    conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    attention = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 2))
    zoo = [(conv, images), (attention.eval(), tokens), (bs.lazy(conv, 10.0), images), (bs.linearize(conv), images)]
    for net, x in zoo:
        start = View.of(net, x, labels, by_layer=True)
        for m in (REGISTER[name] for name in REGISTER if name not in {"fourier", "linearisation_error"}):
            for key, value in m(start).items():
                assert math.isfinite(value), (type(net), key)
        assert sign_similarity(start) == 1
        view = View.of(moved(net.float().double()), x.double(), labels, init=View.of(net.double(), x.double(), labels))
        assert linearisation_error(view) < (1e-9 if isinstance(net, bs.tangent.Linearized) else 100)
        net.float()


# --------------------------------------------------------------------------------------------------- the register


def test_unknown_metrics_and_options() -> None:
    with pytest.raises(InputError, match="metric='efective_rank' is not known; did you mean effective_rank"):
        metric("efective_rank")
    with pytest.raises(InputError, match=r"trace_ratio\(\) takes no 'k'; did you mean ks\?"):
        metric("trace_ratio", k=3)(View.of(NET, X, Y))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'frequencies'"):
        as_metrics(["fourier"])[0](View.of(NET, X, Y))
    with pytest.raises(InputError, match=r"two of the metrics \['spectrum', 'spectrum'\] have one name"):
        as_metrics(["spectrum", metric("spectrum", k=2)])


def test_metrics_by_mapping_and_own_function() -> None:
    found = as_metrics({"a": "effective_rank", "b": metric("effective_rank", centered=False), "mean": lambda v: v.n})
    view = View.of(NET, X, Y)
    values = {k: v for m in found for k, v in m(view).items()}
    assert values == {"a": effective_rank(view), "b": effective_rank(view, centered=False), "mean": 7.0}
    with pytest.raises(InputError, match=r"metric bad=a tensor of shape \[7\]: one number is needed"):
        as_metrics({"bad": lambda v: v.losses})[0](view)


def test_all_metrics_are_documented() -> None:
    assert all("Example:" in (m.function.__doc__ or "") for m in REGISTER.values())
    assert len(REGISTER) >= 18
