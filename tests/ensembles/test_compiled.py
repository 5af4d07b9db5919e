"""Networks compiled for long jobs: the same outputs, and no trust without a comparison."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.ensembles import Networks, compiled, engines, outputs, record, train_ensemble, work
from biascope.ensembles.engines import Plan


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced but not compiled: no C compiler is needed."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_network_is_put_into_the_compiled_one(eager: None, channels_last: bool) -> None:
    drawn = record(net).draw(0, 0, 3, dtype=torch.float64)
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made = compiled.compiled(drawn, x[:2], "float32", channels_last)
        assert made is not None
        assert compiled.compiled(drawn, x[:2], "float32", channels_last) is made
        found = engines.Replay(drawn, x, Plan("graph", 2, channels_last=channels_last), made)(drawn)
        again = engines.Replay(drawn, x, Plan("graph", 2, channels_last=channels_last), made)(drawn[1:])
    expected = torch.stack([drawn.module(i)(x) for i in range(3)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected[1:])


def test_wrong_outputs_and_errors_of_the_compiler_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 3)

    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C compiler\nand a long story")

    for fake, reason in ((lambda module, **kwargs: lambda x: 1.1 * module(x), "0.1 off"), (broken, "no C compiler")):
        drawn = record(lambda: nn.Linear(3, 2)).draw(0, 0, 2)
        monkeypatch.setattr(torch, "compile", fake)
        with torch.no_grad(), pytest.warns(UserWarning, match=reason):
            assert compiled.compiled(drawn, x, "float32", False) is None
        assert compiled.compiled(drawn, x, "float32", False) is None  # and is not tried again


def test_only_long_jobs_are_compiled() -> None:
    network = nn.Linear(1, 1)
    assert not compiled.worth_compiling(network, 0.01, 100, 1000)
    assert compiled.worth_compiling(network, 0.01, 100, 6000)
    assert not compiled.worth_compiling(network, 0.0, 100, 10**9)  # no choice of engines, so no time was taken


@pytest.mark.slow
def test_training_by_the_compiled_network(eager: None) -> None:
    """Outputs, gradients and running statistics of every network are those of the plain call, dropout included."""

    def factory() -> nn.Module:
        return nn.Sequential(net(), nn.Dropout(0.3))

    drawn = record(factory).draw(0, 0, 3)
    x = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    assert compiled.compiled_training(drawn, x, "float32", make=False) is None
    forward = compiled.compiled_training(drawn, x, "float32")
    assert forward is not None
    assert compiled.compiled_training(drawn, x, "float32", make=False) is forward
    for place in range(3):
        found = _pass(forward, drawn, place, x)
        expected = _pass(nn.Module.__call__, drawn, place, x)
        assert len(found) == len(expected) == 1 + 6 + 3
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)


def _pass(forward: compiled.Forward, drawn: Networks, place: int, x: torch.Tensor) -> list[torch.Tensor]:
    module = drawn.module(place).train()
    with torch.random.fork_rng([]):
        torch.manual_seed(place)
        out = forward(module, x)
        gradients = torch.autograd.grad(out.exp().sum(), list(module.parameters()))
    return [out.detach(), *gradients, *module.buffers()]


def test_wrong_gradients_statistics_and_errors_of_compiled_training_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C compiler\nand a long story")

    def half(function: Any, **kwargs: object) -> Any:  # the right outputs, half the gradient
        return lambda values, x: 0.5 * function(values, x) + 0.5 * function(values, x).detach()

    def forgetful(function: Any, **kwargs: object) -> Any:  # leaves the running mean as it was
        return lambda values, x: function({**values, "1.running_mean": values["1.running_mean"].clone()}, x)

    def nan(function: Any, **kwargs: object) -> Any:
        return lambda values, x: function(values, x) * torch.nan

    fakes = [(broken, "no C compiler"), (half, "gradients 0.5 off"), (forgetful, "outputs are"), (nan, "nan")]
    for fake, reason in fakes:
        drawn = record(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))).draw(0, 0, 2)
        monkeypatch.setattr(torch, "compile", fake)
        with pytest.warns(UserWarning, match=reason):
            assert compiled.compiled_training(drawn, x, "float32") is None
        assert compiled.compiled_training(drawn, x, "float32") is None  # and is not tried again


class Counting(nn.Linear):
    """A module whose passes differ by what it keeps in Python: each is compiled anew."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) * (1.0 if self.passes < 3 else 2.0)


def test_what_would_be_compiled_again_and_again_is_not_compiled(eager: None) -> None:
    drawn = record(lambda: Counting(3, 2)).draw(0, 0, 2)
    with pytest.warns(UserWarning, match="[Rr]ecompil"):
        assert compiled.compiled_training(drawn, torch.ones(4, 3), "float32") is None


def test_training_is_counted_apart() -> None:
    network = nn.Linear(1, 1)
    assert not compiled.worth_compiling(network, 1.0, 59, 59)
    assert not compiled.worth_compiling(network, 1.0, 299, 299, training=True)
    assert compiled.worth_compiling(network, 1.0, 1, 1)
    assert compiled.worth_compiling(network, 1.0, 1, 1, training=True)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_training_compiled_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the loop in float32; twice, since the second sweep finds the compiled network."""
    monkeypatch.setattr(compiled, "TRAINING_PAYS", 0.0)
    monkeypatch.setattr(work, "LONG", 0)
    g = torch.Generator().manual_seed(0)
    tasks = [(torch.randn(70, 1, 16, 16, generator=g), torch.arange(70) % 2) for _ in range(3)]
    initialiser = record(lambda: nets.build("resnet18", in_channels=1, outputs=2, width=8))
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 32, "lr": 0.05, "device": "cuda", "keep": False}
    expected = train_ensemble(initialiser, tasks, engine="loop", **settings).losses
    for _ in range(2):
        found = train_ensemble(initialiser, tasks, engine="graph", precision=precision, **settings).losses  # type: ignore[arg-type]
        made = compiled._HISTORIES[initialiser.template].training
        assert [forward is not None for forward in made.values()] == [True]
        assert (found - expected).abs().max() < {"float32": 2e-3}.get(precision, 5e-2) * expected.max()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "fp16"])
def test_compiled_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "PAYS", 0.0)
    drawn = record(lambda: nets.build("resnet18", in_channels=1, width=8)).draw(0, 0, 3, "cuda")
    x = torch.randn(64, 1, 32, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = outputs(drawn, x, engine="graph", precision=precision)  # type: ignore[arg-type]
    history = compiled._HISTORIES[drawn.template]
    assert [made is not None for made in history.made.values()] == [True]
    expected = outputs(drawn, x, engine="loop")
    assert (found - expected).norm() < {"float32": 1e-5}.get(precision, 2e-2) * expected.norm()
