"""What the studies of coordinate networks share: images on a grid, networks by name, meta-learned starts, first steps.

Faces made by StyleGAN2 stand in for CelebA's: 263, of which 163 are for meta-learning (published: 1,000 or 5,000).
Older runs have chest X-rays; smoke runs draw ellipses with eyes. Networks are drawn as haiku does (`init=haiku`). What
is made of a network and a seed is kept in the cache folder of the data too (`fields/`), by setting, seed and code.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from biascope import InputError, data, nets
from biascope.fields import Dictionary, coordinates, dictionary, meta_learn
from biascope.studies import Run
from biascope.support import derive, generator
from biascope_papers.ntk.initial import Init, redraw

THRESHOLDS = tuple(10 ** (-k / 4) for k in range(41))  # of E, from 1 down to 1e-10


@dataclass(frozen=True)
class Setting:
    """Images and networks."""

    images: Annotated[str, "ellipses (drawn), or a set of `biascope data get`"] = "chest-xray"
    side: Annotated[int, "pixels along each axis"] = 64
    n: Annotated[int, "images that are expanded or fitted; none of them was meta-learned from"] = 100
    width: Annotated[int, "units of a hidden layer"] = 256
    seeds: Annotated[int, "initial weights; also other images and pixels"] = 3
    init: Init = "torch"

    @property
    def grid(self) -> Tensor:
        """Coordinates [side, side, 2] on [0, 1)^2."""
        return coordinates((self.side, self.side), 0.0, 1.0)

    def signals(self, seed: int, n: int | None = None, purpose: str = "test") -> Tensor:
        """Images [n, side, side]."""
        split: Literal["train", "test"] = "train" if purpose == "meta" else "test"
        n = n or self.n
        if purpose == "meta" and self.images == "faces":
            n = min(n, data.info("faces").n_train)
        return grey_images(self.images, split, n, self.side, derive(seed, purpose))

    def __str__(self) -> str:
        return (
            f"{self.n} {title_of(self.images)} of {self.side} x {self.side} pixels stand in for CelebA; "
            f"hidden layers of {self.width}, {self.seeds} seeds."
        )


@dataclass(frozen=True)
class Meta:
    """How a start is learned."""

    meta_images: Annotated[int, "images it is learned from (the text says 1,000 and 5,000)"] = 1000
    meta_steps: Annotated[int, "outer steps"] = 5000
    meta_lr: Annotated[float, "of Adam, the outer loop"] = 1e-5
    inner_lr: Annotated[float, "of gradient descent, in the inner loop and when a learned start is fitted"] = 1e-2
    inner_steps: Annotated[int, "steps of the inner loop"] = 2
    meta_batch: Annotated[int, "images in an outer step (not given in the text)"] = 3


SMOKE: dict[str, Any] = {"images": "ellipses", "side": 12, "n": 12, "width": 16, "seeds": 2, "init": "haiku"}
LAPTOP: dict[str, Any] = {"images": "faces", "side": 32, "n": 40, "width": 64, "seeds": 3, "init": "haiku"}
PAPER: dict[str, Any] = {"images": "faces", "seeds": 5, "init": "haiku"}
SETTING, META = Setting(), Meta()
LEGEND = "Numbers behind SIREN are w0, behind FFN sigma. Bands: one standard error over seeds."


def with_meta(
    smoke: dict[str, Any], laptop: dict[str, Any], paper: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Sizes of a study of learned starts, with what is its own."""
    return {
        "smoke": SMOKE | {"meta_images": 60, "meta_steps": 60, "meta_lr": 1e-3} | smoke,
        "laptop": LAPTOP | {"meta_steps": 300, "meta_lr": 1e-4} | laptop,
        "paper": {**PAPER, **paper},
    }


@dataclass(frozen=True)
class Field:
    """A network by name: "relu", "siren" (scale: w0) or "ffn" (scale: sigma), and how its start was learned.

    Example:
        >>> Field("siren", 30.0, "maml").title
        'SIREN 30, MAML'
    """

    kind: Literal["relu", "siren", "ffn"]
    scale: float = 0.0
    meta: Literal["", "maml", "reptile"] = ""

    @property
    def title(self) -> str:
        """In charts and tables."""
        name = {"relu": "ReLU", "siren": f"SIREN {self.scale:g}", "ffn": f"FFN {self.scale:g}"}[self.kind]
        return f"{name}, {'MAML' if self.meta == 'maml' else 'Reptile'}" if self.meta else name

    def build(self, width: int, seed: int, init: Init = "torch") -> nn.Module:
        """Initial weights: 4 hidden layers (an FFN: features and 3), one output; SIREN's begins around 0.5."""
        if self.kind == "relu":
            made = nets.build("relu-coords", seed=seed, hidden=(width,) * 4)
        elif self.kind == "ffn":
            made = nets.build("ffn", seed=seed, hidden=(width,) * 3, mapping_size=width, sigma=self.scale)
        else:
            made = nets.build("siren", seed=seed, hidden=(width,) * 4, w0=self.scale, output_offset=0.5)
        return redraw(made, init, seed)


