"""Test accuracy after each epoch of EKFAC, KFAC and SuperNat with nothing given, beside Adam, and the cost of a step.

    python benchmarks/natural_gradient.py                          # reduced sizes, for a CPU
    python benchmarks/natural_gradient.py --full                   # whole data sets and networks, for a GPU
    python benchmarks/natural_gradient.py --full --steps 100       # only the time of a step, and the slowest
    python benchmarks/natural_gradient.py --only cnn --seeds 1,2,3 --out results/natural-gradient-cpu.json

A small convolutional network and a deep sigmoid auto-encoder (Glorot's initial values) on MNIST, ResNet-18 without
batch normalisation on CIFAR-10, a transformer that predicts the next character of this repository's documentation.
Adam, EKFAC, KFAC and SuperNat have their default learning rate, 0.001; SGD is there for the time and has 0.01 and
momentum 0.9; `--lr` is for all but SGD. Means over seeds, with standard errors; the time is of the whole training
divided by its steps, refreshes included, in processor seconds on a CPU; with `--steps`, of that many steps after the
first 50. Constants of the optimisers were chosen with seed 0: judge them with others.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs

ROOT = Path(__file__).resolve().parents[1]
OPTIMISERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "SGD": lambda net, lr: torch.optim.SGD(net.parameters(), 0.01, 0.9),
    "Adam": lambda net, lr: torch.optim.Adam(net.parameters(), lr),
    "EKFAC": lambda net, lr: bs.optim.EKFAC(net, lr),
    "KFAC": lambda net, lr: bs.optim.KFAC(net, lr),
    "SuperNat": lambda net, lr: bs.optim.SuperNat(net, lr),
}


@dataclass(frozen=True)
class Task:
    """What is trained: a network, examples and tests, the loss (lower is better) or the accuracy that is reported."""

    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    batch: int
    epochs: int
    loss: Callable[[Tensor, Tensor], Tensor]
    reported: str  # "accuracy" or "loss"

    def to(self, device: str) -> Task:
        """With its examples there."""
        parts = (self.x, self.y, self.test_x, self.test_y)
        x, y, test_x, test_y = (t.to(device) for t in parts)
        return replace(self, x=x, y=y, test_x=test_x, test_y=test_y)

    def report(self, net: nn.Module) -> float:
        """On the tests."""
        found = 0.0
        with torch.no_grad():
            for x, y in zip(self.test_x.split(500), self.test_y.split(500)):
                out = net(x)
                one = self.loss(out, y) if self.reported == "loss" else (out.argmax(-1) == y).float().mean()
                found += float(one) * len(x) / len(self.test_x)
        return found


def pictures(name: str, n: int, tests: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random part of a data set in 0 to 1, the same in every run; 0 for all of it."""
    parts = []
    for split, count in (("train", n), ("test", tests)):
        found = bs.data.load(name, split)
        keep = torch.randperm(len(found.x), generator=torch.Generator().manual_seed(5))[: count or None]
        parts += [found.x[keep].float(), found.y[keep]]
    return parts[0], parts[1], parts[2], parts[3]


def standard(x: Tensor, like: Tensor) -> Tensor:
    """With mean 0 and variance 1 in every channel, of `like`."""
    return (x - like.mean((0, 2, 3), keepdim=True)) / like.std((0, 2, 3), keepdim=True)


