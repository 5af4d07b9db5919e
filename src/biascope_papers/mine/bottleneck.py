"""Table 5.3: the information bottleneck by MINE, on MNIST with pixels in any order.

Cross-entropy + beta I(x; z), estimated by MINE for any encoder: Gaussian (mu + sigma e), with noise propagated (enc([x,
e])) or added to the input (enc(x + s e)). All have the same hidden layers, order of examples, steps and beta; nothing
is tuned. Hyperparameters not printed are those of Alemi et al. Predictions of random encoders are means over draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from biascope import InputError, data
from biascope.data import Dataset
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import through
from biascope.support import derive, generator, progress
from biascope_papers.mine.stacked_digits import stand_in
from biascope_papers.mine.stacks import BETAS, PairCritic, Replayed, Stack, StackedMine, adam, descend

DROPOUT, PENALTY, SMOOTHING = 0.5, 0.1, 0.1  # of the three plain regularisers, as usual
CRITIC_NOISE = (0.3, 0.5, 0.5)  # before the layers of the statistics network (Table C.12)
DECAY_EVERY, DECAY = 2, 0.97  # of the learning rate, in epochs (Alemi et al.)
OFFSET = 5.0  # softplus(s - 5): the deviation of a Gaussian code starts small (Alemi et al.)
OURS, RIVALS = "MINE (additive)", ("DVB", "DVB + noise")


@dataclass(frozen=True)
class Method:
    """How z comes from x (gaussian: mu + sigma e; propagated: enc([x, e])), and what is added to the cross-entropy."""

    encoder: Literal["plain", "gaussian", "propagated"] = "plain"
    penalty: Literal["", "dropout", "confidence", "smoothing", "variational", "mine"] = ""
    input_noise: bool = False  # enc(x + s e)

    @property
    def stochastic(self) -> bool:
        """Whether predictions are means over draws."""
        return self.encoder != "plain" or self.input_noise


METHODS = {
    "baseline": Method(),
    "dropout": Method(penalty="dropout"),
    "confidence penalty": Method(penalty="confidence"),
    "label smoothing": Method(penalty="smoothing"),
    "DVB": Method("gaussian", "variational"),
    "DVB + noise": Method("gaussian", "variational", input_noise=True),
    "MINE (Gaussian)": Method("gaussian", "mine"),
    "MINE (propagated)": Method("propagated", "mine"),
    "MINE (additive)": Method("plain", "mine", input_noise=True),
}


@dataclass(frozen=True)
class Setting:
    """Options of the study; all methods share them."""

    dataset: Annotated[str, "mnist, fashion-mnist or digits (8 x 8, ships with the library)"] = "mnist"
    n: Annotated[int, "training images, the same for all methods and seeds"] = 60_000
    n_test: Annotated[int, "test images"] = 10_000
    methods: Annotated[tuple[str, ...], "rows of the table; DVB, DVB + noise, MINE (additive) decide"] = tuple(METHODS)
    epochs: Annotated[int, "passes over the images"] = 200
    batch: Annotated[int, "images in a step"] = 100
    lr: Annotated[float, "of Adam, times 0.97 every two epochs"] = 1e-4
    width: Annotated[int, "units in the encoder's two layers"] = 1024
    bottleneck: Annotated[int, "dimensions of z"] = 256
    beta: Annotated[float, "weight of the information, and of the variational bound on it"] = 1e-3
    sigma: Annotated[float, "noise on inputs in [-1, 1] (not given in the text)"] = 0.3
    average: Annotated[float, "of the moving average of weights that is evaluated"] = 0.999
    critic_width: Annotated[int, "units in the statistics network's two layers"] = 512
    critic_steps: Annotated[int, "its steps for one of the encoder (not given)"] = 2
    critic_lr: Annotated[float, "of its Adam (not given)"] = 1e-4
    draws: Annotated[int, "of z for a prediction"] = 12
    seeds: Annotated[int, "networks of each method"] = 10


PUBLISHED = Setting()


@study(
    "mine/table5.3",
    sizes={
        "smoke": {"dataset": "digits", "n": 500, "n_test": 297, "epochs": 5, "batch": 50, "lr": 3e-3, "width": 32,
                  "bottleneck": 8, "average": 0.9, "critic_width": 32, "critic_lr": 1e-3, "draws": 4, "seeds": 2},
        "laptop": {"n": 4000, "n_test": 5000, "epochs": 12, "lr": 1e-3, "width": 200, "bottleneck": 32,
                   "average": 0.99, "critic_width": 64, "critic_lr": 1e-3, "critic_steps": 1, "draws": 4, "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def table5_3(run: Run, *, setting: Setting = PUBLISHED) -> StudyResult:
    """Test error of nine regularisers, three of them bottlenecks by MINE."""
    s = setting
    if unknown := [name for name in s.methods if name not in METHODS]:
        raise InputError(f"methods {unknown} are not known; choose from {', '.join(METHODS)}")

    @cache
    def images(split: Literal["train", "test"], n: int) -> Dataset:
        whole = data.load(s.dataset, split)
        rng = torch.Generator().manual_seed(derive(run.seed, split))
        return whole.subset(torch.randperm(len(whole), generator=rng)[:n]).to(run.device)

    def compute(name: str) -> dict[str, Tensor]:
        members = [derive(run.seed, "member", i) for i in range(s.seeds)]
        train_set, test = images("train", s.n), images("test", s.n_test)
        made = train(train_set, test, METHODS[name], s, members, derive(run.seed, "training"))
        run.log(method=name, error=float(made["errors"].mean()))
        return made

    found: dict[str, dict[str, Any]] = {name: run.cached(name, lambda n=name: compute(n)) for name in s.methods}  # type: ignore[misc]
    errors = {name: made["errors"] for name, made in found.items()}
    numbers = {f"error (%), {name}": Estimate.of(row) for name, row in errors.items()}
    table = "; ".join(f"{name} {numbers[f'error (%), {name}']}" for name in s.methods)
    less = {n: Estimate.of(errors[n] - errors[OURS]) for n in RIVALS if n in errors and OURS in errors}
    numbers |= {f"error (%), {name} - {OURS}": value for name, value in less.items()}
    for name in ("MINE (Gaussian)", "MINE (propagated)"):
        if name in errors and "DVB" in errors:
            numbers[f"error (%), DVB - {name}"] = Estimate.of(errors["DVB"] - errors[name])
    for name in s.methods:
        if METHODS[name].penalty == "mine":
            numbers[f"estimate of I(x; z), last batch (nats), {name}"] = Estimate.of(found[name]["nats"])
    return StudyResult(
        measured=f"Test error (%): {table}. Beta {s.beta:g} (that of the paper for MINE is not given), nothing tuned."
        f"{stand_in(s.dataset)}",
        numbers=numbers,
        figures=(_chart(errors),),
    )


def _chart(errors: dict[str, Tensor]) -> Chart:
    at = range(1, len(errors) + 1)
    series = through("here", at, map(Estimate.of, errors.values()), "points")
    return Chart(
        "errors", "Test error by regulariser", "regulariser, in the order of the caption", "misclassified (%)",
        (series,), alt="One point with its error for each method, those with MINE last.",
        caption=f"{', '.join(f'{i} {name}' for i, name in zip(at, errors))}. DVB: deep variational bottleneck. Means "
        "over seeds; bars: one standard error.",
        x_names=tuple(map(str, at)),
    )  # fmt: skip


class Classifier(nn.Module):
    """S encoders with a linear layer to the classes: logits [S, n, c] of x [S, n, d]."""

    def __init__(self, features: int, classes: int, method: Method, setting: Setting, seeds: Sequence[int]) -> None:
        super().__init__()
        k, self.method, self.setting = setting.bottleneck, method, setting
        inputs = features + (k if method.encoder == "propagated" else 0)
        outputs = 2 * k if method.encoder == "gaussian" else k
        self.encoder = Stack([inputs, setting.width, setting.width, outputs], "relu", seeds, "encoder")
        self.head = Stack([k, classes], "relu", seeds, "head")

    def code(self, x: Tensor, rng: torch.Generator, training: bool) -> tuple[Tensor, Tensor]:
        """z [S, n, k], and KL(q(z|x) | N(0, I)) [S] in the mean over x where q is Gaussian (0 elsewhere)."""

        def drop(layer: int, h: Tensor) -> Tensor:
            if not (layer and training and self.method.penalty == "dropout"):
                return h
            kept = torch.rand(h.shape, generator=rng, device=h.device) >= DROPOUT
            return h * kept / (1 - DROPOUT)

        k = self.setting.bottleneck
        if self.method.input_noise:
            x = x + self.setting.sigma * torch.randn(x.shape, generator=rng, device=x.device)
        if self.method.encoder == "propagated":
            x = torch.cat([x, torch.randn(*x.shape[:2], k, generator=rng, device=x.device)], 2)
        out = self.encoder(x, drop)
        if self.method.encoder != "gaussian":
            return out, torch.zeros(len(out), device=out.device)
        mean, std = out[..., :k], softplus(out[..., k:] - OFFSET)
        kl = ((mean.square() + std.square() - 1) / 2 - std.log()).sum(2).mean(1)
        return mean + std * torch.randn(mean.shape, generator=rng, device=x.device), kl

    def penalised(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy [S] of logits [S, n, c] at labels y [S, n], with what concerns the outputs alone."""
        log_p = logits.log_softmax(2)
        loss = -log_p.gather(2, y[..., None])[..., 0].mean(1)
        if self.method.penalty == "smoothing":
            return (1 - SMOOTHING) * loss - SMOOTHING * log_p.mean((1, 2))
        if self.method.penalty == "confidence":
            return loss + PENALTY * (log_p.exp() * log_p).sum(2).mean(1)
        return loss

    @torch.no_grad()
    def errors(self, x: Tensor, y: Tensor, rng: torch.Generator, chunk: int = 2000) -> Tensor:
        """Misclassified [S] in per cent of x [n, d]; probabilities are means over draws where z is random."""
        s = len(self.head.weights[0])
        wrong = torch.zeros(s, device=x.device)
        draws = self.setting.draws if self.method.stochastic else 1
        for part, label in zip(torch.split(x, chunk), torch.split(y, chunk)):
            shares = torch.zeros((), device=x.device)
            for _ in range(draws):
                shares = shares + self.head(self.code(part.expand(s, -1, -1), rng, False)[0]).softmax(2)
            wrong = wrong + (shares.argmax(2) != label).sum(1)
        return 100 * wrong.double() / len(x)


