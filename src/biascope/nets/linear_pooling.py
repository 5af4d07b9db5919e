"""The deep linear model of pooling: f(x) = theta^T A (m . phi . x)."""

import math

import torch
from torch import Tensor, nn

from biascope.arguments import check_number
from biascope.errors import InputError
from biascope.signatures import checked

from .parts import check_sizes
from .registry import register


@checked
def box_prefilter(in_features: int, stride: int) -> Tensor:
    """The DFT magnitudes [D] of the box filter of length S = `stride` on D = `in_features` points.

    m[k] = |sin(pi k S/D)| / (S |sin(pi k/D)|), k = 0 .. D - 1. Where M = D/S is whole, it is zero at the multiples of M
    but 0, and sum_k m[l + kM]^2 = 1 for every l.

    Example:
        >>> box_prefilter(8, 2)[[0, 4]]
        tensor([1., 0.])
    """
    check_sizes(in_features=in_features, stride=stride)
    if stride > in_features:
        raise InputError(f"stride={stride} is longer than the signal, in_features={in_features}")
    k = torch.arange(1, in_features, dtype=torch.float64)
    rest = torch.sin(math.pi * k * stride / in_features) / (stride * torch.sin(math.pi * k / in_features))
    rest[k.long() * stride % in_features == 0] = 0.0  # exact zeros, not rounding noise
    return torch.cat([torch.ones(1, dtype=torch.float64), rest.abs()]).to(torch.get_default_dtype())


@register("linear-pooling", summary="deep linear model of pooling, theta^T A (m phi x)", input_shape=(128,))
class LinearPooling(nn.Module):
    """f(x) = theta^T A (m . phi . x) with A = S^(-1/2) [I_M ... I_M], M = D / S: [n, D] -> [n, 1].

    Pooling with stride S seen in the frequency domain: the prefilter m is fixed, theta [M] and phi [D] are trained and
    start from N(0, s_theta^2) and N(0, s_phi^2). `prefilter`: a tensor [D]; by default the box filter of length S.

    Gradients: df/dtheta = A (phi . m . x), df/dphi = (A^T theta) . m . x, df/dx = (A^T theta) . phi . m.

    Example:
        >>> import torch
        >>> LinearPooling(in_features=8, stride=2)(torch.zeros(3, 8)).shape
        torch.Size([3, 1])
    """

    prefilter: Tensor

    @checked
    def __init__(
        self,
        *,
        in_features: int = 128,
        stride: int = 4,
        prefilter: Tensor | None = None,
        s_theta: float = 1.0,
        s_phi: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, stride=stride)
        check_number(s_theta, "s_theta", least=0)
        check_number(s_phi, "s_phi", least=0)
        if in_features % stride:
            raise InputError(f"LinearPooling: in_features={in_features} is not a multiple of stride={stride}")
        if prefilter is None:
            prefilter = box_prefilter(in_features, stride)
        if prefilter.shape != (in_features,):
            raise InputError(
                f"LinearPooling: prefilter has shape {tuple(prefilter.shape)}, it must be ({in_features},)"
            )
        self.in_features, self.stride = in_features, stride
        self.register_buffer("prefilter", prefilter.detach().clone())
        self.theta = nn.Parameter(torch.randn(in_features // stride) * s_theta)
        self.phi = nn.Parameter(torch.randn(in_features) * s_phi)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_features] -> [n, 1]."""
        filtered = self.prefilter * self.phi * x.flatten(1)
        pooled = filtered.reshape(len(filtered), self.stride, -1).sum(1) / math.sqrt(self.stride)
        return pooled @ self.theta.unsqueeze(1)

    def pooling_matrix(self) -> Tensor:
        """A as a dense matrix [M, D].

        Example:
            >>> LinearPooling(in_features=4, stride=2).pooling_matrix().shape
            torch.Size([2, 4])
        """
        eye = torch.eye(len(self.theta), dtype=self.theta.dtype, device=self.theta.device)
        return eye.repeat(1, self.stride) / math.sqrt(self.stride)

    def input_gradient(self) -> Tensor:
        """df/dx = (A^T theta) . phi . m, [D]; the same for every x.

        Example:
            >>> LinearPooling(in_features=4, stride=2).input_gradient().shape
            torch.Size([4])
        """
        return self.theta.repeat(self.stride) / math.sqrt(self.stride) * self.phi * self.prefilter
