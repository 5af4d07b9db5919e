"""Evaluation of stacked networks against plain modules."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from biascope import nets
from biascope.ensembles import input_gradients, outputs, record
from biascope.ensembles.engines import Plan
from biascope.ensembles.evaluate import scalar_of
from biascope.ensembles.products import AffineNorm, affine_norm
from biascope.support.errors import InputError, UnsupportedError


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    )


@pytest.fixture(scope="module")
def drawn():  # type: ignore[no-untyped-def]
    return record(small).draw(0, 0, 7, dtype=torch.float64)


@pytest.mark.parametrize("plan", [Plan("loop", 3), Plan("loop", 2, 1, True), Plan("vmap", 4, 3), None])
@pytest.mark.parametrize("per_network", [False, True])
def test_outputs(drawn, plan, per_network) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(7, 5, 1, 8, 8, dtype=torch.float64)
    found = outputs(drawn, x if per_network else x[0], per_network=per_network, plan=plan)
    for t in range(7):
        expected = drawn.module(t)(x[t] if per_network else x[0]).detach()
        assert torch.allclose(found[t], expected, atol=1e-12)


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("per_network", [False, True])
def test_input_gradients(drawn, engine, per_network) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(7, 4, 1, 8, 8, dtype=torch.float64)
    found = input_gradients(
        drawn, x if per_network else x[0], per_network=per_network, engine=engine, max_memory=200_000
    )
    assert found.shape == (7, 4, 1, 8, 8)
    for t in range(7):
        leaf = (x[t] if per_network else x[0]).clone().requires_grad_(True)
        out = drawn.module(t)(leaf)
        expected = torch.autograd.grad((out[:, 1] - out[:, 0]).sum(), leaf)[0]
        assert torch.allclose(found[t], expected, atol=1e-12)


def test_a_tight_budget_changes_nothing(drawn) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(9, 1, 8, 8, dtype=torch.float64)
    assert torch.allclose(outputs(drawn, x, max_memory=20_000), outputs(drawn, x), atol=1e-12)


def test_scalars() -> None:
    out = torch.randn(4, 3)
    with pytest.raises(InputError, match="3 outputs"):
        scalar_of(out)
    assert torch.equal(scalar_of(out, lambda o: o[:, 2]), out[:, 2])
    with pytest.raises(InputError, match="must give"):
        scalar_of(out, lambda o: o)
    for made in (out[:, 0] > 0, out.argmax(1), torch.complex(out[:, 0], out[:, 1])):
        with pytest.raises(InputError, match=f"of {made.dtype} from"):
            scalar_of(out, lambda o, made=made: made)


def test_refusals(drawn) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(3, 1, 8, 8)
    with pytest.raises(UnsupportedError, match="CUDA"):
        outputs(drawn, x, engine="graph")
    with pytest.raises(InputError, match="engine"):
        outputs(drawn, x, engine="fast")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="7 networks"):
        outputs(drawn, x, per_network=True)
    with pytest.raises(UnsupportedError, match="bf16"):
        outputs(drawn, x, precision="bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "loop", "vmap", "graph"])
def test_outputs_on_a_gpu(engine) -> None:  # type: ignore[no-untyped-def]
    drawn = record(lambda: nets.build("lenet")).draw(0, 0, 5, device="cuda")
    x = torch.randn(65, 1, 32, 32, device="cuda")
    found = outputs(drawn, x, engine=engine)
    for t in range(5):
        assert torch.allclose(found[t], drawn.module(t)(x).detach(), atol=1e-5)
    close = outputs(drawn, x, engine="graph", precision="bf16")
    assert (close - found).abs().max() < 0.05 * found.abs().max()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)])
def test_batch_norm_as_an_affine_map(affine, shape) -> None:  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(0)
    x, mean = torch.randn(*shape, generator=g, dtype=torch.float64), torch.randn(3, generator=g, dtype=torch.float64)
    var = mean.square() + 0.1
    weight, bias = (mean + 2, mean - 1) if affine else (None, None)
    expected = torch.nn.functional.batch_norm(x, mean, var, weight, bias, eps=1e-3)
    assert torch.allclose(affine_norm(x, mean, var, weight, bias, eps=1e-3), expected, rtol=1e-12, atol=1e-12)
    with AffineNorm():
        assert torch.allclose(torch.nn.functional.batch_norm(x, mean, var, weight, bias, eps=1e-3), expected)
        live = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    assert torch.allclose(live, torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True))


def test_what_vmap_cannot_run_and_inputs_without_gradients_are_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0][:, -1]
            return out

    drawn, x = record(Recurrent).draw(0, 0, 3), torch.ones(4, 5, 3)
    with pytest.raises(UnsupportedError, match=r"vmap cannot run Recurrent \(RuntimeError.*use engine='loop'"):
        outputs(drawn, x, engine="vmap")
    assert outputs(drawn, x).shape == (3, 4, 2)

    class Hooked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_full_backward_hook(lambda part, given, got: None)

    hooked = record(Hooked).draw(0, 0, 3)
    with pytest.raises(UnsupportedError, match=r"vmap cannot differentiate Hooked \(.*use engine='loop'"):
        input_gradients(hooked, torch.ones(4, 3), engine="vmap")
    assert input_gradients(hooked, torch.ones(4, 3)).shape == (3, 4, 3)
    tokens = record(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))).draw(0, 0, 3)
    with pytest.raises(InputError, match=r"x is torch\.int64: real floating-point"):
        input_gradients(tokens, torch.ones(4, 2, dtype=torch.long))


@pytest.mark.parametrize("frozen", [True, False])
def test_networks_that_run_again_in_the_backward_pass_are_refused(frozen: bool) -> None:
    """They ran with the template's parameters then: wrong gradients where the layer is frozen, else a raw error."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4).requires_grad_(not frozen), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            body = checkpoint(lambda t: self.layer(t).tanh(), x, use_reentrant=False)
            out: Tensor = self.head(body)
            return out

    stack = record(Checkpointed).draw(0, 0, 3)
    for engine in ("auto", "loop"):
        with pytest.raises(UnsupportedError, match="Checkpointed runs parts of itself again in the backward pass"):
            input_gradients(stack, torch.ones(2, 3), engine=engine)  # type: ignore[arg-type]
    assert outputs(stack, torch.ones(2, 3)).shape == (3, 2, 1)
