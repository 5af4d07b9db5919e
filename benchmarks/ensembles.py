"""Many networks at once against the plain loop a user would write: evaluation for anisotropy directions, and training.

"eager loop" builds and runs one network after another with torch as it comes (tf32 convolutions allowed on a GPU, as
is torch's default); "biascope" is `bs.nads` and `train_ensemble` with precision="tf32" on a GPU ("bf16" for training
large networks, checked against the loop's loss). Both do the same work: seconds are for NETWORKS networks.
"""

from typing import Any

import torch
from harness import Case, Contender, main
from torch import Tensor
from torch.nn import functional as F

from biascope import nets
from biascope.ensembles import data_order, record, train_ensemble
from biascope.geometry import nads

SHAPE = (1, 32, 32)
STEP = 100.0


def directions(name: str, networks: int, device: str) -> Any:
    """State of a NAD job: which networks, where, and the point at which they are probed."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return networks, device, x, record(lambda: nets.build(name, in_channels=1, outputs=1).eval())


def by_nads(state: Any) -> Tensor:
    networks, device, x, initialiser = state
    precision = "tf32" if device.startswith("cuda") else "float32"
    found = nads(initialiser, SHAPE, networks, step=STEP, device=device, x=x, precision=precision)
    return found.eigenvalues[:3]


def by_loop(state: Any) -> Tensor:
    """Every network is drawn by its constructor's distribution, perturbed inputs in one batch, as the public code."""
    networks, device, x, initialiser = state
    rows = []
    x = x.to(device)
    size = 256 if device == "cpu" else 1024
    bumps = STEP * torch.eye(x.numel(), device=device).view(-1, *SHAPE)
    with torch.no_grad():
        for t in range(networks):
            net = initialiser.draw(0, t, t + 1, device).module(0)
            pieces = [net(x + sign * part) for sign in (1, -1) for part in bumps.split(size)]
            up, down = torch.cat(pieces).flatten().chunk(2)
            rows.append((up - down) / (2 * STEP))
    gradients = torch.stack(rows).double()
    return torch.linalg.eigvalsh(gradients.T @ gradients / networks).flip(0)[:3]


def training(name: str, networks: int, n: int, device: str) -> Any:
    """State of a training job: one data set of n examples for each network."""
    g = torch.Generator().manual_seed(0)
    tasks = []
    for _ in range(networks):
        y = torch.randint(2, (n,), generator=g)
        x = torch.randn(n, *SHAPE, generator=g)
        x[:, 0, 0, 0] += 2.0 * y
        tasks.append((x.to(device), y.to(device)))
    return tasks, device, record(lambda: nets.build(name, in_channels=1, outputs=2))


def by_ensemble(precision: str) -> Any:
    def run(state: Any) -> Tensor:
        tasks, device, initialiser = state
        used = precision if device.startswith("cuda") else "float32"
        done = train_ensemble(
            initialiser, tasks, epochs=2, lr=0.05, device=device, precision=used, keep=False, schedule="constant"
        )
        return done.losses.mean()

    return run


def train_by_loop(state: Any) -> Tensor:
    tasks, device, initialiser = state
    losses = []
    for t, (x, y) in enumerate(tasks):
        net = initialiser.draw(0, t, t + 1, device).module(0).train()
        sgd = torch.optim.SGD(net.parameters(), 0.05)
        for epoch in range(2):
            for batch in data_order(0, t, epoch, len(x)).to(device).split(128):
                loss = F.cross_entropy(net(x[batch]), y[batch])
                sgd.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                sgd.step()
                losses.append(loss.detach())
        net.eval()
        with torch.no_grad():  # `train_ensemble` reports the training accuracy as well
            [net(piece) for piece in x.split(1024)]
    return torch.stack(losses).mean()


def _nad_case(name: str, networks: int, device: str, tolerance: float) -> Case:
    return Case(
        f"nads-{name}-{networks}",
        lambda device: directions(name, networks, device),
        (Contender("biascope", by_nads), Contender("eager loop", by_loop)),
        reference=by_loop,
        tolerance=tolerance,
        devices=(device,),
    )


def _train_case(name: str, networks: int, n: int, device: str, precision: str, tolerance: float) -> Case:
    return Case(
        f"train-{name}-{networks}x{2 * -(-n // 128)}steps",
        lambda device: training(name, networks, n, device),
        (Contender("biascope", by_ensemble(precision)), Contender("eager loop", train_by_loop)),
        reference=train_by_loop,
        tolerance=tolerance,  # of the mean loss over all steps and networks
        devices=(device,),
    )


CASES = [
    _nad_case("lenet", 64, "cpu", 1e-4),
    _nad_case("lenet", 2048, "cuda", 5e-3),
    _nad_case("resnet18", 64, "cuda", 5e-3),
    _nad_case("densenet121", 24, "cuda", 5e-3),
    _train_case("lenet", 16, 1280, "cpu", "float32", 1e-3),
    _train_case("lenet", 256, 640, "cuda", "tf32", 1e-2),
    _train_case("resnet18", 8, 2560, "cuda", "bf16", 5e-2),
    _train_case("vgg11", 8, 2560, "cuda", "bf16", 5e-2),
]

if __name__ == "__main__":
    main(CASES, __file__)
