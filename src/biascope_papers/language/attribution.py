"""Is a score of influence worth anything? Linear datamodelling scores under several metrics.

Networks are trained on random halves of the examples. Compared, by rank correlation over the halves, are the sum of an
example's scores and the mean of the networks' negative losses on a query. The scores are those of a network trained on
everything, on images or on sequences of tokens, each drawn from one of several random Markov chains. The damping is a
tenth of the mean of the diagonal, the same for all metrics, which are made with the same labels drawn from the network.
"no factors" is the Fisher information of these labels itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import data, fisher, influence
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import spearman
from biascope.support import derive, generator

Kind = Literal["diagonal", "kfac", "ekfac", "lowrank"]
METRICS: dict[str, Kind | None] = {
    "inner products": None, "diagonal": "diagonal", "kfac": "kfac", "ekfac": "ekfac", "no factors": "lowrank",
}  # fmt: skip
Which = Literal["images", "tokens"]


@dataclass(frozen=True)
class Setting:
    """Options of the study."""

    examples: Annotated[int, "training examples"] = 256
    queries: Annotated[int, "examples that are asked about"] = 40
    halves: Annotated[int, "random halves of the examples"] = 32
    networks: Annotated[int, "networks per half"] = 4
    epochs: Annotated[int, "passes over a half"] = 15
    lr: Annotated[float, "learning rate of Adam"] = 3e-3
    damping: Annotated[float, "in means of the diagonal"] = 0.1
    samples: Annotated[int, "labels drawn per example for the metrics"] = 8
    dataset: Annotated[str, "the images"] = "cifar10"
    words: Annotated[int, "different tokens"] = 64
    tokens: Annotated[int, "tokens per sequence"] = 32
    chains: Annotated[int, "Markov chains"] = 8


SMOKE: dict[str, Any] = {"examples": 32, "queries": 4, "halves": 6, "networks": 1, "epochs": 4, "samples": 1}
SMOKE |= {"dataset": "digits", "words": 12, "tokens": 8, "chains": 3}


class Task(NamedTuple):
    """Examples, the queries last, and a network for them; `class_dim` as in `bs.fisher`."""

    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    class_dim: Literal[-1] | None


class Language(nn.Module):
    """One layer of causal attention: tokens [n, T] to logits [n, T, words]."""

    def __init__(self, words: int, tokens: int, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(tokens, width))
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        T = x.shape[1]
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.mix(self.words(x) + self.places[:T], src_mask=later))  # type: ignore[no-any-return]


def images(s: Setting, seed: int) -> Task:
    """The first images of a set, and two convolutions with a linear layer."""
    held, n = data.load(s.dataset), s.examples + s.queries
    x = held.x[:n].float()

    def make() -> nn.Module:
        layers = [nn.Conv2d(x.shape[1], 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten()]
        size = nn.Sequential(*layers)(x[:1]).shape[1]
        return nn.Sequential(*layers, nn.Linear(size, int(held.y.max()) + 1))

    return Task(make, (x - x.mean()) / x.std(), held.y[:n], None)


def tokens(s: Setting, seed: int) -> Task:
    """Sequences of random chains, whose transition probabilities are softmax(3 z) of normal z."""
    gen = generator(seed, "chains")
    n = s.examples + s.queries
    chains = torch.softmax(3 * torch.randn(s.chains, s.words, s.words, generator=gen), -1)
    which, rows = torch.randint(s.chains, (n,), generator=gen), [torch.randint(s.words, (n,), generator=gen)]
    for _ in range(s.tokens):
        rows.append(torch.multinomial(chains[which, rows[-1]], 1, generator=gen)[:, 0])
    text = torch.stack(rows, 1)
    return Task(lambda: Language(s.words, s.tokens), text[:, :-1], text[:, 1:], -1)


TASKS: dict[Which, Callable[[Setting, int], Task]] = {"images": images, "tokens": tokens}


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of every example, summed over its tokens."""
    z = net(x)
    each = F.cross_entropy(z if z.dim() == 2 else z.mT, y, reduction="none")
    return each if each.dim() == 1 else each.sum(1)


