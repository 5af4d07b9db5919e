"""What is assumed of factories and networks: chance in parameters and buffers alone, examples that do not mix."""

import copy
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import average_geometry, geometry_evolution, nads
from biascope.ensembles import input_gradients, outputs, record, train_ensemble
from biascope.ensembles.trust import refuse_hidden_randomness, refuse_mixing
from biascope.support.errors import InputError, UnsupportedError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Features(nn.Module):
    """Random features, drawn as what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        drawn = torch.randn(4, 3)
        if kind == "buffer":
            self.register_buffer("B", drawn)
        elif kind == "list":
            self.inner = {"all": [drawn]}
        elif kind == "float":
            self.scale = random.random()
        elif kind == "read out":
            self.scale = float(torch.rand(1))
        else:
            self.B = drawn
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        fixed = torch.ones(4, 3) * getattr(self, "scale", 1.0)
        B = self.inner["all"][0] if self.kind == "list" else getattr(self, "B", fixed)
        out: Tensor = self.head(torch.tanh(x @ B.to(x).T))
        return out


@pytest.mark.parametrize(
    ("kind", "name"), [("tensor", "B"), ("list", "inner"), ("float", "scale"), ("read out", "scale")]
)
def test_chance_that_is_no_tensor_of_the_network_is_refused(kind: str, name: str) -> None:
    """All networks of a stack would share one draw of it."""
    uses: list[Callable[[], object]] = [
        lambda: nads(lambda: Features(kind), (3,), 8),
        lambda: average_geometry(lambda: Features(kind), (3,), 8),
        lambda: geometry_evolution(lambda: Features(kind), X, Y.float(), 8),
        lambda: train_ensemble(lambda: Features(kind), [(X, Y)], loss="bce", epochs=1),
        lambda: outputs(record(lambda: Features(kind)).draw(0, 0, 8), X),
        lambda: outputs(record(lambda: Features(kind)).draw(0, 0, 2), torch.stack([X, X]), per_network=True),
        lambda: input_gradients(record(lambda: Features(kind)).draw(0, 0, 9)[:8], X),
    ]
    for use in uses:
        with pytest.raises(InputError, match=f"'{name}' of Features, which is neither a parameter nor a buffer"):
            use()


def test_drawn_networks_can_be_pickled() -> None:
    drawn = record(lambda: nn.Linear(3, 1)).draw(0, 0, 2)
    again = pickle.loads(pickle.dumps(drawn))
    assert torch.equal(outputs(again, X), outputs(drawn, X))


@pytest.mark.parametrize("skip", range(6))
def test_chance_that_chooses_layers_is_refused(skip: int) -> None:
    """One network in two has another activation; seen in one other build only, it went through every second time."""

    def build() -> nn.Module:
        torch.rand(skip)
        activation = nn.Tanh() if torch.rand(1) < 0.5 else nn.Sigmoid()
        return nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 1))

    with pytest.raises(InputError, match="neither a parameter nor a buffer"):
        average_geometry(build, (3,), 8)


def test_chance_in_buffers_is_fine() -> None:
    """G of tanh(B x) at 0 is E[B^T w w^T B] = 4 I / (3 x 4)."""
    found = average_geometry(lambda: Features("buffer"), (3,), 4000, probe_std=1e-3).matrix
    assert torch.allclose(found.float(), torch.eye(3) / 3, atol=0.03)


def test_layers_that_keep_what_they_computed_are_fine() -> None:
    """nn.utils.weight_norm and spectral_norm keep the weight of the last call as an attribute, and make it anew."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 1)))

    recorded = record(normed)
    refuse_hidden_randomness(recorded, X)
    drawn = recorded.draw(0, 0, 2)
    v, g, bias = (drawn.params[f"0.{part}"] for part in ("weight_v", "weight_g", "bias"))
    hidden = X @ (g * v / v.norm(dim=2, keepdim=True)).transpose(1, 2) + bias[:, None]  # [2, n, 4]
    left, right = (drawn.buffers[f"1.weight_{part}"] for part in "uv")
    w, shift = drawn.params["1.weight_orig"], drawn.params["1.bias"]
    sigma = torch.einsum("to,toi,ti->t", left, w, right)
    expected = hidden @ (w / sigma[:, None, None]).transpose(1, 2) + shift[:, None]
    assert torch.allclose(outputs(drawn, X), expected, atol=1e-4)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 20), nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.dropout(self.body(x), 0.5))  # which is on in eval mode too
        return out


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 20), nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        out: Tensor = self.head((h - h.mean(0)).tanh())
        return out


def test_chance_in_a_call_and_examples_that_mix_are_refused() -> None:
    for use in (
        lambda f: nads(f, (3,), 8),
        lambda f: nads(f, (3,), 8, method="autograd"),
        lambda f: average_geometry(f, (3,), 8),
        lambda f: geometry_evolution(f, X, Y.float(), 8),
    ):
        with pytest.raises(UnsupportedError, match="different outputs for the same input"):
            use(Noisy)
        with pytest.raises(UnsupportedError, match="its examples mix"):
            use(Mixing)
    tokens = record(lambda: nn.Sequential(nn.Embedding(5, 3), Mixing())).draw(0, 0, 1)
    with pytest.raises(UnsupportedError, match="its examples mix"):  # whole numbers can be told apart too
        refuse_mixing(tokens, torch.tensor([0, 3]))


class Referring(Mixing):
    """Every example is seen from the first one, whose own output is the same with or without others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        out: Tensor = self.head((h - h[:1]).tanh())
        return out


def test_examples_that_look_at_the_first_one_mix_too() -> None:
    with pytest.raises(UnsupportedError, match="its examples mix"):
        input_gradients(record(Referring).draw(0, 0, 2), X)
    drawn, x = record(Referring).draw(0, 0, 2), torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = torch.stack([drawn.module(i)(x) for i in range(2)])
    assert torch.allclose(outputs(drawn, x, max_memory=20_000), whole, atol=1e-5)  # not cut into pieces


def test_a_factory_without_chance_has_no_ensemble() -> None:
    base = nn.Linear(5, 1)
    assert not record(lambda: copy.deepcopy(base)).draws
    assert record(lambda: nn.Linear(5, 1)).draws
    with pytest.raises(InputError, match="the factory gives the same network"):
        nads(lambda: copy.deepcopy(base), (5,), 100)
    direction = nads(lambda: copy.deepcopy(base), (5,), 1).directions[0]
    assert float((direction * base.weight[0]).sum().abs()) == pytest.approx(
        float(base.weight.norm().detach()), rel=1e-4
    )
    done = train_ensemble(lambda: copy.deepcopy(base), [(torch.ones(4, 5), torch.ones(4))] * 2, loss="mse", epochs=1)
    assert len(done.losses) == 2  # several tasks from one start are fine
