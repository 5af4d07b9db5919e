"""The deep auto-encoder of the optimisation literature."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from biascope.signatures import checked

from .parts import Activation, check_sizes, make_activation
from .registry import register


@register("autoencoder", summary="784-1000-500-250-30 and back, sigmoid, untied, 8 layers", input_shape=(1, 28, 28))
class Autoencoder(nn.Module):
    """in_features-1000-500-250-30 and its mirror image, weights untied: [n, ...] -> [n, in_features].

    The activation follows every layer but the last, the code included. The output is left as logits by default, for a
    Bernoulli loss; `output_activation="sigmoid"` gives pixel intensities. `code_activation` sets the code's apart.

    Example:
        >>> import torch
        >>> net = Autoencoder(in_features=784)
        >>> net(torch.zeros(3, 1, 28, 28)).shape, net.encoder(torch.zeros(3, 784)).shape
        (torch.Size([3, 784]), torch.Size([3, 30]))
    """

    @checked
    def __init__(
        self,
        *,
        in_features: int = 784,
        hidden: Sequence[int] = (1000, 500, 250, 30),
        activation: Activation = "sigmoid",
        code_activation: Activation | None = None,
        output_activation: Activation = "identity",
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, hidden=hidden)
        down = (in_features, *hidden)
        self.encoder = _stack(down, activation, last=activation if code_activation is None else code_activation)
        self.decoder = _stack(down[::-1], activation, last=output_activation)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, in_features], the reconstruction (as logits by default)."""
        out: Tensor = self.decoder(self.encoder(x.flatten(1)))
        return out


def _stack(widths: Sequence[int], activation: Activation, last: Activation) -> nn.Sequential:
    stack = nn.Sequential()
    for index, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        stack.add_module(f"fc{index}", nn.Linear(fan_in, fan_out))
        stack.add_module(f"act{index}", make_activation(last if index == len(widths) - 1 else activation))
    return stack
