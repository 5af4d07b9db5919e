"""The anisotropy directions of an architecture, all of them, measured once per run or taken from an earlier run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from biascope.ensembles import record
from biascope.errors import InputError
from biascope.geometry import nads
from biascope.seeds import derive
from biascope.studies.nad.directional import SMALL, Net, Side, Width, architecture, resolve_precision
from biascope.studies.runs import Run, Value

Networks = Annotated[int, "networks whose gradients are measured for the directions"]
Head = Annotated[Literal["marginal", "sampled"], "last layer averaged out in closed form, or sampled as the paper does"]
Step = Annotated[float, "finite-difference step h"]
Reuse = Annotated[str, "run folder of another study of the same network and image size, to take the directions from"]
Reference = Annotated[str, "folder with published directions, nads_NAME.npz, to compare with"]

PUBLISHED = {"lenet": "LeNet", "vgg11": "VGG11", "resnet18": "ResNet18", "densenet121": "DenseNet121"}


@dataclass(frozen=True)
class Source:
    """The network whose directions are wanted, and how they are measured."""

    net: Net = "lenet"
    image_size: Side = 32
    width: Width = 0
    networks: Networks = 2000
    head: Head = "marginal"
    step: Step = 100.0
    reuse: Reuse = ""


SOURCE = Source()


def directions_of(run: Run, source: Source, precision: str) -> tuple[Tensor, Tensor]:
    """All D = side^2 directions [D, side, side], leading first, and their eigenvalues [D] (Algorithm 1).

    They are stored in the run as "directions <net>"; `reuse` reads them from there in another run's folder.
    """
    name, side = f"directions {source.net}", source.image_size
    if source.reuse:
        found = Run.open(source.reuse).load_arrays(name)
        if found["directions"].shape[1:] != (side, side):
            raise InputError(
                f"{source.reuse} has directions of shape {list(found['directions'].shape[1:])}, this study needs "
                f"[{side}, {side}]"
            )
        return found["directions"], found["eigenvalues"].double()

    def measure() -> dict[str, Value]:
        factory = record(architecture(source.net, side, outputs=1, width=source.width))
        small = sum(p.numel() for p in factory.template.parameters()) <= SMALL
        # differences of large outputs: bf16 has too few digits, whatever the size
        kind = "float32" if resolve_precision(precision, run.device, small) == "float32" else "tf32"
        found = nads(
            factory,
            (1, side, side),
            source.networks,
            step=source.step,
            device=run.device,
            seed=derive(run.seed, name),
            head=source.head,
            precision=kind,  # type: ignore[arg-type]
        )
        return {"directions": found.directions[:, 0].float(), "eigenvalues": found.eigenvalues}

    stored = run.cached(name, measure)
    return torch.as_tensor(stored["directions"]), torch.as_tensor(stored["eigenvalues"]).double()


def spread_indices(count: int, total: int) -> list[int]:
    """About `count` indices from 0 to total - 1, half evenly spaced and half evenly on a logarithmic scale.

    Example:
        >>> spread_indices(8, 1000)
        [0, 9, 99, 333, 666, 999]
        >>> len(spread_indices(0, 1000))
        1000
    """
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
