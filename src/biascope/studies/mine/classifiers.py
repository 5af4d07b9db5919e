"""Classifiers with a bottleneck z between encoder and label, and the ways of Table 5.3 to regularise them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from biascope.data import Dataset
from biascope.errors import InputError
from biascope.progress import progress
from biascope.seeds import generator
from biascope.studies.mine.stacks import BETAS, Stack, StackedMine

DROPOUT, PENALTY, SMOOTHING = 0.5, 0.1, 0.1  # of the three plain regularisers, as usual
CRITIC_NOISE = (0.3, 0.5, 0.5)  # Table C.12
DECAY_EVERY, DECAY = 2, 0.97  # of the learning rate, in epochs (Alemi et al.)
OFFSET = 5.0  # softplus(s - 5): the deviation of a Gaussian code starts small (Alemi et al.)


@dataclass(frozen=True)
class Method:
    """How z comes from x, and what is added to the cross-entropy."""

    encoder: str = "plain"  # plain, gaussian: mu + sigma e; additive: enc(x + s e); propagated: enc([x, e])
    penalty: str = ""  # dropout, confidence, smoothing, variational, mine
    input_noise: bool = False

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
    "MINE (additive)": Method("additive", "mine", input_noise=True),
}


@dataclass(frozen=True)
class Setting:
    """Everything the methods share."""

    epochs: int
    batch: int
    lr: float
    width: int
    bottleneck: int
    beta: float
    sigma: float
    average: float
    critic_width: int
    critic_steps: int
    critic_lr: float
    draws: int


class NoisyCritic(nn.Module):
    """The statistics network of Table C.12: noise before every layer, ELU."""

    def __init__(self, stack: Stack, rng: torch.Generator) -> None:
        super().__init__()
        self.stack, self.rng = stack, rng

    def _noise(self, layer: int, x: Tensor) -> Tensor:
        return x + CRITIC_NOISE[layer] * torch.randn(x.shape, generator=self.rng, device=x.device)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Scores [S, n] of x [S, n, p] with z [S, n, k]."""
        scores: Tensor = self.stack(torch.cat([x, z], 2), self._noise)
        return scores[..., 0]


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
        for part, label in zip(torch.split(x, chunk), torch.split(y, chunk)):
            wide = part.expand(s, -1, -1)
            draws = self.setting.draws if self.method.stochastic else 1
            shares = sum(self.head(self.code(wide, rng, False)[0]).softmax(2) for _ in range(draws))
            assert isinstance(shares, Tensor)
            wrong = wrong + (shares.argmax(2) != label).sum(1)
        return 100 * wrong.double() / len(x)


def train(train_set: Dataset, test: Dataset, method: Method, setting: Setting, seeds: Sequence[int], seed: int
          ) -> dict[str, Tensor]:  # fmt: skip
    """Test error [S] in per cent and MINE's last estimate of I(x; z) [S], for a classifier of every seed.

    Images are flattened and scaled to [-1, 1]. Order of examples does not depend on the method, nor do initial weights
    of layers that have the same shape (those up to the first that differs).
    Evaluated with moving averages of the weights.
    """
    x, x_test = (2 * d.x.flatten(1) - 1 for d in (train_set, test))
    device, classes, s = x.device, int(train_set.y.max()) + 1, len(seeds)
    net = Classifier(x.shape[1], classes, method, setting, seeds).to(device)
    parameters = list(net.parameters())
    averages = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.Adam(parameters, lr=setting.lr, betas=BETAS)
    order, noise = (generator(seed, name, device=device) for name in ("order", "noise"))
    mine = None
    if method.penalty == "mine":
        widths = [x.shape[1] + setting.bottleneck, setting.critic_width, setting.critic_width, 1]
        critic = NoisyCritic(Stack(widths, "elu", seeds, "statistics"), noise).to(device)
        mine = StackedMine(critic, setting.critic_lr, BETAS)
    nats = torch.zeros(s, device=device)
    per_epoch = len(x) // setting.batch
    if not per_epoch:
        raise InputError(f"batch={setting.batch} is more than the {len(x)} training images: nothing would be trained")
    for epoch in progress(range(setting.epochs), "epochs", leave=False):
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * DECAY ** (epoch // DECAY_EVERY)
        rows = torch.rand(s, len(x), generator=order, device=device).argsort(1)[:, : per_epoch * setting.batch]
        for index in torch.split(rows, setting.batch, 1):
            batch, labels = x[index], train_set.y[index]
            z, kl = net.code(batch, noise, True)
            loss = net.penalised(net.head(z), labels)
            if method.penalty == "variational":
                loss = loss + setting.beta * kl
            if mine is not None:
                for _ in range(setting.critic_steps):
                    nats = mine.fit(batch, z)
                loss = loss + setting.beta * mine(batch, z)
            for p, gradient in zip(parameters, torch.autograd.grad(loss.sum(), parameters)):
                p.grad = gradient
            optimizer.step()
            with torch.no_grad():
                for average, p in zip(averages, parameters):
                    average.lerp_(p, 1 - setting.average)
    with torch.no_grad():
        for average, p in zip(averages, parameters):
            p.copy_(average)
    errors = net.errors(x_test, test.y, generator(seed, "draws", device=device))
    return {"errors": errors.cpu(), "nats": nats.double().cpu()}
