"""What is measured in float32 is measured in all of it: tf32, the user's choice or cuDNN's default, ends at the door.

The setting can be seen without a GPU, so the networks here look at it while they are evaluated.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.probes import View
from biascope.probes.metrics import REGISTER
from biascope.spectral import autoneb, spectral_norm
from biascope.spectral.perturb import high_frequency_volume, perturbation_robustness
from biascope.support.precision import arithmetic, convolves_in_tf32, multiplies_in_tf32
from biascope.tangent import linearized_prediction, taylor_residual

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 3, generator=GENERATOR), torch.tensor([0, 1, 0, 1, 1, 0])


class Looks(nn.Module):
    """A network that keeps whether products or convolutions were in tf32 while it was evaluated."""

    def __init__(self, inputs: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))
        self.seen: list[bool] = []
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=GENERATOR))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(convolves_in_tf32() or multiplies_in_tf32())
        out: Tensor = self.net(x)
        return out

    def __deepcopy__(self, memo: object) -> "Looks":
        twin = Looks.__new__(Looks)
        nn.Module.__init__(twin)
        twin.net = nn.Sequential(nn.Linear(*self.net[0].weight.shape[::-1]), nn.ReLU(), nn.Linear(8, 2))
        twin.net.load_state_dict(self.net.state_dict())
        twin.seen = self.seen  # copies tell the same list
        return twin


CALLS: dict[str, Callable[[Looks], object]] = {
    "outputs": lambda net: View.of(net, X, Y).outputs,
    "evaluate": lambda net: View.of(net, X, Y).evaluate(X),
    "losses": lambda net: View.of(net, X, Y).losses,
    "signs": lambda net: View.of(net, X, Y).signs,
    "hidden": lambda net: View.of(net, X, Y).hidden(),
    "input gradients": lambda net: View.of(net, X, Y).input_gradients(),
    "kernel": lambda net: View.of(net, X, Y).kernel,
    "feature norm": lambda net: View.of(net, X, Y).feature_norm,
    "probe": lambda net: bs.Probe(net, X, Y, metrics={"mine": lambda view: float(view.network(X).detach().sum())}),
    "taylor residual": lambda net: taylor_residual(net, Looks(), X),
    "tangent prediction": lambda net: linearized_prediction(net, Looks(), X),
    "autoneb": lambda net: autoneb(net, X[:2], X[2:4], Y[:2], rounds=1, steps=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_network_is_not_evaluated_in_tf32(name: str) -> None:
    net = Looks()
    with arithmetic("tf32"):
        CALLS[name](net)
        assert convolves_in_tf32()  # the user's own setting is put back
        assert multiplies_in_tf32()
    assert net.seen
    assert not any(net.seen)


@pytest.mark.parametrize("name", sorted(REGISTER))
def test_no_metric_is_measured_in_tf32(name: str) -> None:
    net, moved = Looks(), Looks()
    options = {"frequencies": [1]} if name == "fourier" else {}
    with arithmetic("tf32"):
        start = View.of(net, X, Y)
        now = View.of(moved, X, Y, init=start, previous=start, step=1)
        REGISTER[name].function(now, **options)
    assert not any(net.seen + moved.seen)


def test_frequencies_under_noise_are_not_measured_in_tf32() -> None:
    net, x = Looks(1, 1), torch.arange(16)[:, None] / 16
    with arithmetic("tf32"):
        perturbation_robustness(net, x, [1], [0.1], draws=2)
    assert net.seen
    assert not any(net.seen)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (torch.baddbmm, lambda: high_frequency_volume((1, 4, 1), 1.0, 0.01, (1,), samples=2, grid=16)),
        (Tensor.matmul, lambda: spectral_norm(torch.eye(3), 2)),
    ],
)
def test_products_without_a_network_are_not_in_tf32(
    function: Callable[..., Tensor], call: Callable[[], object]
) -> None:
    seen: list[bool] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is function:
                seen.append(multiplies_in_tf32())
            return func(*args, **(kwargs or {}))

    with arithmetic("tf32"), Watch():
        call()
    assert seen
    assert not any(seen)
