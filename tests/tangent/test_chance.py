"""Networks that draw random numbers are refused wherever they would be evaluated more than once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.support.errors import UnsupportedError
from biascope.tangent import lazy, linearize, linearized_prediction, perturbation_response, taylor_residual


class Dropping(nn.Module):
    """Dropout as a function, which no layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


X = torch.linspace(-1, 1, 15).view(5, 3)
USES: dict[str, Callable[[nn.Module], object]] = {
    "linearize": lambda net: linearize(net)(X),
    "linearize, forward mode": lambda net: linearize(net, engine="jvp")(X),
    "lazy": lambda net: lazy(net, 3.0)(X),
    "prediction": lambda net: linearized_prediction(net, net.state_dict(), X),
    "residual": lambda net: taylor_residual(net, {k: 2 * p for k, p in net.state_dict().items()}, X),
    "response": lambda net: perturbation_response(net, X, torch.ones(16), 0.1),
}


@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("make", [Dropping, lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU())])
def test_chance_is_refused_in_train_mode_and_the_random_state_left_alone(
    use: str, make: Callable[[], nn.Module]
) -> None:
    net = make().train()
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        USES[use](net)
    assert torch.equal(before, torch.get_rng_state())
    USES[use](net.eval())
    assert torch.equal(before, torch.get_rng_state())


def test_a_refused_network_is_refused_again() -> None:
    for net in (linearize(Dropping()), lazy(Dropping(), 3.0)):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="draws random numbers"):
                net(X)
