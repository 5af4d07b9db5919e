"""Changes of the function along directions of the parameters (spec 04, 2.14; spec 05, 2.22)."""

import math

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError
from biascope.support.precision import convolves_in_tf32
from biascope.tangent import perturbation_response
from biascope_papers.ekfac.directions import change
from tangent.linearize_zoo import conv_net, images, mlp

F64 = torch.float64
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=F64)


def random_directions(p: int, k: int, seed: int = 0) -> Tensor:
    """k directions of length 1, uniform on the sphere."""
    drawn = torch.randn(p, k, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return nn.functional.normalize(drawn, dim=0)


def moved_outputs(net: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    params = dict(net.named_parameters())
    parts = v.split([p.numel() for p in params.values()])
    new = {k: p.detach() + d.view_as(p) for (k, p), d in zip(params.items(), parts)}
    return torch.func.functional_call(net, new, (x,)).detach() - net(x).detach()


def test_changes_one_by_one() -> None:
    """Against the module called with moved parameters, in batches too, and against the study of Fig. B.1."""
    net = mlp()
    p = sum(w.numel() for w in net.parameters())
    V = random_directions(p, 5, seed=3)
    found = perturbation_response(net, X, V, [0.3, -1e-3], precision="float64")
    expected = torch.stack([torch.stack([moved_outputs(net, X, e * v).norm() for v in V.T]) for e in (0.3, -1e-3)])
    torch.testing.assert_close(found.change, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.change[0] / math.sqrt(found.count), change(net, X, 0.3 * V), rtol=1e-12, atol=0)
    J = bs.Jacobian(net, X, precision="float64").to_dense().reshape(-1, p)
    torch.testing.assert_close(found.slope, (J @ V).norm(dim=0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.first_order[1], 1e-3 * found.slope)
    parts = perturbation_response(net, [X[:2], X[2:]], V, [0.3, -1e-3], precision="float64")
    torch.testing.assert_close(parts.change, found.change)
    assert parts.count == found.count == 6 * net(X).shape[1]


def test_directions_by_name_and_of_some_parameters() -> None:
    net = mlp()
    params = {k: w.detach() for k, w in net.named_parameters()}
    V = random_directions(sum(w.numel() for w in params.values()), 3)
    named = {
        k: part.T.reshape(3, *w.shape)
        for (k, w), part in zip(params.items(), V.split([w.numel() for w in params.values()]))
    }
    flat, by_name = (perturbation_response(net, X, d, 0.1, precision="float64") for d in (V, named))
    assert torch.equal(flat.change, by_name.change)
    last = list(params)[-2]
    one = torch.randn(params[last].numel(), generator=torch.Generator().manual_seed(1), dtype=F64)
    found = perturbation_response(net, X, one, 0.1, params=[last], precision="float64")
    whole = torch.zeros(len(V), dtype=F64)
    start = sum(w.numel() for k, w in params.items() if list(params).index(k) < list(params).index(last))
    whole[start : start + len(one)] = one
    torch.testing.assert_close(found.change, perturbation_response(net, X, whole, 0.1, precision="float64").change)
    torch.testing.assert_close(found.ratio, torch.ones(1, 1, dtype=F64))  # linear in its last weights


def test_singular_vectors_change_by_the_singular_values() -> None:
    """On the sample of J the slope along v_j is sqrt(n lambda_j), and the ratio tends to 1 linearly in eps."""
    net = mlp()
    pairs = bs.metric_eigenpairs(net, X, 4, precision="float64")
    found = perturbation_response(net, X, pairs.vectors, [1e-2, 1e-3, 1e-4], precision="float64")
    torch.testing.assert_close(found.slope, (6 * pairs.values).sqrt(), rtol=1e-9, atol=0)
    gaps = (found.ratio - 1).abs()
    assert float(gaps[0].max()) > 1e-5
    assert float((gaps[1] / gaps[2]).median()) == pytest.approx(10, rel=0.2)
    assert float(gaps[2].max()) < 1e-3


def test_random_directions_change_by_the_mean_singular_value() -> None:
    """E ||J v||^2 = ||J||_F^2 / p on the sphere; within four standard errors of 400 draws."""
    net = mlp()
    J = bs.Jacobian(net, X, precision="float64").to_dense()
    p = J.shape[-1]
    slopes = perturbation_response(net, X, random_directions(p, 400, seed=1), 0.1, precision="float64").slope.square()
    error = float(slopes.std()) / math.sqrt(400)
    assert abs(float(slopes.mean()) - float(J.square().sum()) / p) < 4 * error


def test_convolutions_in_float32_and_the_table() -> None:
    net, x = conv_net().float(), images(5)
    p = sum(w.numel() for w in net.parameters())
    V = random_directions(p, 2)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    single, double = (perturbation_response(net, x, V, [0.5], precision=q) for q in ("float32", "float64"))
    torch.testing.assert_close(single.change, double.change, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    shown = single._repr_html_()
    assert "Change along 2 directions" in shown
    assert f"{float(single.change.max()):.4g}" in shown


def test_wrong_directions() -> None:
    net = nn.Linear(3, 2)  # 8 parameters
    x = torch.eye(3)
    for directions, eps, message in (
        (torch.ones(7), 0.1, r"directions \[7\]: need \[p\] or \[p, k\] with p = 8"),
        (torch.ones(2, 8), 0.1, r"directions \[2, 8\]"),
        ({"weight": torch.ones(1, 2, 3)}, 0.1, r"for the parameters {'weight': \[2, 3\], 'bias': \[2\]}"),
        ({"weight": torch.ones(1, 2, 3), "bias": torch.ones(1, 3)}, 0.1, "for the parameters"),
    ):
        with pytest.raises(InputError, match=message):
            perturbation_response(net, x, directions, eps)  # type: ignore[arg-type]
    still = perturbation_response(net, x, torch.zeros(8), 0.1)
    assert still.change.item() == 0
    assert math.isnan(still.ratio.item())


class Doubling(nn.Linear):
    """Works in place on its inputs, and looks at the precision of convolutions."""

    factor, tf32 = 2.0, False

    def forward(self, x: Tensor) -> Tensor:
        self.tf32 |= convolves_in_tf32()
        return super().forward(x.mul_(self.factor) if self.factor > 0 else x.relu_())


def test_networks_that_change_their_inputs() -> None:
    """A pass that doubles its inputs had others at every call, and left the user's doubled many times over."""
    net, x = Doubling(4, 2).double(), X.clone()
    plain = nn.Linear(4, 2).double()
    plain.load_state_dict(net.state_dict())
    for factor, seen in ((2.0, 2 * X), (0.0, X.relu())):  # a ReLU in place: the second time it changes nothing
        net.factor = factor
        found = perturbation_response(net, x, torch.eye(10), [0.1, 1.0])
        assert torch.equal(x, X)
        expected = perturbation_response(plain, seen, torch.eye(10), [0.1, 1.0])
        torch.testing.assert_close(found.change, expected.change, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.slope, expected.slope, rtol=1e-12, atol=0)


def test_convolutions_are_in_full_float32() -> None:
    """cuDNN's default, tf32, has three digits: no change below them would be seen."""
    net, before = Doubling(4, 2).double(), convolves_in_tf32()
    net.factor = 0.0
    perturbation_response(net, X, torch.eye(10), 0.1)
    assert not net.tf32
    assert convolves_in_tf32() == before
