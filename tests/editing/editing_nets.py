"""Networks whose task vectors are known: shared by the tests of this room."""

import torch
from torch import Tensor, nn

from biascope.editing import TaskVector


def mlp(seed: int = 0, inputs: int = 4, outputs: int = 3, width: int = 6) -> nn.Module:
    gen = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64) / p.shape[-1] ** 0.5)
    return net


def random_vector(net: nn.Module, seed: int, scale: float = 0.3) -> TaskVector:
    gen = torch.Generator().manual_seed(seed)
    return TaskVector.from_tensors(
        {k: scale * torch.randn(p.shape, generator=gen, dtype=torch.float64).to(p) for k, p in net.named_parameters()}
    )


def points(n: int, seed: int, inputs: int = 4) -> Tensor:
    return torch.randn(n, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Gated(nn.Module):
    """Two networks side by side; which one answers is a matter of the first input's sign: disjoint supports."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(1), mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] < 0, self.left(x), self.right(x))

    def data(self, n: int = 40) -> tuple[Tensor, Tensor]:
        """Inputs of the left and of the right network."""
        x, z = points(n, 3), points(n, 4)
        x[:, 0], z[:, 0] = -x[:, 0].abs() - 0.1, z[:, 0].abs() + 0.1
        return x, z

    def vectors(self) -> tuple[TaskVector, TaskVector]:
        """One that moves the left network only, one that moves the right only."""
        full = random_vector(self, 5, scale=1.0)
        zero = {k: torch.zeros_like(t) for k, t in full.tensors.items()}
        parts = [{k: t for k, t in full.tensors.items() if k.startswith(side)} for side in ("left", "right")]
        return TaskVector.from_tensors(zero | parts[0]), TaskVector.from_tensors(zero | parts[1])
