"""What the studies of coordinate networks share: images on a grid, networks by name, meta-learned starts, first steps.

The paper has face photographs (CelebA), which cannot be fetched here. Chest X-rays stand in: grey photographs of one
kind of thing, in one pose, larger than 64 x 64. Smoke runs draw ellipses with eyes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from biascope import data, nets
from biascope.data.catalogue import source
from biascope.errors import InputError, near
from biascope.fields import Dictionary, coordinates, dictionary, meta_learn
from biascope.seeds import derive, generator
from biascope.studies.runs import Run, Value

THRESHOLDS = tuple(10 ** (-k / 4) for k in range(41))  # of E, from 1 down to 1e-10


@dataclass(frozen=True)
class Setting:
    """Images and networks."""

    images: Annotated[str, "ellipses (drawn), or a set of `biascope data get`"] = "chest-xray"
    side: Annotated[int, "pixels along each axis"] = 64
    n: Annotated[int, "images that are expanded or fitted; none of them was meta-learned from"] = 100
    width: Annotated[int, "units of a hidden layer"] = 256
    seeds: Annotated[int, "initial weights; also other images and pixels"] = 3

    @property
    def grid(self) -> Tensor:
        """Coordinates [side, side, 2] on [0, 1)^2."""
        return coordinates((self.side, self.side), 0.0, 1.0)

    def signals(self, seed: int, n: int | None = None, purpose: str = "test") -> Tensor:
        """Images [n, side, side]."""
        return grey_images(self.images, "train" if purpose == "meta" else "test", n or self.n, self.side,
                           derive(seed, purpose))  # fmt: skip

    @property
    def said(self) -> str:
        """For the text of a result."""
        return (
            f"{self.n} {called(self.images)} of {self.side} x {self.side} pixels stand in for faces; "
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


SMOKE: dict[str, Any] = {"images": "ellipses", "side": 12, "n": 12, "width": 16, "seeds": 2}
LAPTOP: dict[str, Any] = {"side": 32, "n": 40, "width": 64, "seeds": 3}
META_SMOKE: dict[str, Any] = {"meta_images": 60, "meta_steps": 60, "meta_lr": 1e-3}
META_LAPTOP: dict[str, Any] = {"meta_steps": 300, "meta_lr": 1e-4}
SETTING, META = Setting(), Meta()
LEGEND = "Numbers behind SIREN are w0, behind FFN sigma. Bands: one standard error over seeds."


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

    def build(self, width: int, seed: int) -> nn.Module:
        """Initial weights: 4 hidden layers (an FFN: features and 3), one output; SIREN's begins around 0.5."""
        if self.kind == "relu":
            return nets.build("relu-coords", seed=seed, hidden=(width,) * 4)
        if self.kind == "ffn":
            return nets.build("ffn", seed=seed, hidden=(width,) * 3, mapping_size=width, sigma=self.scale)
        return nets.build("siren", seed=seed, hidden=(width,) * 4, w0=self.scale, output_offset=0.5)


def start(run: Run, field: Field, setting: Setting, seed: int, meta: Meta = META) -> nn.Module:
    """The network at its first weights, drawn or meta-learned (once: then read from the run), on the run's device."""
    # the same seed for every kind of start: they differ in the learning alone
    model = field.build(setting.width, derive(run.seed, "init", seed)).to(run.device)
    if not field.meta:
        return model

    def learn() -> dict[str, Value]:
        signals = setting.signals(derive(run.seed, "images"), meta.meta_images, "meta")
        found = meta_learn(model, setting.grid, signals, algorithm=field.meta, steps=meta.meta_steps, lr=meta.meta_lr,
                           inner_steps=meta.inner_steps, inner_lr=meta.inner_lr, batch_size=meta.meta_batch,
                           seed=derive(run.seed, "order", seed))  # fmt: skip
        run.log(start=field.title, seed=seed, first=float(found.losses[0]), last=float(found.losses[-50:].mean()))
        return {name: tensor.contiguous() for name, tensor in found.model.state_dict().items()}

    stored = run.cached(f"start {field.title} {seed}", learn)
    model.load_state_dict({name: torch.as_tensor(tensor) for name, tensor in stored.items()})
    return model


def energies(run: Run, field: Field, setting: Setting, meta: Meta = META) -> Tensor:
    """E of every image at THRESHOLDS: [seeds, n, q]. Images are others for every seed, the same for every network."""

    def one(seed: int) -> dict[str, Value]:
        signals = setting.signals(derive(run.seed, "images", seed))
        found = atoms_of(start(run, field, setting, seed, meta), setting)
        return {"shares": found.energy(signals, THRESHOLDS).shares}

    made = run.cached_each(f"energy {field.title}", range(setting.seeds), one)
    return torch.stack([torch.as_tensor(each["shares"]) for each in made])


def atoms_of(model: nn.Module, setting: Setting) -> Dictionary:
    """The dictionary of a network on the grid, all atoms, in float64."""
    return dictionary(model, setting.grid.to(next(model.parameters()).device))


