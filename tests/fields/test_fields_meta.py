"""Meta-learning against closed forms of linear models and a hand-written loop; what it does to the dictionary."""

import pytest
import torch
from torch import Tensor, nn

from biascope.fields import coordinates, dictionary, dictionary_change, fit, meta_learn
from biascope.fields.meta import _outer
from biascope.fields.networks import seeded
from biascope.nets import FFN, MLP, SIREN
from biascope.support.errors import InputError
from fields.field_pictures import blobs


@pytest.mark.parametrize("algorithm", ["maml", "first-order", "reptile"])
@pytest.mark.parametrize("inner_steps", [1, 3])
def test_outer_gradients_of_a_linear_model(algorithm: str, inner_steps: int) -> None:
    """loss = |X w - y|^2 / N: theta' = w* + (I - a H)^k (theta - w*), and the derivative of that is (I - a H)^k."""
    gen = torch.Generator().manual_seed(0)
    X, Y = torch.randn(9, 3, generator=gen).double(), torch.randn(4, 9, generator=gen).double()
    theta, a = torch.randn(3, generator=gen).double(), 0.3

    def loss(params: dict[str, Tensor], target: Tensor) -> Tensor:
        return (X @ params["w"] - target).square().mean()

    found, value = _outer(loss, algorithm, inner_steps, a)({"w": theta}, Y)
    H = 2 / 9 * X.T @ X
    best = torch.linalg.lstsq(X, Y.T).solution.T
    shrink = torch.linalg.matrix_power(torch.eye(3).double() - a * H, inner_steps)
    after = best + (theta - best) @ shrink
    slope = (after - best) @ H  # gradients at theta', [4, 3]
    wanted = {
        "maml": (slope @ shrink).mean(0),
        "first-order": slope.mean(0),
        "reptile": theta - after.mean(0),
    }[algorithm]
    torch.testing.assert_close(found["w"], wanted)
    torch.testing.assert_close(value, (after @ X.T - Y).square().mean())


