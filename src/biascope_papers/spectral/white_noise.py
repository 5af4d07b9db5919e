"""Fig A.10: white noise is easier to learn on a curved manifold than on a flat one of the same dimension.

Curved: reconstructions of a denoising auto-encoder with a code of `code` numbers (its decoder embeds the code in image
space). Flat: vectors uniform on [0, 1] in their first `code` entries and zero elsewhere. Targets are uniform on [0, 1].
Two identical networks, the same training. (The sentence in the text is garbled; the figure's direction is this.) The
two sets differ in size too, so a third curve, a control, has the flat vectors scaled to the mean norm of the curved.
"""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from biascope import data as sets
from biascope.studies import Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.spectral.fitting import Training, loss_chart, tensors
from biascope_papers.spectral.label_noise import stand_in

TRAINING = Training(steps=10_000)


@study(
    "spectral/figA.10",
    sizes={
        "smoke": {"data": "digits", "images": 1000, "epochs": 5, "hidden": 64, "code": 16, "n": 100, "width": 64,
                  "depth": 4, "steps": 200, "runs": 3, "every": 10, "lr": 1e-3},
        "laptop": {"images": 20_000, "epochs": 3, "n": 300, "width": 128, "steps": 800, "runs": 4, "every": 20},
        "paper": {"precision": "tf32"},
    },
)  # fmt: skip
def fig_a_10(
    run: Run,
    *,
    data: Annotated[str, "image set: mnist, fashion-mnist or digits"] = "mnist",
    images: Annotated[int, "images that the auto-encoder is trained on, 0 for all"] = 0,
    epochs: Annotated[int, "passes of the auto-encoder over them"] = 20,
    hidden: Annotated[int, "units beside the code"] = 512,
    code: Annotated[int, "numbers in the code"] = 64,
    noise: Annotated[float, "standard deviation of the noise on the auto-encoder's input"] = 0.3,
    n: Annotated[int, "vectors to be learned (not given in the text)"] = 1000,
    runs: Annotated[int, "networks, each with its own vectors and targets"] = 10,
    every: Annotated[int, "steps between two measurements"] = 100,
    training: Training = TRAINING,
) -> StudyResult:
    """Random targets on reconstructions of images and on a flat manifold."""

    def reconstructions() -> dict[str, Tensor | float]:
        x = sets.load(data, "train").x.flatten(1)[: images or None].to(run.device)
        net, loss = train_autoencoder(x, hidden, code, noise, epochs, derive(run.seed, "auto-encoder"))
        chosen = torch.randperm(len(x), generator=generator(run.seed, "chosen"))[: runs * n]
        if len(chosen) < runs * n:  # small stand-ins: images may come again in another run
            chosen = chosen.repeat(runs * n // len(chosen) + 1)[: runs * n]
        with torch.no_grad():
            return {"x": net(x[chosen.to(x.device)]).reshape(runs, n, -1), "loss": loss}

    made = tensors(run.cached("reconstructions", reconstructions))
    curved, rng = made["x"], generator(run.seed, "flat")
    flat = torch.zeros_like(curved)
    flat[..., :code] = torch.rand(runs, n, code, generator=rng)
    scaled = flat * (curved.norm(dim=2).mean() / flat.norm(dim=2).mean())
    y = torch.rand(runs, n, generator=rng)

    def train(group: str, x: Tensor) -> dict[str, Tensor]:
        return training.fit(run, derive(run.seed, "init"), x, y, every, what=group).arrays()

    groups = {"curved": curved, "flat": flat, "flat, same norm": scaled}
    parts = {group: tensors(run.cached(group, partial(train, group, x))) for group, x in groups.items()}
    losses = {group: part["losses"] for group, part in parts.items()}  # [r, runs]
    mean = {group: values.mean(0) for group, values in losses.items()}
    gap, control = (Estimate.of(mean[group] - mean["curved"]) for group in ("flat", "flat, same norm"))
    curves = [curve(group, parts["curved"]["steps"], values.T) for group, values in losses.items()]
    title = "Learning white noise on a curved and on a flat manifold"
    return StudyResult(
        measured=f"The loss averaged over training is larger on flat vectors by {gap}; by {control} when they "
        f"are scaled to the norm of the curved ones (targets have variance 0.083).{stand_in(data)}",
        numbers={
            "loss over training, flat minus curved": gap,
            "loss over training, flat of the same norm minus curved": control,
            "auto-encoder's squared error per pixel": Estimate(float(made["loss"])),
        },
        figures=(loss_chart("losses", title, curves, "The curve of the curved manifold lies below the flat one's."),),
    )


def train_autoencoder(
    x: Tensor, hidden: int, code: int, noise: float, epochs: int, seed: int, batch: int = 128, lr: float = 1e-3
) -> tuple[nn.Module, float]:
    """A denoising auto-encoder d - hidden - code - hidden - d on x [n, d] in [0, 1], and its error on clean input."""
    d = x.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, code), nn.Linear(code, hidden), nn.ReLU(),
            nn.Linear(hidden, d), nn.Sigmoid(),
        ).to(x.device)  # fmt: skip
    adam = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
    rng, shuffle = generator(seed, "noise", device=x.device), generator(seed, "order")
    for _ in progress(range(epochs), "auto-encoder", leave=False):
        for chosen in torch.split(torch.randperm(len(x), generator=shuffle).to(x.device), batch):
            clean = x[chosen]
            noisy = clean + noise * torch.randn(clean.shape, generator=rng, device=x.device)
            adam.zero_grad()
            (net(noisy) - clean).square().mean().backward()
            adam.step()
    with torch.no_grad():
        return net, float((net(x[:5000]) - x[:5000]).square().mean())