def trained(task: Task, rows: Tensor, seed: int, s: Setting) -> nn.Module:
    """A network trained on some of the examples; initialised and shuffled by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = task.make()
    net, gen = net.to(task.x.device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=s.lr)
    for _ in range(s.epochs):
        for batch in rows[torch.randperm(len(rows), generator=gen)].split(32):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            losses(net, task.x[batch], task.y[batch]).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return net.eval()


def measured(half: int, task: Task, subsets: Tensor, s: Setting, seed: int) -> dict[str, Tensor]:
    """Negative losses of the queries [q], mean over the networks of a half."""
    total, rows = torch.zeros(s.queries), subsets[half].nonzero()[:, 0]
    for j in range(s.networks):
        net = trained(task, rows, derive(seed, "network", half, j), s)
        with torch.no_grad():
            total -= losses(net, task.x[s.examples :], task.y[s.examples :]).cpu() / s.networks
    return {"minus_loss": total}


def scores(task: Task, s: Setting, seed: int) -> dict[str, Tensor]:
    """Scores [q, n] of every metric, of one network trained on all examples."""
    net = trained(task, torch.arange(s.examples), derive(seed, "everything"), s)
    train, queries = ((task.x[at], task.y[at]) for at in (slice(0, s.examples), slice(s.examples, None)))
    drawn: dict[str, Any] = {"estimator": "monte-carlo", "samples": s.samples, "class_dim": task.class_dim}
    exact, found = fisher(net, train, "lowrank", **drawn), {}
    damping = s.damping * float(exact.trace()) / exact.shape[0]
    for name, kind in METRICS.items():
        metric = exact if kind == "lowrank" else None if kind is None else fisher(net, train, kind, **drawn)
        options: dict[str, Any] = {"damping": 0.0 if metric is None else damping, "class_dim": task.class_dim}
        found[name] = influence(net, train, queries, metric, **options).scores
    return found


def by_query(S: Tensor, subsets: Tensor, values: Tensor) -> Tensor:
    """The linear datamodelling score of every query [q]."""
    predicted = subsets.float() @ S.T
    return torch.tensor([spearman(p, v) for p, v in zip(predicted.T, values.T)], dtype=torch.float64)


@study("language/lds", sizes={"smoke": SMOKE, "laptop": {}, "paper": {"examples": 5000, "queries": 200, "halves": 100}})
def lds(
    run: Run, *, tasks: Annotated[tuple[Which, ...], "of these"] = ("images", "tokens"), setting: Setting = Setting()
) -> StudyResult:
    """Linear datamodelling scores of influence under five metrics."""
    numbers: dict[str, Estimate] = {}
    series, said = [], []
    for name in tasks:
        task = TASKS[name](setting, run.seed)
        task = task._replace(x=task.x.to(run.device), y=task.y.to(run.device))
        gen, half = generator(run.seed, "halves"), setting.examples // 2
        subsets = torch.stack([torch.randperm(setting.examples, generator=gen) < half for _ in range(setting.halves)])

        one = partial(measured, task=task, subsets=subsets, s=setting, seed=run.seed)
        parts = run.cached_each(f"{name}, half", range(setting.halves), one)
        values = torch.stack([torch.as_tensor(part["minus_loss"]) for part in parts])
        stored = run.cached(f"{name}, scores", partial(scores, task, setting, run.seed))
        S = {metric: torch.as_tensor(stored[metric]) for metric in METRICS}
        each = {metric: by_query(S[metric], subsets, values) for metric in METRICS}
        numbers |= {f"LDS, {metric}, {name}": Estimate.of(each[metric]) for metric in METRICS}
        for other in ("inner products", "no factors"):
            numbers[f"LDS, ekfac minus {other}, {name}"] = Estimate.of(each["ekfac"] - each[other])
        moved = Estimate.of(by_query(S["ekfac"], subsets, values.roll(1, 1)))
        numbers[f"LDS, ekfac, measured on another query, {name}"] = moved
        found = [numbers[f"LDS, {metric}, {name}"] for metric in METRICS]
        heights, errors = [e.value for e in found], [e.standard_error or 0.0 for e in found]
        series.append(Series.of(name, range(1, len(METRICS) + 1), heights, errors, style="points"))
        said.append(f"{name}: " + ", ".join(f"{metric} {e}" for metric, e in zip(METRICS, found)))
    return StudyResult(
        measured=f"Linear datamodelling scores. {'; '.join(said)}.",
        numbers=numbers,
        figures=(
            Chart("lds", "Linear datamodelling score", "metric", "rank correlation over halves", tuple(series),
                  alt="Scores of five metrics for both tasks, lowest for inner products of gradients.",
                  caption=f"Mean over {setting.queries} queries of the same networks.", x_names=tuple(METRICS)),
        ),
    )  # fmt: skip
