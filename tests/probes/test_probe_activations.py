"""Every activation of the examples counts, wherever they lie in the tensor; what has no value is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.probes import View, path_norm, sign_similarity
from biascope.probes.groups import example_losses
from biascope.support.errors import InputError

X = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))


class Tokens(nn.Module):
    """Two hidden layers of 4 units at each of 5 tokens: in one long batch, tokens first, or examples first."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.c, self.b, self.order = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2), order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "long":
            h = self.a(x.reshape(-1, 3)).relu().reshape(len(x), 5, 4)
        elif self.order == "tokens first":
            h = self.a(x.transpose(0, 1)).relu().transpose(0, 1)
        else:
            h = self.a(x).relu()
        return self.b(self.c(h).relu().mean(1))


def test_units_of_tokens_count_in_every_order() -> None:
    """With tokens in one long batch or first, the first layer was left out without a word."""
    nets = {order: Tokens(order) for order in ("examples first", "long", "tokens first")}
    after = Tokens("examples first")
    expected, patterns = None, None
    for order, net in nets.items():
        net.load_state_dict(nets["examples first"].state_dict())
        moved = Tokens(order)
        moved.load_state_dict(after.state_dict())
        start = View.of(net, X)
        assert [tuple(s.shape) for s in start.signs] == [(6, 20), (6, 20)]
        found = sign_similarity(View.of(moved, X, init=start))
        expected, patterns = expected or found, patterns or start.signs
        assert found == expected
        assert all(torch.equal(s, t) for s, t in zip(start.signs, patterns))
    assert expected is not None
    assert expected < 1


@pytest.mark.parametrize(
    "function",
    [
        *(torch.tanh_, Tensor.sigmoid_, F.elu_, F.selu_, F.celu_, F.hardtanh_, torch.selu, torch.celu),
        *(F.hardsigmoid, F.softsign),
        lambda h: torch.threshold(h, 0, 0),
    ],
)
def test_other_spellings_of_activations_are_seen(function: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.b(function(self.a(x))))

    net, x = Net(), X[:, 0]
    signs = View.of(net, x).signs
    assert [tuple(s.shape) for s in signs] == [(6, 4), (6, 2)]
    assert torch.equal(signs[0], net.a(x) > 0)
    plain = nn.Sequential(net.a, nn.ReLU(), net.b, nn.ReLU())
    assert path_norm(net, x) == pytest.approx(path_norm(plain, x), rel=1e-12)


def test_a_logistic_loss_of_several_outputs_is_refused() -> None:
    """It was that of the first output."""
    with pytest.raises(InputError, match="logistic loss of 2 outputs"):
        example_losses(torch.zeros(3, 2), torch.tensor([0, 1, 1]), "logistic")