def areas(shares: Tensor) -> Tensor:
    """Area under E over log10 lambda, [...] of shares [..., q]: 1 if all energy is in the first atom.

    Example:
        >>> areas(torch.ones(2, len(THRESHOLDS)))
        tensor([1., 1.])
    """
    return torch.trapezoid(shares, dx=1 / (shares.shape[-1] - 1))


def first_steps(
    model: nn.Module, r: Tensor, images: Tensor, fitted: Tensor, *, steps: int, lr: float, optimiser: str
) -> tuple[Tensor, Tensor]:
    """PSNR in dB on the fitted pixels and on the others, before and after each of the first steps: two [n, steps + 1].

    All images [n, h, w] are fitted at once, each by its own copy of the network; Adam works entry by entry, so stacked
    copies are updated as single ones would be.

    Args:
        model: [..., 2] -> [..., 1]; not changed.
        r: coordinates [h, w, 2].
        images: [n, h, w] with values in [0, 1].
        fitted: mask [h, w].
        steps: full-batch updates.
        lr: learning rate.
        optimiser: "adam" or "gd".
    """
    if optimiser not in ("adam", "gd"):
        raise InputError(f"optimiser={optimiser!r} is not known; choose 'adam' or 'gd'")
    like = next(model.parameters())
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    free = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copies = {name: p.detach().expand(len(images), *p.shape).clone().requires_grad_() for name, p in free.items()}
    fixed = {name: tensor.detach() for name, tensor in held.items() if name not in free}
    inside = fitted.reshape(-1).to(like.device)
    x, y = r.reshape(-1, r.shape[-1]).to(like), images.flatten(1).to(like)

    def errors() -> Tensor:  # [n, pixels]
        out = vmap(lambda params: functional_call(model, {**fixed, **params}, (x,))[:, 0])(copies)
        square: Tensor = (out - y).square()
        return square

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

    def one(seed: int) -> dict[str, Value]:
        signals = setting.signals(derive(run.seed, "images", seed))
        how: dict[str, Any] = (
            {"lr": meta.inner_lr, "optimiser": "gd"} if field.meta else {"lr": lr, "optimiser": "adam"}
        )
        train, test = first_steps(start(run, field, setting, seed, meta), setting.grid, signals,
                                  half(setting.side, derive(run.seed, "pixels", seed)), steps=steps, **how)  # fmt: skip
        return {"train": train, "test": test}

    made = run.cached_each(f"psnr {field.title}", range(setting.seeds), one)
    return tuple(torch.stack([torch.as_tensor(each[key]) for each in made]) for key in ("train", "test"))  # type: ignore[return-value]


def half(side: int, seed: int) -> Tensor:
    """A random mask [side, side] of half of the pixels, the same for all images.

    Example:
        >>> int(half(4, 0).sum())
        8
    """
    order = torch.randperm(side * side, generator=generator(seed, "half"))
    return (order < side * side // 2).reshape(side, side)


# ------------------------------------------------------------------------------------------------------------ images


def grey_images(name: str, split: Literal["train", "test"], n: int, side: int, seed: int) -> Tensor:
    """n random grey images [n, side, side] in [0, 1]: drawn ellipses, or of a real set, averaged down to the side.

    Example:
        >>> grey_images("digits", "test", 3, 8, seed=0).shape
        torch.Size([3, 8, 8])
    """
    if name == "ellipses":
        return ellipses(n, side, seed)
    known = ("ellipses", *(each for each in data.names() if data.info(each).classes))
    if name not in known:
        raise InputError(f"no images are called {name!r}{near(name, known)}")
    found = data.load(name, split, dtype=torch.uint8)
    if len(found) < n:
        raise InputError(f"{name} has {len(found)} images in its {split} split, {n} were asked for")
    order = torch.randperm(len(found), generator=generator(seed, "images"))[:n]
    x = found.x[order].float() / source(name).max_value
    weights = torch.tensor([0.299, 0.587, 0.114]) if x.shape[1] == 3 else torch.ones(1)
    grey = (x * weights[:, None, None]).sum(1, keepdim=True)
    if grey.shape[-1] < side:
        raise InputError(f"{name} has images of side {grey.shape[-1]}; side={side} would only repeat pixels")
    return F.interpolate(grey, (side, side), mode="bilinear", antialias=True, align_corners=False)[:, 0]


def called(name: str) -> str:
    """A set of images in words.

    Example:
        >>> called("chest-xray")
        'chest X-rays'
    """
    return {"ellipses": "drawn ellipses", "chest-xray": "chest X-rays"}.get(name, f"images of {name}")


def ellipses(n: int, side: int, seed: int) -> Tensor:
    """Drawn stand-ins for faces [n, side, side] in [0, 1]: a soft ellipse with two eyes before a slope of grey.

    Example:
        >>> drawn = ellipses(2, 16, seed=0)
        >>> drawn.shape, bool((drawn[0] != drawn[1]).any())
        (torch.Size([2, 16, 16]), True)
    """
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
