"""ALI on images of digits: the networks of Tables C.4 to C.7, and the training of four kinds of models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, leaky_relu, softplus

from biascope.information import MineTerm, clipped_backward
from biascope.progress import progress
from biascope.seeds import generator
from biascope.studies.mine.ali import Arm
from biascope.studies.mine.stacked_digits import drawn, norm
from biascope.studies.mine.stacks import BETAS

LATENT = 128  # of z, and of the encoder's noise


@dataclass(frozen=True)
class Setting:
    """Everything the arms share; `weight` is that of the reconstruction loss or of the information."""

    steps: int
    batch: int
    lr: float
    width: int
    weight: float


class Encoder(nn.Module):
    """Table C.4: z [n, 128] of images [n, 1, 28, 28] and noise [n, 128], which is tiled as maps; published width 64."""

    def __init__(self, width: int, rng: torch.Generator) -> None:
        super().__init__()
        channels = (1 + LATENT, width, 2 * width, 4 * width)
        with torch.device("meta"):
            layers: list[nn.Module] = []
            for a, b in pairwise(channels):
                layers += [nn.Conv2d(a, b, 5, 2, 2), norm(b), nn.ReLU()]
            top = channels[-1]
            layers += [nn.Conv2d(top, top, 4), nn.ReLU(), nn.Flatten(), nn.Linear(top, LATENT)]
            self.layers = nn.Sequential(*layers)
        drawn(self, rng)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Codes [n, 128]; tiled maps need no convolution per image: what a map gives is its noise times known sums."""
        first = self.layers[0]
        assert isinstance(first, nn.Conv2d)
        image, tiled = first.weight[:, :1], first.weight[:, 1:]
        ones = torch.ones(1, 1, *x.shape[2:], device=x.device, dtype=x.dtype)
        sums = conv2d(ones, tiled.reshape(-1, 1, 5, 5), None, 2, 2)[0]
        sums = sums.reshape(*tiled.shape[:2], *sums.shape[1:])
        h = conv2d(x, image, first.bias, 2, 2) + torch.einsum("nk,okhw->nohw", noise, sums)
        code: Tensor = self.layers[1:](h)
        return code


def decoder(width: int, rng: torch.Generator) -> nn.Sequential:
    """Table C.5: z [n, 128] -> images [n, 1, 28, 28]."""
    channels = (4 * width, 2 * width, width, 1)
    with torch.device("meta"):
        layers: list[nn.Module] = [nn.Linear(LATENT, 16 * channels[0]), nn.Unflatten(1, (channels[0], 4, 4)), nn.ReLU()]
        for i, grow in enumerate((0, 1, 1)):  # 4 -> 7 -> 14 -> 28
            layers.append(nn.ConvTranspose2d(channels[i], channels[i + 1], 5, 2, 2, grow))
            layers += [nn.Tanh()] if i == 2 else [norm(channels[i + 1]), nn.ReLU()]
        net = nn.Sequential(*layers)
    return drawn(net, rng)


class PairNetwork(nn.Module):
    """Scores [n] of images [n, c, 28, 28] with codes [n, 128].

    The discriminator of Table C.6 joins z to the features and has one more layer; the statistics network of Table C.7
    (`dynamic`) hears z as a bias of every channel. Without z, it is the discriminator of ALICE (adv.).
    """

    def __init__(self, width: int, rng: torch.Generator, channels: int = 1, dynamic: bool = False) -> None:
        super().__init__()
        sizes = (channels, width, 2 * width, 4 * width)
        flat = 16 * sizes[-1]
        with torch.device("meta"):
            self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 5, 2, 2) for a, b in pairwise(sizes))
            self.biases = nn.ModuleList(nn.Linear(LATENT, b) for b in sizes[1:]) if dynamic else None
            joined = LATENT if channels == 1 and not dynamic else 0
            hidden = 16 * width
            self.head = (
                nn.Linear(flat, 1)
                if dynamic
                else nn.Sequential(nn.Linear(flat + joined, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))
            )
        drawn(self, rng, small=False)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Scores [n]."""
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if self.biases is not None and z is not None:
                x = x + self.biases[i](z)[:, :, None, None]
            x = leaky_relu(x, 0.2)
        x = x.flatten(1)
        scores: Tensor = self.head(x if self.biases is not None or z is None else torch.cat([x, z], 1))
        return scores[:, 0]


def train(x: Tensor, test: Tensor, arm: Arm, setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """One model on images x [n, 1, 28, 28] in [-1, 1]: reconstructions of `test`, and 25 samples.

    Objectives are those of `ali.train`, with convolutional networks; squares are means over pixels, not sums.
    """
    device, width = x.device, setting.width
    f = Encoder(width, generator(seed, "encoder")).to(device)
    g = decoder(width, generator(seed, "decoder")).to(device)
    d = PairNetwork(width, generator(seed, "discriminator")).to(device)
    cycle = PairNetwork(width, generator(seed, "cycle"), channels=2).to(device)
    term = MineTerm(PairNetwork(width, generator(seed, "statistics"), dynamic=True).to(device), lr=setting.lr)
    both = [*f.parameters(), *g.parameters()]
    model_step = torch.optim.Adam(both, lr=setting.lr, betas=BETAS)
    d_step, cycle_step = (torch.optim.Adam(net.parameters(), lr=setting.lr, betas=BETAS) for net in (d, cycle))
    rows, draws = (generator(seed, name, device=device) for name in ("batches", "latent"))

    def normal(n: int) -> Tensor:
        return torch.randn(n, LATENT, generator=draws, device=device)

    def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in progress(range(setting.steps), arm, leave=False):
        real = x[torch.randint(len(x), (setting.batch,), generator=rows, device=device)]
        z = normal(setting.batch)
        code, made = f(real, normal(setting.batch)), g(z)
        step(d_step, (softplus(-d(real, code.detach())) + softplus(d(made.detach(), z))).mean())
        back = g(code) if arm.startswith("ALICE") else None
        if arm == "ALICE (adv.)" and back is not None:
            pairs = torch.cat([real, real], 1), torch.cat([real, back.detach()], 1)
            step(cycle_step, (softplus(-cycle(pairs[0])) + softplus(cycle(pairs[1]))).mean())
        loss = (softplus(d(real, code)) + softplus(-d(made, z))).mean()
        if arm == "ALICE (l2)" and back is not None:
            loss = loss + setting.weight * (real - back).square().mean()
        if arm == "ALICE (adv.)" and back is not None:
            loss = loss + setting.weight * softplus(-cycle(torch.cat([real, back], 1))).mean()
        if arm == "ALI + MINE":
            term.fit(real, code)
            clipped_backward(loss, term(real, code), both, setting.weight)
            model_step.step()
        else:
            step(model_step, loss)
    with torch.no_grad():
        back = torch.cat([g(f(part, normal(len(part)))) for part in torch.split(test, 1000)])
        return back, g(normal(100))[:25]
