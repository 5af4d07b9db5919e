"""Fig A.10: white noise is easier to learn on a curved manifold than on a flat one of the same dimension.

Curved: reconstructions of a denoising auto-encoder with a code of `code` numbers (its decoder embeds the code in image
space). Flat: vectors uniform on [0, 1] in their first `code` entries and zero elsewhere. Targets are uniform on [0, 1].
Two identical networks, the same training. (The sentence in the text is garbled; the figure's direction is this.) The
two sets differ in size too, so a third curve has the flat vectors scaled to the mean norm of the curved ones.

Verdict rule, over runs: "confirmed" if the loss averaged over training is larger on flat than on curved vectors by two
standard errors. The control is reported, it does not decide.
"""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from biascope import data as sets
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value
from biascope.studies.spectral.fitting import draw_mlps, fit
from biascope.studies.spectral.images import said

CLAIM = (
    "White noise is learned more easily, by the loss averaged over training, on the curved manifold of images than on "
    "a flat manifold of the same dimension. (Vectors of equal norm, and the loss at the end, are shown, not judged.)"
)
GROUPS = ("curved", "flat", "flat, same norm")


@study(
    "spectral/figA.10",
    paper="alignment",
    figure="A.10",
    claim=CLAIM,
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
    depth: Annotated[int, "Linear layers"] = 6,
    width: Annotated[int, "units in a hidden layer"] = 256,
    steps: Annotated[int, "full-batch Adam steps (not given in the text)"] = 10_000,
    runs: Annotated[int, "networks, each with its own vectors and targets"] = 10,
    lr: Annotated[float, "of Adam"] = 3e-4,
    every: Annotated[int, "steps between two measurements"] = 100,
    precision: Annotated[str, "float32 or tf32 products on a GPU"] = "float32",
) -> StudyResult:
    """Random targets on reconstructions of images and on a flat manifold."""

    def reconstructions() -> dict[str, Value]:
        x = sets.load(data, "train").x.flatten(1)[: images or None].to(run.device)
        net, loss = train_autoencoder(x, hidden, code, noise, epochs, derive(run.seed, "auto-encoder"))
        chosen = torch.randperm(len(x), generator=generator(run.seed, "chosen"))[: runs * n]
        if len(chosen) < runs * n:  # small stand-ins: images may come again in another run
            chosen = chosen.repeat(runs * n // len(chosen) + 1)[: runs * n]
        with torch.no_grad():
            return {"x": net(x[chosen.to(x.device)]).reshape(runs, n, -1), "loss": loss}

    made = run.cached("reconstructions", reconstructions)
    curved = torch.as_tensor(made["x"])
    rng = generator(run.seed, "flat")
    flat = torch.zeros_like(curved)
    flat[..., :code] = torch.rand(runs, n, code, generator=rng)
    scaled = flat * (curved.norm(dim=2).mean() / flat.norm(dim=2).mean())
    y = torch.rand(runs, n, generator=rng)

    def train(group: str) -> dict[str, Value]:
        x = {"curved": curved, "flat": flat, "flat, same norm": scaled}[group]
        networks = draw_mlps(runs, x.shape[-1], depth, width, derive(run.seed, "init"), run.device)
        done = fit(networks, x, y, steps=steps, lr=lr, every=every, precision=precision, what=group)
        return {"steps": done.steps, "losses": done.losses}

    parts = {group: run.cached(group, partial(train, group)) for group in GROUPS}
    at = torch.as_tensor(parts["curved"]["steps"])
    losses = {group: torch.as_tensor(p["losses"]) for group, p in parts.items()}  # [r, runs]
    mean = {group: values.mean(0) for group, values in losses.items()}
    numbers = {
        "loss over training, flat minus curved": Estimate.of(mean["flat"] - mean["curved"]),
        "loss over training, flat of the same norm minus curved": Estimate.of(mean["flat, same norm"] - mean["curved"]),
        **{f"loss at the end, {group}": Estimate.of(values[-1]) for group, values in losses.items()},
        "auto-encoder's squared error per pixel": Estimate(float(torch.as_tensor(made["loss"]))),
        "mean norm, curved": Estimate(float(curved.norm(dim=2).mean())),
        "mean norm, flat": Estimate(float(flat.norm(dim=2).mean())),
    }
    difference, control = list(numbers.values())[:2]
    return StudyResult(
        verdict="confirmed" if above(difference, 0.0) else "not confirmed",
        claim=CLAIM,
        measured=f"The loss averaged over training is larger on flat vectors by {difference}; by {control} when they "
        f"are scaled to the norm of the curved ones (targets have variance 0.083). {runs} runs, {n} vectors, code of "
        f"{code}, {steps} steps.{said(data)}",
        numbers=numbers,
        figures=(
            Chart(
                "losses",
                "Learning white noise on a curved and on a flat manifold",
                "step",
                "mean squared error",
                tuple(curve(g, at, v.T) for g, v in losses.items()),
                alt="The curve of the curved manifold lies below that of the flat one.",
                log_y=True,
            ),
        ),
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
