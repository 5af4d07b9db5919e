"""A small vision transformer, with or without layer norm."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.nets.parts import Activation, make_activation
from biascope.nets.registry import register
from biascope.support.errors import InputError
from biascope.support.limits import Count
from biascope.support.signatures import checked

Norm = Literal["layer", "none"]
Kernel = Literal["fused", "explicit"]


class Attention(nn.Module):
    """Multi-head self-attention from four plain linear layers: [n, tokens, width] -> [n, tokens, width].

    `kernel="explicit"` writes softmax(q k^T / sqrt(d)) v out, so that forward-mode and second derivatives and vmap all
    work. `kernel="fused"` calls torch's scaled_dot_product_attention, whose CPU kernel knows only first derivatives in
    reverse mode; same numbers, less memory when there are many tokens.
    """

    def __init__(self, width: int, *, heads: int, kernel: Kernel = "explicit") -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"ViT: width={width} is not a multiple of heads={heads}")
        self.heads, self.kernel = heads, kernel
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] -> [n, tokens, width]."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.kernel == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v)  # [n, heads, tokens, width / heads]
        else:
            mixed = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mlp: int,
        norm: Norm = "layer",
        activation: Activation = "gelu",
        attention: Kernel = "explicit",
    ) -> None:
        super().__init__()
        self.norm1 = _norm(norm, width)
        self.attention = Attention(width, heads=heads, kernel=attention)
        self.norm2 = _norm(norm, width)
        self.fc1 = nn.Linear(width, mlp)
        self.act = make_activation(activation)
        self.fc2 = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] -> [n, tokens, width]."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        return out


@register("vit", summary="vision transformer for small data, patch 8, depth 9", input_shape=(1, 32, 32))
@register("vit-nonorm", summary="the same without layer norm", input_shape=(1, 32, 32), norm="none")
class ViT(nn.Module):
    """Patches, a class token, learned positions, `depth` blocks, and a linear head on the class token.

    [n, in_channels, image_size, image_size] -> [n, outputs]. Class token and positions start from N(0, 0.02^2); all
    other layers as torch does. `norm`: "layer" (before each branch and before the head) or "none".
    `attention`: "explicit" (any derivative) or "fused" (see `Attention`).
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: Count = 1,
        outputs: Count = 1,
        image_size: Count = 32,
        patch: Count = 8,
        depth: Count = 9,
        heads: Count = 12,
        width: Count = 192,
        mlp: Count = 768,
        norm: Norm = "layer",
        activation: Activation = "gelu",
        attention: Kernel = "explicit",
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise InputError(f"ViT: image_size={image_size} is not a multiple of patch={patch}")
        self.patches = nn.Conv2d(in_channels, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch) ** 2, width))
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.Sequential(
            *(
                EncoderBlock(width, heads=heads, mlp=mlp, norm=norm, activation=activation, attention=attention)
                for _ in range(depth)
            )
        )
        self.norm = _norm(norm, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_channels, image_size, image_size] -> [n, outputs]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # [n, patches, width]
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return out


def _norm(norm: Norm, width: int) -> nn.Module:
    return nn.LayerNorm(width) if norm == "layer" else nn.Identity()
