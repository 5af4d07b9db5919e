"""Networks compiled for long jobs: the same outputs, and no trust without a comparison."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.ensembles import Plan, compiled, engines, outputs, record


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