def cnn(full: bool) -> Task:
    """MNIST, two convolutions and two dense layers."""
    x, y, tx, ty = pictures("mnist", 0 if full else 4000, 0 if full else 2000)
    a, b = (32, 64) if full else (8, 16)

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, a, 5, 2, 2), nn.ReLU(), nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(49 * b, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    parts = [t.reshape(len(t), 1, 28, 28) for t in (x, tx)]
    batch, epochs = (128, 5) if full else (64, 3)
    return Task(build, standard(parts[0], parts[0]), y, standard(parts[1], parts[0]), ty, batch, epochs,
                F.cross_entropy, "accuracy")  # fmt: skip


def resnet(full: bool) -> Task:
    """CIFAR-10, ResNet-18 without batch normalisation, with the initial values made for that."""
    x, y, tx, ty = pictures("cifar10", 0 if full else 2000, 0 if full else 1000)
    width = 64 if full else 8

    def build() -> nn.Module:
        seed = int(torch.randint(2**31, ()))
        return bs.nets.build("resnet18-nobn", seed=seed, in_channels=3, outputs=10, width=width)

    batch, epochs = (128, 10) if full else (64, 4)
    return Task(build, standard(x, x), y, standard(tx, x), ty, batch, epochs, F.cross_entropy, "accuracy")


def autoencoder(full: bool) -> Task:
    """MNIST, cross-entropy per picture."""
    x, _, tx, _ = pictures("mnist", 0 if full else 3000, 0 if full else 1000)
    x, tx = x.flatten(1), tx.flatten(1)
    sizes = [784, 1000, 500, 250, 30] if full else [784, 200, 100, 30]

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in zip([*sizes, *sizes[-2::-1]], [*sizes[1:], *sizes[-2::-1]]):
            linear = nn.Linear(a, b)
            nn.init.xavier_normal_(linear.weight, gain=4.0)  # of the sigmoid
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Sigmoid()]
        return nn.Sequential(*layers[:-1])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y, reduction="none").sum(-1).mean()

    batch, epochs = (500, 20) if full else (64, 5)
    return Task(build, x, x, tx, tx, batch, epochs, loss, "loss")


class Transformer(nn.Module):
    """Pre-norm, causal; characters [n, length] to logits [n, length, characters]."""

    def __init__(self, characters: int, width: int, blocks: int, length: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length] to [n, length, characters]."""
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device).expand(len(x), -1))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two dense layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] to the same."""
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.mix(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def transformer(full: bool, long: bool = False) -> Task:
    """The next character of the documentation. `long`: of more text, for more epochs."""
    folder = ROOT / "docs" if full or long else ROOT / "docs" / "concepts"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))).lower()
    text, length = text if full else text[: 150_000 if long else 60_000], 64 if full else 32
    known = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([known[c] for c in text])
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(5))]
    cut = len(rows) * 85 // 100

    def build() -> nn.Module:
        width, blocks, heads = (256, 4, 4) if full else (64, 2, 4) if long else (48, 2, 3)
        return Transformer(len(known), width, blocks, length, heads)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y)

    train, test = rows[:cut], rows[cut:]
    batch, epochs = (32, 10) if full else (16, 8 if long else 4)
    return Task(build, train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], batch, epochs, loss, "accuracy")


TASKS = {"cnn": cnn, "resnet": resnet, "autoencoder": autoencoder, "transformer": transformer}
TASKS["transformer-long"] = partial(transformer, long=True)


def batches(task: Task, order: torch.Generator, device: str) -> Iterator[Tensor]:
    """Rows of one epoch."""
    found = torch.randperm(len(task.x), generator=order).to(device).split(task.batch)
    return (rows for rows in found if len(rows) == task.batch)