def start(run: Run, field: Field, setting: Setting, seed: int, meta: Meta = META) -> nn.Module:
    """The network at its first weights, drawn or meta-learned (once: then read from the run), on the run's device."""
    # the same seed for every kind of start: they differ in the learning alone
    model = field.build(setting.width, derive(run.seed, "init", seed), setting.init).to(run.device)
    algorithm = field.meta
    if not algorithm:
        return model

    def learn() -> dict[str, Tensor]:
        signals = setting.signals(derive(run.seed, "images"), meta.meta_images, "meta")
        found = meta_learn(model, setting.grid, signals, algorithm=algorithm, steps=meta.meta_steps, lr=meta.meta_lr,
                           inner_steps=meta.inner_steps, inner_lr=meta.inner_lr, batch_size=meta.meta_batch,
                           seed=derive(run.seed, "order", seed))  # fmt: skip
        run.log(start=field.title, seed=seed, first=float(found.losses[0]), last=float(found.losses[-50:].mean()))
        return {name: tensor.contiguous() for name, tensor in found.model.state_dict().items()}

    stored = kept(run, setting, f"start {field.title} {seed}", learn, dataclasses.astuple(meta))
    model.load_state_dict(stored)
    return model


def energies(run: Run, field: Field, setting: Setting, meta: Meta = META) -> Tensor:
    """E of every image at THRESHOLDS: [seeds, n, q]. Images are others for every seed, the same for every network."""

    def one(seed: int) -> dict[str, Tensor]:
        signals = setting.signals(derive(run.seed, "images", seed))
        found = atoms_of(start(run, field, setting, seed, meta), setting)
        return {"shares": found.energy(signals, THRESHOLDS).shares}

    return each_kept(run, setting, f"energy {field.title}", one, meta if field.meta else None)["shares"]


def kept(
    run: Run, setting: Setting, key: str, compute: Callable[[], Mapping[str, Any]], more: object = None
) -> dict[str, Any]:
    """What `compute` gives: from the run's folder, else from the cache of all runs, else now."""

    def shared() -> Mapping[str, Any]:
        parts = {**dataclasses.asdict(setting), "seeds": 0}  # which seed, the key says
        known = repr((sorted(parts.items()), more, run.seed, run.device, torch.__version__, _code()))
        folder = data.data_root() / "fields" / hashlib.sha256(known.encode()).hexdigest()[:16]
        with _alone(folder, key):  # another process may be computing the same
            return Run(folder, {}, {}).cached(key, compute)

    return run.cached(key, shared)


def each_kept(
    run: Run, setting: Setting, key: str, one: Callable[[int], Mapping[str, Tensor]], *more: object
) -> dict[str, Tensor]:
    """`kept` for every seed, stacked: {name: [seeds, ...]}."""
    made = [kept(run, setting, f"{key} {i}", functools.partial(one, i), more) for i in range(setting.seeds)]
    return {name: torch.stack([row[name] for row in made]) for name in made[0]}


