"""The anisotropy directions of an architecture, measured once per run or taken from another, and their frequencies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from biascope import InputError, nads
from biascope.ensembles import record
from biascope.studies import Run
from biascope.support import derive, generator
from biascope_papers.nad.directional import SMALL, Array, Net, Side, Width, architecture, resolve_precision

Networks = Annotated[int, "networks whose gradients are measured for the directions"]
Head = Annotated[Literal["marginal", "sampled"], "last layer averaged out in closed form, or sampled as the paper does"]
Step = Annotated[float, "finite-difference step h"]
Reference = Annotated[str, "folder with published directions, nads_NAME.npz, to compare with"]
Count = Annotated[int, "how many indices to train on, half evenly and half logarithmically spaced; 0: all"]

PUBLISHED = {"lenet": "LeNet", "vgg11": "VGG11", "resnet18": "ResNet18", "densenet121": "DenseNet121"}
STRONGEST = 0.05  # share of frequencies; a random direction has about 20 % of its energy there


@dataclass(frozen=True)
class Source:
    """The network whose directions are wanted, and how they are measured."""

    net: Net = "lenet"
    image_size: Side = 32
    width: Width = 0
    networks: Networks = 2000
    head: Head = "marginal"
    step: Step = 100.0
    reuse: Annotated[str, "run folder of another study of the same network, to take the directions from"] = ""


SOURCE = Source()


def directions_of(run: Run, source: Source, precision: str) -> tuple[Tensor, Tensor]:
    """All D = side^2 directions [D, side, side], leading first, and their eigenvalues [D] (Algorithm 1).

    They are stored in the run as "directions <net>"; `reuse` reads them from there in another run's folder.
    """
    name, side = f"directions {source.net}", source.image_size
    if source.reuse:
        found = Run.open(source.reuse).load_arrays(name)
        shape = list(found["directions"].shape[1:])
        if shape != [side, side]:
            raise InputError(f"{source.reuse} has directions of shape {shape}, this study needs [{side}, {side}]")
        return found["directions"], found["eigenvalues"].double()

    def measure() -> dict[str, Any]:
        factory = record(architecture(source.net, side, outputs=1, width=source.width))
        small = sum(p.numel() for p in factory.template.parameters()) <= SMALL
        # differences of large outputs: bf16 has too few digits, whatever the size
        kind: Any = "float32" if resolve_precision(precision, run.device, small) == "float32" else "tf32"
        seed, shape = derive(run.seed, name), (1, side, side)
        x = torch.randn(shape, generator=generator(seed, "x"))
        found = nads(factory, shape, source.networks, step=source.step, device=run.device, seed=seed,
                     head=source.head, precision=kind, x=x)  # fmt: skip
        return {"directions": found.directions[:, 0].float(), "eigenvalues": found.eigenvalues}

    stored: dict[str, Any] = run.cached(name, measure)
    return stored["directions"], stored["eigenvalues"].double()


def spread_indices(count: int, total: int) -> list[int]:
    """About `count` indices from 0 to total - 1, half evenly spaced and half evenly on a logarithmic scale; 0: all."""
    if count <= 0 or count >= total:
        return list(range(total))
    half = max(2, count // 2)
    even = np.linspace(0, total - 1, half).round()
    logarithmic = np.geomspace(1, total, max(2, count - half)).round() - 1
    return sorted({int(i) for i in (*even, *logarithmic)})


def published_directions(net: str, folder: str, D: int) -> Tensor | None:
    """The first 64 published directions [64, D] of a network, where the folder has them and D fits."""
    if folder and not Path(folder).is_dir():
        raise InputError(
            f"there is no folder {folder!r} with published directions: name one, or do without: --reference ''"
        )
    file = Path(folder) / f"nads_{PUBLISHED.get(net, net)}.npz"
    if not (folder and file.is_file()):
        return None
    directions = torch.as_tensor(np.load(file)["directions"]).double()
    return directions if directions.shape[1] == D else None


def energy(directions: Tensor) -> Tensor:
    """|FFT|^2 of images [k, side, side], each adding up to 1, DC at [0, 0]."""
    power = torch.fft.fft2(directions.double()).abs().square()
    shares: Tensor = power / power.sum((-2, -1), keepdim=True)
    return shares


def concentration(directions: Tensor) -> float:
    """Mean over directions [k, side, side] of the energy in their strongest 5 % of frequencies."""
    flat = energy(directions).flatten(1)
    strongest = max(1, round(STRONGEST * flat.shape[1]))
    return float(flat.topk(strongest, dim=1).values.sum(1).mean())


def radius(side: int) -> Tensor:
    """Distance of every frequency from DC [side, side], in cycles per image."""
    k = torch.fft.fftfreq(side, 1 / side, dtype=torch.float64)
    return torch.hypot(k[:, None], k[None, :])


def mean_frequency(directions: Tensor) -> Array:
    """Mean distance from DC [k] of directions [k, side, side], weighted by energy, in cycles per image."""
    return (energy(directions) * radius(directions.shape[-1])).sum((1, 2)).numpy()


def radial(directions: Tensor) -> Array:
    """Energy [k, distances] of directions [k, side, side] by distance from DC in whole cycles."""
    at = radius(directions.shape[-1]).round().long().flatten()
    power = energy(directions).flatten(1)
    return power.new_zeros(len(power), int(at.max()) + 1).index_add_(1, at, power).numpy()