def wait(device: str) -> float:
    """Seconds by now, with all work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() if device == "cuda" else time.process_time()


def step(task: Task, net: nn.Module, opt: torch.optim.Optimizer, rows: Tensor) -> None:
    """One training step."""
    opt.zero_grad()
    task.loss(net(task.x[rows]), task.y[rows]).backward()
    opt.step()


def train(task: Task, optimiser: str, seed: int, device: str, lr: float = 1e-3) -> tuple[list[float], float]:
    """What is reported after each epoch, and milliseconds of a step."""
    torch.manual_seed(seed)
    net, order = task.build().to(device), torch.Generator().manual_seed(seed)
    opt = OPTIMISERS[optimiser](net, lr)
    found, seconds, steps = [], 0.0, 0
    for _ in range(task.epochs):
        begin = wait(device)
        for rows in batches(task, order, device):
            step(task, net, opt, rows)
            steps += 1
        seconds += wait(device) - begin
        found.append(task.report(net))
    return found, 1e3 * seconds / steps


def cost(task: Task, optimiser: str, steps: int, device: str) -> float:
    """Milliseconds of a step, after the first 50."""
    torch.manual_seed(0)
    net, order = task.build().to(device), torch.Generator().manual_seed(0)
    opt = OPTIMISERS[optimiser](net, 1e-3)
    rows = [r for _ in range(1 + (50 + steps) * task.batch // len(task.x)) for r in batches(task, order, device)]
    rows += rows * ((50 + steps) // len(rows))
    for r in rows[:50]:
        step(task, net, opt, r)
    begin = wait(device)
    for r in rows[50 : 50 + steps]:
        step(task, net, opt, r)
    return 1e3 * (wait(device) - begin) / steps


def slowest(task: Task, optimiser: str, device: str) -> float:
    """Milliseconds of the slowest of steps 4 to 21, waited for one by one: one that refreshes, where there is any."""
    torch.manual_seed(0)
    net, order = task.build().to(device), torch.Generator().manual_seed(0)
    opt, found = OPTIMISERS[optimiser](net, 1e-3), list[float]()
    for r in [r for _ in range(1 + 21 * task.batch // len(task.x)) for r in batches(task, order, device)][:21]:
        begin = wait(device)
        step(task, net, opt, r)
        found.append(1e3 * (wait(device) - begin))
    return max(found[3:])


def mean(values: list[float]) -> tuple[float, float]:
    """And its standard error."""
    m = sum(values) / len(values)
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / max(1, len(values) - 1) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="whole data sets and networks")
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--optimisers", default=",".join(OPTIMISERS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, help="instead of the task's own")
    parser.add_argument("--steps", type=int, default=0, help="only the time of so many steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--out", type=Path, help="JSON; what it holds of other tasks stays")
    args = parser.parse_args()
    begin, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    size = "full" if args.full else "reduced"
    kept: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    print(
        f"{size} sizes, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU, one thread'}, {torch.__version__}"
    )
    if device == "cpu":
        torch.set_num_threads(1)
    for name in args.only.split(","):
        task, sgd = TASKS[name](args.full).to(device), math.nan
        task = replace(task, epochs=args.epochs or task.epochs)
        for optimiser in args.optimisers.split(","):
            runs, seeds = list[tuple[list[float], float]](), args.seeds.split(",")
            for seed in seeds[:1] if args.steps else seeds:
                if time.monotonic() - begin > args.seconds:
                    break
                try:
                    each = [cost(task, optimiser, args.steps, device)] if args.steps else []
                    runs.append(([], each[0]) if each else train(task, optimiser, int(seed), device, args.lr))
                except Exception as error:  # the others shall go on
                    print(f"{name:12s} {optimiser:8s} seed {seed}: {type(error).__name__}: {error}", flush=True)
            if not runs:
                continue
            epochs = [mean(list(each)) for each in zip(*(found for found, _ in runs))]
            ms = min(ms for _, ms in runs)
            sgd = ms if optimiser == "SGD" else sgd
            shown = "  ".join(f"{m:.3f} ± {e:.3f}" if m < 10 else f"{m:.1f} ± {e:.1f}" for m, e in epochs)
            longest = slowest(task, optimiser, device) if args.steps else math.nan
            shown = f"slowest {longest:.1f} ms" if args.steps else shown
            said = f"{name:12s} {task.reported:9s} {optimiser:8s} {shown}   {ms:7.2f} ms ({ms / sgd:.2f})"
            print(said, f"{len(runs)} seeds" if len(runs) < len(seeds) and epochs else "", flush=True)
            key = f"{size}, {name}, {optimiser}" + (f", lr {args.lr}" if args.lr != 1e-3 else "")
            kept[f"{key}, steps" if args.steps else key] = {
                **{"reported": task.reported, "epochs": epochs, "ms": ms, "sgd": None if math.isnan(sgd) else sgd},
                "seeds": len(runs),
                **({"slowest": longest} if args.steps else {}),
            }
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