@pytest.mark.parametrize("algorithm", ["maml", "first-order", "reptile"])
def test_the_loop_is_the_obvious_one(algorithm: str) -> None:
    """Three outer steps by plain autograd with create_graph, one signal at a time."""
    r = coordinates((4, 4), dtype=torch.float64)
    signals = torch.rand(3, 4, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = seeded(SIREN, 0, hidden=(5, 4), outputs=2, w0=5.0).double()
    options = {"steps": 3, "lr": 1e-2, "inner_lr": 0.05, "inner_steps": 2}
    found = meta_learn(net, r, signals, algorithm=algorithm, batch_size=3, **options)
    hand = seeded(SIREN, 0, hidden=(5, 4), outputs=2, w0=5.0).double()
    names, adam = [k for k, _ in hand.named_parameters()], torch.optim.Adam(hand.parameters(), lr=1e-2)
    for step in range(3):
        totals = [torch.zeros_like(p) for p in hand.parameters()]
        losses = []
        for y in signals:

            def loss(params: list[Tensor], y: Tensor = y) -> Tensor:
                return (torch.func.functional_call(hand, dict(zip(names, params)), (r,)) - y).square().mean()

            params = list(hand.parameters())
            for _ in range(2):
                slopes = torch.autograd.grad(loss(params), params, create_graph=True)
                slopes = slopes if algorithm == "maml" else tuple(g.detach() for g in slopes)
                params = [p - 0.05 * g for p, g in zip(params, slopes)]
            losses.append(float(loss(params).detach()))
            if algorithm == "reptile":
                parts = [(p - q).detach() for p, q in zip(hand.parameters(), params)]
            else:
                parts = list(torch.autograd.grad(loss(params), list(hand.parameters())))
            totals = [t + g / 3 for t, g in zip(totals, parts)]
        assert float(found.losses[step]) == pytest.approx(sum(losses) / 3, rel=1e-9)
        for p, g in zip(hand.parameters(), totals):
            p.grad = g
        adam.step()
    for p, q in zip(found.model.parameters(), hand.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def test_frozen_parameters_stay_and_nothing_is_touched() -> None:
    r, signals = coordinates(8), torch.rand(4, 8)
    net = seeded(SIREN, 0, in_features=1, hidden=(6, 6))
    net.layers[0].requires_grad_(False)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    one, two, other = (meta_learn(net, r, signals, steps=3, lr=1e-2, batch_size=2, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.losses, two.losses)
    assert not torch.equal(one.losses, other.losses)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(one.model.layers[0].weight, net.layers[0].weight)
    assert not torch.equal(one.model.layers[2].weight, net.layers[2].weight)


@pytest.mark.slow
def test_d8_energy_moves_into_the_leading_atoms() -> None:
    """Check D8, on ellipses that were not in the training set: more energy, smaller angles; also for held-out PSNR."""
    r, train, test = coordinates((16, 16)), blobs(40, 0), blobs(30, 1)
    net = seeded(SIREN, 0, hidden=(64,) * 3, w0=30.0, output_offset=0.5)
    before = dictionary(net, r)
    found = {a: meta_learn(net, r, train, algorithm=a, steps=200, lr=1e-4).model for a in ("maml", "first-order")}
    change = {a: dictionary_change(before, dictionary(m, r), test) for a, m in found.items()}
    for c in change.values():
        gain, error = c.gain
        assert gain - 2 * error > 0.03
        assert float(c.angles_after.mean()) < float(c.angles_before.mean())
        assert 0 <= c.overlap <= 1
        assert gain == pytest.approx(c.after.area - c.before.area)
    assert change["maml"].gain[0] > change["first-order"].gain[0]  # the second derivatives do something here


@pytest.mark.slow
def test_d9_meta_learned_beats_random_starts_after_three_steps() -> None:
    """Check D9, orderings of Fig. C.2 on ellipses: FFN with sigma = 1, meta-learned, against FFNs and a ReLU-MLP."""
    r, train, test = coordinates((16, 16)), blobs(40, 0), blobs(10, 1)

    def ffn(sigma: float) -> nn.Module:
        return seeded(FFN, 0, hidden=(64,) * 3, mapping_size=64, sigma=sigma)

    def after_three(net: nn.Module) -> float:
        found = [fit(net, r, image, steps=3, lr=1e-2, optimiser="gd").psnr for image in test]
        return sum(found) / len(found)

    nets = [ffn(s) for s in (0.1, 0.5, 1.0, 5.0, 10.0)]
    random = [after_three(net) for net in (*nets, seeded(MLP, 0, in_features=2, hidden=(64,) * 4, flatten=False))]
    meta = after_three(meta_learn(ffn(1.0), r, train, steps=300, lr=1e-4).model)
    assert meta > max(random) + 3


def test_what_cannot_be_is_refused() -> None:
    r, signals, net = coordinates((4, 4)), torch.rand(3, 4, 4), seeded(SIREN, 0, hidden=(4, 4))
    with pytest.raises(InputError, match="algorithm='MAML'"):
        meta_learn(net, r, signals, algorithm="MAML")
    with pytest.raises(InputError, match="do not belong to coordinates"):
        meta_learn(net, r, signals[:, :3])
    with pytest.raises(InputError, match="but the values are"):
        meta_learn(net, r, torch.rand(3, 4, 4, 2), steps=1)
    with pytest.raises(InputError, match="inner_steps must be at least 1"):
        meta_learn(net, r, signals, inner_steps=0)
    with pytest.raises(InputError, match="signals is empty"):
        meta_learn(net, r, signals[:0])
    with pytest.raises(InputError, match="smaller lr"):
        meta_learn(net, r, signals, steps=9, inner_lr=1e30)
    a, b = dictionary(net, r), dictionary(net, coordinates((2, 8)))
    with pytest.raises(InputError, match="atoms on one grid"):
        dictionary_change(a, b, signals)
    with pytest.raises(InputError, match="k=17"):
        dictionary_change(a, a, signals, k=17)
