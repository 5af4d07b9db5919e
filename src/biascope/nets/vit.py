"""A small vision transformer, with or without layer norm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.errors import InputError
from biascope.signatures import checked

from .parts import Activation, check_choice, check_sizes, make_activation
from .registry import register


class Attention(nn.Module):
    """Multi-head self-attention from four plain linear layers: [n, tokens, width] -> [n, tokens, width].

    `kernel="explicit"` writes softmax(q k^T / sqrt(d)) v out, so that forward-mode and second derivatives and vmap all
    work. `kernel="fused"` calls torch's scaled_dot_product_attention, whose CPU kernel knows only first derivatives in
    reverse mode; same numbers, less memory when there are many tokens.

    Example:
        >>> import torch
        >>> Attention(16, heads=4)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, *, heads: int, kernel: str = "explicit") -> None:
        super().__init__()
        check_choice("attention", kernel, ("fused", "explicit"))
        if width % heads:
            raise InputError(f"ViT: width={width} is not a multiple of heads={heads}")
        self.heads, self.kernel = heads, kernel
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] -> [n, tokens, width]."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.kernel == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v)  # [n, heads, tokens, width / heads]
        else:
            mixed = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Example:
        >>> import torch
        >>> EncoderBlock(16, heads=4, mlp=32)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mlp: int,
        norm: str = "layer",
        activation: Activation = "gelu",
        attention: str = "explicit",
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

    Example:
        >>> import torch
        >>> net = ViT(patch=8, depth=2, heads=3, width=48, mlp=96, outputs=10)
        >>> net(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """

    @checked
    def __init__(
        self,
        *,
        in_channels: int = 1,
        outputs: int = 1,
        image_size: int = 32,
        patch: int = 8,
        depth: int = 9,
        heads: int = 12,
        width: int = 192,
        mlp: int = 768,
        norm: str = "layer",
        activation: Activation = "gelu",
        attention: str = "explicit",
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, outputs=outputs, image_size=image_size, patch=patch)
        check_sizes(depth=depth, heads=heads, width=width, mlp=mlp)
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


def _norm(norm: str, width: int) -> nn.Module:
    check_choice("norm", norm, ("layer", "none"))
    return nn.LayerNorm(width) if norm == "layer" else nn.Identity()