@contextmanager
def _alone(folder: Path, key: str) -> Iterator[None]:
    """One process at a time for a key, where the system has file locks; elsewhere the same is computed twice."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@functools.cache
def _code() -> str:
    """A sum over the code: what it made before a change is not used after it."""
    library = Path(data.__path__[0]).parent
    parts = ("fields", "kernels", "linalg", "nets", "ensembles", "network", "data", "support")
    places = [place for part in parts for place in sorted((library / part).rglob("*.py"))]
    places += [Path(__file__), Path(__file__).parents[1] / "ntk" / "initial.py"]
    return hashlib.sha256(b"".join(place.read_bytes() for place in places)).hexdigest()


def atoms_of(model: nn.Module, setting: Setting) -> Dictionary:
    """The dictionary of a network on the grid, all atoms, in float64."""
    return dictionary(model, setting.grid.to(next(model.parameters()).device))


def areas(shares: Tensor) -> Tensor:
    """Area under E over log10 lambda, [...] of shares [..., q]: 1 if all energy is in the first atom."""
    return torch.trapezoid(shares, dx=1 / (shares.shape[-1] - 1))


def stacked(made: Sequence[dict[str, Any]], name: str) -> Tensor:
    """One tensor of every seed, [seeds, ...]."""
    return torch.stack([each[name] for each in made])


def first_steps(
    model: nn.Module, r: Tensor, images: Tensor, fitted: Tensor, *, steps: int, lr: float, optimiser: str
) -> tuple[Tensor, Tensor]:
    """PSNR in dB on the fitted pixels and on the others, before and after each of the first steps: two [n, steps + 1].

    All images [n, h, w] in [0, 1] are fitted at once, each by its own copy of the model, on the pixels of the mask
    `fitted` [h, w]; r: coordinates [h, w, 2]. Adam works entry by entry, so stacked copies are updated as single ones
    would be.
    """
    like = next(model.parameters())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    free = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copies = {name: p.detach().expand(len(images), *p.shape).clone().requires_grad_() for name, p in free.items()}
    fixed = {name: tensor.detach() for name, tensor in tensors.items() if name not in free}
    inside = fitted.reshape(-1).to(like.device)
    x, y = r.reshape(-1, r.shape[-1]).to(like), images.flatten(1).to(like)

    def errors() -> Tensor:  # [n, pixels]
        out: Tensor = vmap(lambda params: functional_call(model, {**fixed, **params}, (x,))[:, 0])(copies)
        return (out - y).square()

    updates = {"adam": torch.optim.Adam, "gd": torch.optim.SGD}[optimiser](list(copies.values()), lr=lr)
    seen = []
    for _ in range(steps + 1):
        square = errors()
        with torch.no_grad():
            seen.append(torch.stack([square[:, inside].mean(1), square[:, ~inside].mean(1)]))
        gradients = torch.autograd.grad(square[:, inside].mean(1).sum(), list(copies.values()))
        for p, g in zip(copies.values(), gradients):
            p.grad = g
        updates.step()
    decibels = -10 * torch.stack(seen, -1).double().log10().cpu()  # [2, n, steps + 1]
    return decibels[0], decibels[1]


def psnrs(run: Run, field: Field, setting: Setting, steps: int, lr: float, meta: Meta = META) -> tuple[Tensor, Tensor]:
    """PSNR of the first steps [seeds, n, steps + 1] on half of the pixels and on the other half.

    Drawn weights are fitted by Adam with `lr`, learned ones by gradient descent with the rate of their inner loop.
    """

    def one(seed: int) -> dict[str, Tensor]:
        signals = setting.signals(derive(run.seed, "images", seed))
        mask = half(setting.side, derive(run.seed, "pixels", seed))
        rate, optimiser = (meta.inner_lr, "gd") if field.meta else (lr, "adam")
        model = start(run, field, setting, seed, meta)
        train, test = first_steps(model, setting.grid, signals, mask, steps=steps, lr=rate, optimiser=optimiser)
        return {"train": train, "test": test}

    made = each_kept(run, setting, f"psnr {field.title}", one, steps, lr, meta if field.meta else None)
    return made["train"], made["test"]


def half(side: int, seed: int) -> Tensor:
    """A random mask [side, side] of half of the pixels, the same for all images."""
    order = torch.randperm(side * side, generator=generator(seed, "half"))
    return (order < side * side // 2).reshape(side, side)


def grey_images(name: str, split: Literal["train", "test"], n: int, side: int, seed: int) -> Tensor:
    """n random grey images [n, side, side] in [0, 1]: drawn ellipses, or of a real set, averaged down to the side."""
    if name == "ellipses":
        return ellipses(n, side, seed)
    weights = torch.tensor([0.299, 0.587, 0.114])
    found = colour_images(name, split, n, side, seed)
    return (found * weights[:, None, None]).sum(1) if found.shape[1] == 3 else found[:, 0]


def colour_images(name: str, split: Literal["train", "test"], n: int, side: int, seed: int) -> Tensor:
    """n random images [n, channels, side, side] in [0, 1] of a real set, averaged down to the side."""
    found = data.load(name, split, dtype=torch.uint8)
    if len(found) < n:
        raise InputError(f"{name} has {len(found)} images in its {split} split, {n} were asked for")
    if found.x.shape[-1] < side:
        raise InputError(f"{name} has images of side {found.x.shape[-1]}; side={side} would only repeat pixels")
    order = torch.randperm(len(found), generator=generator(seed, "images"))[:n]
    x = found.x[order].float() / (16 if name == "digits" else 255)
    return F.interpolate(x, (side, side), mode="bilinear", antialias=True, align_corners=False)


def title_of(name: str) -> str:
    """A set of images in words."""
    known = {
        "ellipses": "drawn ellipses",
        "chest-xray": "chest X-rays",
        "faces": "faces made by StyleGAN2",
        "astronaut": "photograph of an astronaut",
    }
    return known.get(name, f"images of {name}")


def ellipses(n: int, side: int, seed: int) -> Tensor:
    """Drawn stand-ins for faces [n, side, side] in [0, 1]: a soft ellipse with two eyes before a slope of grey."""
    rng = generator(seed, "ellipses")
    u = torch.rand(n, 8, 1, 1, generator=rng)
    y, x = coordinates((side, side), 0.0, 1.0).unbind(-1)

    def soft(cy: Tensor, cx: Tensor, ry: Tensor, rx: Tensor) -> Tensor:
        return torch.sigmoid(8 * (1 - (((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2)))

    cy, cx = 0.45 + 0.1 * u[:, 0], 0.45 + 0.1 * u[:, 1]
    ry, rx = 0.3 + 0.08 * u[:, 2], 0.2 + 0.08 * u[:, 3]
    turn = 2 * math.pi * u[:, 4]
    back = 0.3 + 0.2 * ((x - 0.5) * turn.cos() + (y - 0.5) * turn.sin()) * u[:, 5]
    image = back + (0.3 + 0.3 * u[:, 6]) * soft(cy, cx, ry, rx)
    for side_of in (-1, 1):
        image = image - 0.3 * u[:, 7] * soft(cy - 0.3 * ry, cx + side_of * 0.45 * rx, 0.2 * ry, 0.25 * rx)
    return image.clamp(0, 1)
