"""Logistic regression: the isotropic control."""

from torch import Tensor, nn

from biascope.signatures import checked

from .parts import check_sizes
from .registry import register


@register("logreg", summary="logistic regression, one linear layer", input_shape=(1, 32, 32))
class LogReg(nn.Module):
    """One linear layer on the flattened input: [n, ...] -> [n, outputs].

    Example:
        >>> import torch
        >>> LogReg(in_features=1024, outputs=2)(torch.zeros(3, 1, 32, 32)).shape
        torch.Size([3, 2])
    """

    @checked
    def __init__(self, *, in_features: int = 1024, outputs: int = 1) -> None:
        super().__init__()
        check_sizes(in_features=in_features, outputs=outputs)
        self.linear = nn.Linear(in_features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> [n, outputs]."""
        out: Tensor = self.linear(x.flatten(1))
        return out
