"""Is a score of influence worth anything? Linear datamodelling scores of `bs.influence` under several metrics.

    python benchmarks/influence_lds.py [--size smoke|small|paper] [--out FILE]

Two tasks: a convolutional network on a subset of CIFAR-10, and a language model of one transformer layer on bytes of
this repository's documentation. Networks are trained on random halves of the examples, several seeds each; the score is
the rank correlation over halves of the sum of an example's scores and of what these networks do on the queries (mean
over seeds of the negative loss), mean over the queries with its standard error. Influence is computed on one network
trained on everything. The damping of every metric is a share of the mean of its diagonal, the same for all.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs

METRICS = ("inner products", "diagonal", "kfac", "ekfac")
DAMPING = 0.1  # of the mean of the diagonal


@dataclass(frozen=True)
class Size:
    examples: int
    queries: int
    subsets: int
    seeds: int
    epochs: int


SIZES = {"smoke": Size(24, 3, 4, 1, 2), "small": Size(256, 20, 24, 2, 15), "paper": Size(5_000, 200, 200, 5, 30)}


class Convolutions(nn.Module):
    """Two convolutions and a linear layer for 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 49, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Language(nn.Module):
    """One layer of attention over bytes: [n, T, 256]."""

    def __init__(self, width: int = 32, tokens: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(tokens, width))
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.mix(self.words(x) + self.places[:T], src_mask=later))


Task = tuple[Callable[[], nn.Module], Tensor, Tensor, int | None]  # network, inputs, labels, class_dim


def cifar(n: int) -> Task:
    data = bs.data.load("cifar10")
    x = data.x[:n].float()
    return Convolutions, (x - x.mean()) / x.std(), data.y[:n], None


def language(n: int, tokens: int = 32) -> Task:
    files = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = torch.tensor(list("".join(f.read_text() for f in files).encode()))
    rows = text[: len(text) // (tokens + 1) * (tokens + 1)].view(-1, tokens + 1)
    some = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:n]]
    return Language, some[:, :-1], some[:, 1:], -1


TASKS = {"cifar10": cifar, "language": language}


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of every example, summed over its tokens."""
    z = net(x)
    each = F.cross_entropy(z if z.dim() == 2 else z.mT, y, reduction="none")
    return each if each.dim() == 1 else each.sum(1)


def trained(task: Task, rows: Tensor, seed: int, epochs: int) -> nn.Module:
    make, x, y, _ = task
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make()
    gen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows), generator=gen)].split(32):
            optimizer.zero_grad()
            losses(net, x[batch], y[batch]).mean().backward()
            optimizer.step()
    return net.eval()


def study(name: str, size: Size) -> dict[str, Any]:
    """LDS of every metric, and of the same scores under the labels of a wrong query as a control."""
    task = TASKS[name](size.examples + size.queries)
    _, x, y, class_dim = task
    train, query = torch.arange(size.examples), torch.arange(size.examples, size.examples + size.queries)
    gen = torch.Generator().manual_seed(1)
    halves = [torch.randperm(size.examples, generator=gen) < size.examples // 2 for _ in range(size.subsets)]
    subsets = torch.stack(halves)
    start = time.process_time()
    measured = torch.zeros(size.subsets, size.queries)
    for j, chosen in enumerate(subsets):
        for seed in range(size.seeds):
            net = trained(task, train[chosen], 100 * j + seed, size.epochs)
            with torch.no_grad():
                measured[j] -= losses(net, x[query], y[query]) / size.seeds
    networks = time.process_time() - start
    net = trained(task, train, 0, size.epochs)
    found: dict[str, Any] = {"networks": {"cpu_s": round(networks, 1)}}
    for metric in METRICS:
        start = time.process_time()
        Fisher = None if metric == "inner products" else fisher(net, (x[train], y[train]), metric, class_dim)
        damping = 0.0 if Fisher is None else DAMPING * float(Fisher.trace()) / Fisher.shape[0]
        data = {"train": (x[train], y[train]), "queries": (x[query], y[query])}
        scores = bs.influence(net, **data, metric=Fisher, damping=damping, class_dim=class_dim)
        spent = time.process_time() - start
        estimate = scores.lds(subsets, measured)
        wrong = scores.lds(subsets, measured.roll(1, 1))
        found[metric] = {
            "lds": estimate.value,
            "standard_error": estimate.standard_error,
            "of the next query": wrong.value,
            "cpu_s": round(spent, 2),
        }
        print(f"{name}, {metric}: LDS {estimate}; of the next query {wrong}; {spent:.1f} CPU s", flush=True)
    return found


def fisher(net: nn.Module, data: tuple[Tensor, Tensor], metric: str, class_dim: int | None) -> Any:
    options: dict[str, Any] = {"estimator": "monte-carlo", "samples": 4, "class_dim": class_dim}
    return bs.fisher(net, data, metric, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", default="", help="one of the tasks: cifar10, language")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    report = {name: study(name, SIZES[chosen.size]) for name in TASKS if chosen.only in name}
    if chosen.out:
        chosen.out.write_text(json.dumps({"size": chosen.size, **report}, indent=2) + "\n")