def train(train_set: Dataset, test: Dataset, method: Method, setting: Setting, seeds: Sequence[int], seed: int
          ) -> dict[str, Tensor]:  # fmt: skip
    """Test error [S] in per cent and MINE's last estimate of I(x; z) [S], for a classifier of every seed.

    Order of examples does not depend on the method. Evaluated with moving averages of the weights.
    """
    x, x_test = (2 * d.x.flatten(1) - 1 for d in (train_set, test))
    device, classes, s = x.device, int(train_set.y.max()) + 1, len(seeds)
    net = Classifier(x.shape[1], classes, method, setting, seeds).to(device)
    parameters: list[Tensor] = list(net.parameters())
    averages = [p.detach().clone() for p in parameters]
    optimizer = adam(parameters, setting.lr)
    order, noise = (generator(seed, name, device=device) for name in ("order", "noise"))

    def noisy(layer: int, h: Tensor) -> Tensor:
        return h + CRITIC_NOISE[layer] * torch.randn(h.shape, generator=noise, device=h.device)

    mine = None
    if method.penalty == "mine":
        widths = [x.shape[1] + setting.bottleneck, setting.critic_width, setting.critic_width, 1]
        critic = PairCritic(Stack(widths, "elu", seeds, "statistics"), noisy).to(device)
        mine = StackedMine(critic, setting.critic_lr, BETAS)
    nats = torch.zeros(s, device=device)

    def step(index: Tensor) -> Tensor:
        found, batch, labels = torch.zeros(s, device=device), x[index], train_set.y[index]
        z, kl = net.code(batch, noise, True)
        loss = net.penalised(net.head(z), labels)
        if method.penalty == "variational":
            loss = loss + setting.beta * kl
        if mine is not None:
            for _ in range(setting.critic_steps):
                found = mine.fit(batch, z)
            loss = loss + setting.beta * mine(batch, z)
        descend(optimizer, parameters, loss)
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - setting.average)
        return found

    players = [optimizer] if mine is None else [optimizer, mine.optimizer]
    advance = Replayed(step, players, (noise,), lambda: [*averages, *(mine.state() if mine else [])])
    per_epoch = len(x) // setting.batch
    if not per_epoch:
        raise InputError(f"batch={setting.batch} is more than the {len(x)} training images: nothing would be trained")
    for epoch in progress(range(setting.epochs), "epochs", leave=False):
        rate = setting.lr * DECAY ** (epoch // DECAY_EVERY)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        rows = torch.rand(s, len(x), generator=order, device=device).argsort(1)[:, : per_epoch * setting.batch]
        for index in torch.split(rows, setting.batch, 1):
            nats = advance(index)
    with torch.no_grad():
        for average, p in zip(averages, parameters):
            p.copy_(average)
    errors = net.errors(x_test, test.y, generator(seed, "draws", device=device))
    return {"errors": errors.cpu(), "nats": nats.double().cpu()}
