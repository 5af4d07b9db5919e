"""G at initialisation, as every figure of the paper needs it: estimated once per network, kept on disk, decomposed.

`heads` > 1 gives every network that many output layers at once: their gradients are independent given the layers below,
so the estimate is unbiased and needs far fewer networks. The user's own networks have their own output layers, so
`heads` times as many are drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

from biascope import InputError, UnsupportedError, average_geometry
from biascope.ensembles import Initialiser, arithmetic, record
from biascope.geometry import analytic_geometry
from biascope.linalg import psd_eigh
from biascope.studies import Run
from biascope.support import derive, generator, progress
from biascope_papers.gih.networks import at_least, factory, is_own


@dataclass(frozen=True)
class Geometry:
    """G [D, D] with eigenvalues [D] descending and eigenvectors [D, D] (columns); `groups` are independent estimates.

    `rows` is the number of gradients behind it.
    """

    matrix: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    vectors: Tensor = field(repr=False)
    groups: tuple[Tensor, ...] = field(repr=False)
    shape: tuple[int, ...]
    rows: int

    def direction(self, i: int) -> Tensor:
        """Eigenvector i (0 is the leading one), float32, in the shape of an input."""
        return self.vectors[:, i].float().reshape(self.shape)

    @property
    def error(self) -> float:
        """Expected ||G - truth||_F / ||G||_F from the spread of the groups; NaN with one group."""
        n = len(self.groups)
        if n < 2:
            return float("nan")
        squares = sum(float((each - self.matrix).square().sum()) for each in self.groups)
        return math.sqrt(squares / (n * (n - 1))) / float(self.matrix.norm())


@dataclass(frozen=True)
class Drawn:
    """Options of all studies that need G: how it is sampled."""

    networks: Annotated[int, "networks drawn for G"] = 10_000
    heads: Annotated[int, "output layers per network drawn for G (1 in the paper)"] = 1
    parts: Annotated[int, "independent groups of these networks, for the error of G where it is counted"] = 1

    def geometry(self, run: Run, net: str, shape: Sequence[int], norm: bool = True) -> Geometry:
        """G of a network by the paper's recipe."""
        return initial_geometry(run, net, shape, networks=self.networks, heads=self.heads, groups=self.parts, norm=norm)


def initial_geometry(
    run: Run, net: str, shape: Sequence[int], *, networks: int, heads: int = 1, groups: int = 1, norm: bool = True,
    probe_std: float = 1e-3, activation: str | None = "gelu",
) -> Geometry:  # fmt: skip
    """G of a network by name: GELU (`activation` None: its own), probes N(0, probe_std^2 I); once per run folder.

    Own networks keep their activations, and networks * heads of them are drawn: as many gradients as of the others.
    """
    at_least(groups, networks=networks)
    shape, each, own = tuple(shape), networks // groups, is_own(net)
    each, heads = (each * heads, 1) if own else (each, heads)
    keep = torch.float64 if math.prod(shape) <= 1024 else torch.float32

    def one(i: int) -> dict[str, Tensor]:
        seed = derive(run.seed, "geometry", net, shape, norm, i)
        recorded = record(factory(net, shape, outputs=heads, norm=norm, activation=activation))
        if heads == 1:
            found = average_geometry(
                recorded, shape, each, seed=seed, probe_std=probe_std, device=run.device,
                scalarise=decision if own else None,
            ).matrix  # fmt: skip
        else:
            found = many_heads(recorded, shape, each, seed, probe_std, run.device)
        return {"matrix": found.to(keep)}

    tag = f" {'x'.join(map(str, shape))}{'' if norm else ' without norm'}"
    tag += "" if activation == "gelu" else " as it is"
    made = run.cached_each(f"geometry {net}{tag}", progress(range(groups), f"geometry of {net}", leave=False), one)
    parts = tuple(torch.as_tensor(each["matrix"]).double() for each in made)
    mean = torch.stack(parts).mean(0)
    found = psd_eigh(mean.to(run.device))
    return Geometry(mean, found.values.cpu(), found.vectors.cpu(), parts, shape, each * groups * heads)


def decision(out: Tensor) -> Tensor:
    """What of the outputs [n, c] of an own network is differentiated: the difference of two logits, or the first."""
    return out[:, 1] - out[:, 0] if out.shape[1] == 2 else out[:, 0]


def known_geometry(net: str, shape: tuple[int, ...]) -> Tensor | None:
    """G of the network as it is at probes N(0, I), where theory knows it (an MLP: a multiple of I); else None."""
    try:
        return analytic_geometry(factory(net, shape, outputs=1, norm=False), shape)
    except UnsupportedError:
        return None


def many_heads(
    recorded: Initialiser, shape: Sequence[int], networks: int, seed: int, probe_std: float, device: str
) -> Tensor:
    """Second moment [D, D] of the gradients of all outputs of all networks, one probe per network, float64."""
    D, template = math.prod(shape), recorded.template
    weight = sum(p.numel() for p in template.parameters())
    group = max(1, min(networks, recorded.block, 2**24 // weight, 64))
    total, count = torch.zeros(D, D, dtype=torch.float64, device=device), 0

    def rows(values: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = jacrev(lambda z: functional_call(template, values, (z[None],))[0])(x)  # [heads, *shape]
        return made

    for start in progress(range(0, networks, group), "networks", leave=False):
        stop = min(start + group, networks)
        drawn = recorded.draw(seed, start, stop, device)
        noise = [torch.randn(1, *shape, generator=generator(seed, "probe", t))[0] for t in range(start, stop)]
        probes = probe_std * torch.stack(noise).to(device)
        with arithmetic(torch.device(device), "float32"):  # the small eigenvalues would drown in cuDNN's tf32
            if len(drawn) == 1:
                found = rows(drawn.one(0), probes[0])[None]
            else:
                found = vmap(rows)({**drawn.params, **drawn.buffers}, probes)
        flat = found.detach().reshape(-1, D).double()
        total.addmm_(flat.T, flat)
        count += len(flat)
    return (total / count).cpu()


def spread_indices(D: int, stride: int) -> list[int]:
    """Every `stride`-th index of D eigenvectors, and the last one."""
    at_least(1, stride=stride)
    return sorted({*range(0, D, stride), D - 1})


def check_axes(given: str, axes: Sequence[int], D: int) -> None:
    """Refuse axes that are not different ones of the first D eigenvectors; `given` is what the user typed."""
    if len(set(axes)) < len(axes) or not all(0 <= axis < D for axis in axes):
        raise InputError(f"{given}: different eigenvectors are needed, with indices from 0 to {D - 1}")
