"""The deep linear model of pooling: f(x) = theta^T A (m . phi . x)."""

import math

import torch
from torch import Tensor, nn

from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count, NonNegative
from biascope.support.signatures import checked


def box_prefilter(in_features: int, stride: int) -> Tensor:
    """The DFT magnitudes [D] of the box filter of length S = `stride` on D = `in_features` points.

    m[k] = |sin(pi k S/D)| / (S |sin(pi k/D)|), k = 0 .. D - 1. Where M = D/S is whole, it is zero at the multiples of M
    but 0, and sum_k m[l + kM]^2 = 1 for every l.
    """
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
    """

    prefilter: Tensor

    @checked
    def __init__(
        self,
        *,
        in_features: Count = 128,
        stride: Count = 4,
        prefilter: Tensor | None = None,
        s_theta: NonNegative = 1.0,
        s_phi: NonNegative = 1.0,
    ) -> None:
        super().__init__()
        if in_features % stride:
            raise InputError(f"LinearPooling: in_features={in_features} is not a multiple of stride={stride}")
        prefilter = box_prefilter(in_features, stride) if prefilter is None else prefilter
        if prefilter.shape != (in_features,):
            raise InputError(f"LinearPooling: prefilter has shape {tuple(prefilter.shape)}, not ({in_features},)")
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
        """A as a dense matrix [M, D]."""
        eye = torch.eye(len(self.theta), dtype=self.theta.dtype, device=self.theta.device)
        return eye.repeat(1, self.stride) / math.sqrt(self.stride)

    def input_gradient(self) -> Tensor:
        """df/dx = (A^T theta) . phi . m, [D]; the same for every x."""
        return self.theta.repeat(self.stride) / math.sqrt(self.stride) * self.phi * self.prefilter
