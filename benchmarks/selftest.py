"""A benchmark of the harness itself: Gram matrices three ways, one rival that is not there and one that is wrong."""

import torch
from harness import Case, Contender, main
from torch import Tensor


def setup(n: int, d: int, device: str) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0)).to(device)


def row_by_row(x: Tensor) -> Tensor:
    return torch.stack([x @ row for row in x])


def through_float64(x: Tensor) -> Tensor:
    return (x.double() @ x.double().T).float()


CONTENDERS = (
    Contender("biascope", lambda x: x @ x.T),
    Contender("row by row", row_by_row),
    Contender("float64", through_float64),
    Contender("absent", lambda x: x, requires=("a_package_nobody_has",)),
    Contender("wrong", lambda x: x @ x.T + 1),
)
CASES = [
    Case(
        f"gram-{n}x{d}",
        lambda device, n=n, d=d: setup(n, d, device),
        CONTENDERS,
        reference=lambda x: x.double() @ x.double().T,
    )
    for n, d in ((256, 64), (1024, 256))
]

if __name__ == "__main__":
    main(CASES, __file__)
