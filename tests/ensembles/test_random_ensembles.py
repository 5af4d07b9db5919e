"""Ensembles of random networks against plain loops: outputs, gradients, directions, geometries, training."""

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.ensembles import Initialiser, Networks, data_order, input_gradients, outputs, record, train_ensemble
from biascope.geometry.average import draw_probes
from biascope.network.derivatives import RightGradients, differentiable_attention
from biascope.support.errors import InputError
from random_networks import DOUBLE, network

T = 4


def factory(seed: int) -> Callable[[], nn.Module]:
    """Always the same structure; in a third of them some parameters are frozen."""

    def build() -> nn.Module:
        r = random.Random(seed)
        net, _ = network(r)
        if r.random() < 0.3:
            for p in net.parameters():
                p.requires_grad_(r.random() < 0.6)
        return net

    return build


def modules(networks: Networks) -> Iterator[nn.Module]:
    return (networks.module(i) for i in range(len(networks)))


def scalar(net: nn.Module, x: Tensor) -> Tensor:
    with RightGradients():
        return net(x)[:, 0]


def slope(net: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_(True)
    return torch.autograd.grad(scalar(net, leaf[None])[0], leaf)[0].flatten()


def moment(rows: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(rows))
    return stacked.T @ stacked / len(stacked)


def flow(net: nn.Module, x: Tensor, y: Tensor) -> dict[nn.Parameter, Tensor]:
    """Minus the gradient of half the summed squares."""
    trained = [p for p in net.parameters() if p.requires_grad]
    found = torch.autograd.grad(0.5 * (scalar(net, x) - y).square().sum(), trained, allow_unused=True)
    return {p: torch.zeros_like(p) if g is None else -g for p, g in zip(trained, found)}


def moved(net: nn.Module, x: Tensor, velocity: dict[nn.Parameter, Tensor]) -> Tensor:
    """Derivative of the slope along the flow, by differences."""
    step, ends = 1e-6 / max(1e-9, float(sum(v.square().sum() for v in velocity.values()) ** 0.5)), []
    for sign in (1, -1):
        with torch.no_grad():
            for p, v in velocity.items():
                p.add_(v, alpha=sign * step)
        ends.append(slope(net, x))
        with torch.no_grad():
            for p, v in velocity.items():
                p.sub_(v, alpha=sign * step)
    return (ends[0] - ends[1]) / (2 * step)


def mixed(net: nn.Module, x: Tensor) -> Tensor:
    """H^T H of the derivatives by parameters and input."""
    trained, leaf = [p for p in net.parameters() if p.requires_grad], x.clone().requires_grad_(True)
    with differentiable_attention():
        (first,) = torch.autograd.grad(scalar(net, leaf[None])[0], leaf, create_graph=True)
        columns = []
        for entry in first.flatten():
            grads = (
                torch.autograd.grad(entry, trained, retain_graph=True, allow_unused=True)
                if entry.requires_grad
                else [None] * len(trained)
            )
            columns.append(
                torch.cat(
                    [torch.zeros(p.numel(), dtype=DOUBLE) if g is None else g.flatten() for p, g in zip(trained, grads)]
                )
            )
    H = torch.stack(columns, 1)
    return H.T @ H


def trained_plainly(
    initialiser: Initialiser, x: Tensor, y: Tensor, i: int, wd: float, mom: float
) -> tuple[Tensor, Tensor]:
    """Parameters and buffers after six steps of torch's SGD, and the losses."""
    net, losses, lr = initialiser.draw(3, i, i + 1).module(0).train(), [], 0.1
    sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr, mom, weight_decay=wd)
    for epoch in range(2):
        for batch in torch.split(data_order(3, i, epoch, len(x)), 3):
            sgd.param_groups[0]["lr"] = lr * (1 - len(losses) / 6)
            sgd.zero_grad()
            with RightGradients():
                loss = F.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            sgd.step()
            losses.append(loss.detach())
    return flat(net), torch.stack(losses)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in net.state_dict().values()])


def trainable(net: nn.Module) -> bool:
    return any(p.requires_grad for p in net.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(15 * block, 15 * block + 15) for block in range(8)])
