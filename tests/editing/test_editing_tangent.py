"""Fine-tuning by one protocol: against a loop by hand, and where the tangent model is the model itself."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.editing import TaskVector, fine_tune, posthoc
from biascope.editing.fine_tuning import schedule
from biascope.support.errors import InputError, UnsupportedError
from biascope.tangent import Linearized
from editing.editing_nets import mlp, points, random_vector


def task(n: int = 48) -> tuple[Tensor, Tensor]:
    x = points(n, 1)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1)


def by_hand(net: nn.Module, x: Tensor, y: Tensor, tangent: bool, steps: int, lr: float) -> dict[str, Tensor]:
    """Full-batch AdamW with the paper's schedule, f_lin by torch.func.jvp."""
    start = {k: p.detach().clone() for k, p in net.named_parameters()}
    theta = {k: p.clone().requires_grad_() for k, p in start.items()}
    adam = torch.optim.AdamW(theta.values(), lr=lr, weight_decay=0.1)
    warm = steps // 10
    for k in range(steps):
        if tangent:
            out, move = torch.func.jvp(
                lambda p: torch.func.functional_call(net, p, (x,)),
                (start,),
                ({n: theta[n] - start[n] for n in start},),
            )
            out = out + move
        else:
            out = torch.func.functional_call(net, theta, (x,))
        adam.zero_grad()
        nn.functional.cross_entropy(out, y).backward()
        nn.utils.clip_grad_norm_(theta.values(), 1.0)
        factor = (k + 1) / warm if k < warm else 0.5 * (1 + math.cos(math.pi * (k - warm) / (steps - warm)))
        adam.param_groups[0]["lr"] = lr * factor
        adam.step()
    return {k: theta[k].detach() - start[k] for k in start}


@pytest.mark.parametrize("tangent", [False, True])
def test_a_loop_by_hand(tangent: bool) -> None:
    net, (x, y) = mlp(), task()
    found = fine_tune(net, (x, y), tangent=tangent, steps=40, batch_size=48, lr=0.03)
    expected = by_hand(net, x, y, tangent, 40, 0.03)
    torch.testing.assert_close(dict(found.vector.tensors), expected, rtol=0, atol=1e-9)
    assert found.vector.norm() > 0.5
    assert "<td>40</td>" in found._repr_html_()
    assert isinstance(found.model, Linearized) == tangent
    assert float(found.losses[-1]) < 0.8 * float(found.losses[0])
    torch.testing.assert_close(found.vector.apply_to(bs.linearize(net) if tangent else net)(x), found.model(x))


def test_both_kinds_agree_for_a_model_linear_in_its_weights() -> None:
    net, data = nn.Linear(4, 3).double(), task()
    one, two = (fine_tune(net, data, tangent=t, steps=30, batch_size=16, lr=0.05, seed=3) for t in (False, True))
    torch.testing.assert_close(dict(one.vector.tensors), dict(two.vector.tensors), rtol=0, atol=1e-10)
    assert one.vector.norm() > 0.1


def test_seeds_states_and_flags_of_the_given_network() -> None:
    net, data = mlp(), task()
    head = nn.Linear(3, 3).double()
    before, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    one, two, three = (
        fine_tune(net, data, steps=10, batch_size=8, lr=0.01, seed=s, head=head, params="2") for s in (0, 0, 1)
    )
    assert all(torch.equal(one.vector[k], two.vector[k]) for k in one.vector.tensors)
    assert not torch.equal(one.vector["2.weight"], three.vector["2.weight"])
    assert one.vector["0.weight"].abs().max() == 0  # not selected
    assert all(torch.equal(before[k], t) for k, t in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in [*net.parameters(), *head.parameters()])
    assert torch.equal(torch.get_rng_state(), rng)


def test_every_example_is_seen_once_in_an_epoch() -> None:
    seen: list[int] = []

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        seen.extend(labels.tolist())
        return out.sum() * 0

    x = points(10, 1)
    fine_tune(mlp(), (x, torch.arange(10)), steps=5, batch_size=4, loss=loss)
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:]) == list(range(10))
    assert seen[:10] != list(range(10))


def test_batches_of_any_kind_and_dicts() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.inner(x)}

    x, y = task()
    pieces = [{"x": a, "labels": b} for a, b in zip(x.split(9), y.split(9))]
    found = fine_tune(Named(), pieces, steps=10, batch_size=48, lr=0.01, output=lambda out: out["scores"])
    plain = fine_tune(mlp(), (x.float(), y), steps=10, batch_size=48, lr=0.01)  # inputs follow the network's precision
    torch.testing.assert_close(found.vector["inner.0.weight"], plain.vector["0.weight"], rtol=0, atol=1e-6)


def test_batch_norm_must_be_in_eval_mode_and_keeps_its_statistics() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    net(points(32, 5))
    with pytest.raises(UnsupportedError, match="BatchNorm1d '1' is in train mode"):
        fine_tune(net, task(), steps=2)
    for tangent in (False, True):
        found = fine_tune(net.eval(), task(), tangent=tangent, steps=3, lr=0.01)
        assert not found.vector.buffers


def test_schedule_warms_up_and_anneals() -> None:
    factors = [schedule(k, 2000, 200) for k in range(2000)]
    assert factors[0] == 1 / 200
    assert factors[199] == factors[200] == 1.0
    assert factors[1100] == pytest.approx(0.5)
    assert 0 < factors[-1] < 1e-5


def test_refusals() -> None:
    net, (x, y) = mlp(), task()
    with pytest.raises(InputError, match="data: labels are needed"):
        fine_tune(net, x)
    with pytest.raises(InputError, match="already; pass the original network"):
        fine_tune(bs.linearize(net), (x, y), steps=5)
    with pytest.raises(InputError, match="the loss is not finite: use a smaller lr"):
        fine_tune(net, (x, y), steps=3, loss=lambda out, y: out.sum() * torch.inf)
    with pytest.raises(InputError, match="no parameter or layer is called 'encoder'"):
        fine_tune(net, (x, y), steps=3, params="encoder")


def test_post_hoc_linearisation_and_the_four_predictors() -> None:
    net, x = mlp(), points(9, 3)
    tau, other = random_vector(net, 1), random_vector(net, 2)
    tuned = tau.apply_to(net)
    torch.testing.assert_close(posthoc(net, tau)(x), bs.tangent.posthoc(net, tuned)(x), rtol=0, atol=1e-12)
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(dict(net.named_parameters()))
    for vector in (tau, other):  # post-hoc; found in the tangent space
        move = sum((jac[k].flatten(2) @ (0.5 * vector[k]).flatten() for k in jac), torch.zeros(9, 3).double())
        torch.testing.assert_close(posthoc(net, vector, scale=0.5)(x), net(x) + move, rtol=0, atol=1e-10)
    torch.testing.assert_close(tau.apply_to(net, 0.5)(x), (0.5 * tau).apply_to(net)(x), rtol=0, atol=1e-12)
    assert TaskVector(net, posthoc(net, tau)).norm() == pytest.approx(tau.norm())
