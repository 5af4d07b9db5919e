"""Recorded initialisers: bit for bit against the factory, the same distributions, independent of chunking."""

import random
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, truncnorm
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import record, train_ensemble
from biascope.ensembles.initialisers import build, tensors_of
from biascope.ensembles.recorder import replay
from biascope.support.errors import InputError


def sequential() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))


def orthogonal() -> nn.Module:
    layer = nn.Linear(6, 4)
    nn.init.orthogonal_(layer.weight, gain=2.0)
    nn.init.trunc_normal_(layer.bias, std=0.5, a=-0.4, b=0.9)
    return layer


def rescaled() -> nn.Module:
    layer = nn.Linear(5, 4)
    with torch.no_grad():
        layer.weight *= 3.0
        layer.weight[1] = 0.25
        layer.bias.copy_(layer.weight[:, 0].abs() + 1.0)
    return layer


class Loose(nn.Module):
    """Raw parameters made in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6) * 0.1 + 2.0)
        self.b = nn.Parameter(torch.rand(6))
        self.register_buffer("c", torch.randint(3, 9, (6,)))
        self.d = nn.Parameter(torch.normal(1.0, 2.0, (6,)))
        self.e = nn.Parameter(torch.empty(6).exponential_(2.0))
        self.f = nn.Parameter(torch.cat([torch.zeros(2), torch.randn(4)]))


FACTORIES = {
    "layers": sequential,
    "orthogonal": orthogonal,
    "rescaled": rescaled,
    "loose": Loose,
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=1),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(3, 4),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "lenet": lambda: nets.build("lenet"),
    "vit": lambda: nets.build("vit", width=24, depth=2, heads=3),
    "siren": lambda: nets.build("siren", hidden=(16, 16)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_replay_gives_the_factorys_numbers(name: str) -> None:
    """With the random state of the factory, the replay is the factory: an exact oracle, not a statistical one."""
    recorded = record(FACTORIES[name])
    assert recorded.recorded, recorded.reasons
    built = tensors_of(build(FACTORIES[name], 123))
    rng = torch.Generator().manual_seed(123)
    stacks = replay(recorded._program, recorded._program.steps, 1, rng, torch.device("cpu"))
    for key, value in built.items():
        view = recorded._views.get(key)
        found = recorded._constants[key] if view is None else view.of(stacks[view.storage])[0]
        assert torch.equal(found, value), key


@pytest.mark.parametrize("name", ["layers", "orthogonal", "rescaled", "loose"])
def test_distributions_by_two_sample_tests(name: str) -> None:
    """Entries, and products of entries (which see dependence), against 400 calls of the factory."""
    T, factory = 400, FACTORIES[name]
    drawn = record(factory).draw(0, 0, T)
    built = [tensors_of(build(factory, seed)) for seed in range(T)]
    for key, stack in {**drawn.params, **drawn.buffers}.items():
        if not stack.is_floating_point() or key.endswith(("running_mean", "running_var")):
            continue
        ours, theirs = stack.reshape(T, -1), torch.stack([each[key].reshape(-1) for each in built])
        last = ours.shape[1] - 1
        for make in (lambda v: v[:, 0], lambda v: v[:, last], lambda v: v[:, 0] * v[:, last], lambda v: v.mean(1)):  # noqa: B023
            assert ks_2samp(make(ours).numpy(), make(theirs).numpy()).pvalue > 1e-4, key


def test_networks_and_parameters_are_independent() -> None:
    drawn = record(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).draw(3, 0, 4096)
    flat = torch.cat([value.flatten(1) for value in drawn.params.values()], 1).double()
    flat = (flat - flat.mean(0)) / flat.std(0)
    off = flat.T @ flat / len(flat) - torch.eye(flat.shape[1])
    assert off.abs().max() < 6 / 4096**0.5
    along = (flat[1:] * flat[:-1]).mean(0)  # neighbouring networks
    assert along.abs().max() < 6 / 4096**0.5


def test_a_network_depends_on_seed_and_index_alone() -> None:
    recorded = record(sequential)
    whole = recorded.draw(7, 0, 600)
    for start, stop in ((0, 1), (250, 260), (255, 513), (599, 600)):
        part = recorded.draw(7, start, stop)
        for key, value in part.params.items():
            assert torch.equal(value, whole.params[key][start:stop])
    other = recorded.draw(8, 0, 1)
    assert not torch.equal(other.params["0.weight"], whole.params["0.weight"][:1])


def test_constants_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x))
            return out

    drawn = record(Tied).draw(0, 0, 2)
    assert set(drawn.params) == {"a.weight", "a.bias", "b.bias"}
    batch = record(lambda: nn.BatchNorm1d(3)).draw(0, 0, 2)
    assert batch.buffers["running_var"].tolist() == [[1.0] * 3] * 2
    assert batch.buffers["num_batches_tracked"].dtype == torch.int64


def from_numpy() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.bias.data = torch.tensor(np.random.randn(2), dtype=torch.float32)  # noqa: NPY002
    return layer


def normalised_by_a_number() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.weight.data.div_(layer.weight.norm().item())
    return layer


@pytest.mark.parametrize(("factory", "culprit"), [(from_numpy, "bias"), (normalised_by_a_number, "weight")])
def test_what_is_not_understood_calls_the_factory_and_says_so(factory, culprit: str) -> None:  # type: ignore[no-untyped-def]
    recorded = record(factory)
    assert not recorded.recorded
    assert culprit in recorded.reasons
    assert "factory" in recorded.distribution(culprit)
    drawn = recorded.draw(0, 2, 5)
    again = recorded.draw(0, 3, 4)
    assert torch.equal(drawn.params[culprit][1:2], again.params[culprit])
    trained = train_ensemble(recorded, [(torch.ones(4, 3), torch.arange(4) % 2)], epochs=1)
    assert culprit in trained.fallback
    assert "factory called for each network" in trained._repr_html_()
    recognised = train_ensemble(lambda: nn.Linear(3, 2), [(torch.ones(4, 3), torch.arange(4) % 2)], epochs=1)
    assert "factory called" not in recognised._repr_html_()
    assert not torch.equal(drawn.params[culprit][0], drawn.params[culprit][1])


def test_fixed_features_drawn_with_an_own_generator_stay_constant() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.register_buffer("fixed", torch.randn(4, generator=torch.Generator().manual_seed(5)))
        return layer

    drawn = record(factory).draw(0, 0, 3)
    assert torch.equal(drawn.buffers["fixed"][0], drawn.buffers["fixed"][2])


def test_overwritten_draws_are_not_made() -> None:
    """VGG fills its convolutions twice; only the second fill counts."""
    recorded = record(lambda: nets.build("vgg11", width=4))
    assert len(recorded._steps) < len(recorded._program.steps)
    assert recorded.distribution(
        "features.conv1.weight"
        if "features.conv1.weight" in recorded._views
        else next(k for k, v in recorded._views.items() if len(v.size) == 4)
    ).startswith("normal_(0, ")


def test_variance_of_a_head() -> None:
    recorded = record(lambda: nn.Linear(12, 1))
    assert recorded.variance_of("weight") == pytest.approx(1 / 36, rel=1e-6)
    assert record(rescaled).variance_of("weight") is None
    assert record(lambda: nets.build("mlp-ntk", in_features=3, hidden=(4,))).variance_of("layers.fc1.weight") == 1.0


@pytest.mark.parametrize("repeat", [False, True])
def test_entries_that_are_constant_or_repeated_have_no_variance_of_their_own(repeat: bool) -> None:
    """Half of the weights drawn and half zero: G in closed form and with the head averaged out was twice too large."""

    def build() -> nn.Module:
        net, weight = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1)), torch.zeros(1, 4)
        weight[:, :2].normal_()
        net[1].weight = nn.Parameter(torch.randn(1, 1).expand(1, 4) if repeat else weight)
        return net

    assert record(build).recorded
    assert record(build).variance_of("1.weight") is None


def test_global_random_states_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    record(sequential).draw(0, 0, 3)
    record(from_numpy).draw(0, 0, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()
    assert nn.init._no_grad_trunc_normal_.__name__ == "_no_grad_trunc_normal_"


def test_bad_factories_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="same module twice"):
        record(lambda: model)
    with pytest.raises(InputError, match="does it set a seed"):
        record(lambda: nets.build("lenet", seed=0))
    with pytest.raises(InputError, match="returned a int"):
        record(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match="start"):
        record(sequential).draw(0, 3, 3)


def test_module_is_network_i() -> None:
    drawn = record(sequential).draw(0, 0, 4)
    module = drawn.module(2)
    assert torch.equal(module[0].weight, drawn.params["0.weight"][2])
    assert not module.training
    with torch.no_grad():
        module[0].weight.zero_()
    assert drawn.params["0.weight"][2].abs().sum() > 0


@pytest.mark.parametrize(("std", "bound"), [(0.02, 2.0), (1.0, 2.0), (1.0, 0.3), (2.0, 1.0)])
def test_the_variance_of_a_truncated_normal(std: float, bound: float) -> None:
    """Independent and centred where the cuts are at equal distances; scipy is the oracle."""

    def cut(low: float = -bound, mean: float = 0.0) -> nn.Module:
        layer = nn.Linear(4, 3)
        nn.init.trunc_normal_(layer.weight, mean, std, low, bound)
        return layer

    assert record(cut).variance_of("weight") == pytest.approx(truncnorm.var(-bound / std, bound / std) * std**2)
    assert record(lambda: cut(low=-2 * bound)).variance_of("weight") is None
    assert record(lambda: cut(mean=0.1)).variance_of("weight") is None


def test_networks_whose_layers_compute_their_weight_can_be_copied() -> None:
    """`nn.utils.weight_norm` leaves a computed weight in the layer: a raw error of copy.deepcopy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants its parametrisation used
        drawn = record(lambda: nn.utils.weight_norm(nn.Linear(3, 2))).draw(0, 0, 3)
    x, one = torch.eye(3), drawn.one(2)
    direction = one["weight_v"] / one["weight_v"].norm(dim=1, keepdim=True)
    assert torch.allclose(drawn.module(2)(x), (one["weight_g"] * direction).T + one["bias"], atol=1e-6)