def test_right_for_random_networks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        initialiser = record(factory(seed))
        _, shape = network(random.Random(seed))
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(5, *shape, generator=rng, dtype=DOUBLE)
        D, drawn = x[0].numel(), initialiser.draw(3, 1, 1 + T)
        nets = list(modules(drawn))
        out, slopes = (
            torch.stack([n(x) for n in nets]),
            torch.stack([torch.stack([slope(n, z) for z in x]) for n in nets]),
        )
        pairs = [(f"outputs, {engine}", outputs(drawn, x, engine=engine), out) for engine in ("loop", "vmap")]
        first = {"scalarise": lambda out: out[:, 0]}
        pairs += [
            (f"slopes, {engine}", input_gradients(drawn, x, engine=engine, **first).flatten(2), slopes)  # type: ignore[arg-type]
            for engine in ("loop", "vmap")
        ]
        options = {"dtype": DOUBLE, "seed": 3, **first}
        nets = list(modules(initialiser.draw(3, 0, T)))
        found = bs.nads(initialiser, shape, T, method="autograd", x=x[0], **options)  # type: ignore[arg-type]
        U = found.directions.flatten(1).double()
        pairs.append(("directions", (U.T * found.eigenvalues) @ U, moment(slope(n, x[0]) for n in nets)))
        probes = draw_probes(3, 0, T, 2, shape, 1.0).double()
        G = bs.average_geometry(initialiser, shape, T, n_probes=2, **options).matrix  # type: ignore[arg-type]
        pairs.append(("G", G, moment(slope(n, z) for n, own in zip(nets, probes) for z in own)))
        if trainable(initialiser.template):
            y = torch.arange(5, dtype=DOUBLE)
            Delta = bs.geometry_evolution(initialiser, x, y, T, n_probes=2, **options).matrix  # type: ignore[arg-type]
            B = torch.zeros(D, D, dtype=DOUBLE)
            for n, own in zip(nets, probes):
                velocity = flow(n, x, y)
                B += sum(torch.outer(moved(n, z, velocity), slope(n, z)) for z in own) / (2 * T)
            pairs.append(("Delta", Delta, B + B.T))
            if D <= 40:
                truth = torch.linalg.eigvalsh(sum(mixed(n, x[0]) for n in nets) / T).flip(0)[:2]  # type: ignore[arg-type]
                second = {"method": "mixed-derivative", "x": x[0], "top": 2, **options}
                if truth[0] > 0:
                    pairs.append(("mixed derivatives", bs.nads(initialiser, shape, T, **second).eigenvalues, truth))  # type: ignore[arg-type]
                else:  # directions of zero would be arbitrary
                    with pytest.raises(InputError, match="all mixed derivatives are zero"):
                        bs.nads(initialiser, shape, T, **second)  # type: ignore[arg-type]
            if not any(
                isinstance(m, nn.BatchNorm1d) for m in initialiser.template.modules()
            ):  # refuses single examples
                tasks = [
                    (torch.randn(7, *shape, generator=rng, dtype=DOUBLE), torch.randint(2, (7,), generator=rng))
                    for _ in range(2)
                ]
                plain = [trained_plainly(initialiser, *task, i, 0.01, 0.9) for i, task in enumerate(tasks)]
                for engine in ("loop", "vmap"):
                    done = train_ensemble(initialiser, tasks, epochs=2, batch_size=3, lr=0.1, momentum=0.9,
                                          weight_decay=0.01, seed=3, engine=engine)  # type: ignore[arg-type]  # fmt: skip
                    assert done.networks is not None
                    after = torch.stack([flat(n) for n in modules(done.networks)])
                    pairs.append((f"trained, {engine}", after, torch.stack([state for state, _ in plain])))
                    losses = torch.stack([history for _, history in plain])
                    torch.testing.assert_close(done.losses, losses.float(), rtol=1e-5, atol=1e-6)
        for what, measured, expected in pairs:
            error, size = float((measured - expected).norm()), float(expected.norm())
            tolerance = 1e-4 if what == "Delta" else 1e-8  # its truth is a difference
            assert error <= tolerance * size + 1e-10, f"seed {seed}, {what}: {error / size:.1e}\n{initialiser.template}"
