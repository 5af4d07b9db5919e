"""What the stand-in is made of: images, class texts and first weights, kept in the cache (`networks/ingredients`).

A set is named `mnist`, `quickdraw:0-30` (its classes 0 to 29, counted anew) or `digits/inverted`. Of every set one
sample is drawn, the same for all seeds; images are kept as bytes and with at most `KEPT` pixels a side, enlarged when
they are used. So a machine that has the ingredients (some 40 MB) needs neither the sets nor a tokenizer.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from biascope import InputError, data, nets
from biascope.studies import Run
from biascope.support import generator

Towers = Literal["imagenet", "drawn"]
Labelled = tuple[Tensor, Tensor]  # images [n, 3, side, side], classes [n]
KEPT = 64
SIZE = 384  # of MiniLM's embeddings
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # what the weights were made for
TURNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "inverted": lambda x: 255 - x,
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
    "mirrored": lambda x: x.flip(3),
}
TEMPLATES = {
    "mnist": "a photo of the number {}",
    "digits": "a photo of the number {}",
    "quickdraw": "a drawing of a {}",
    "chest-xray": "a chest x-ray of {} lungs",
    "elpv": "a photo of a {} solar cell",
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Counts:
    """Images of a set: to learn from (at most, or of every class), to find coefficients on, and to test on."""

    learn: int
    held: int
    test: int
    per_class: bool = False


@dataclass(frozen=True, eq=False)
class TaskImages:
    """One set: disjoint parts, brought to the network's size when asked for, and its classes' texts [classes, SIZE]."""

    kept: Mapping[str, Tensor]
    turn: str
    side: int
    device: str
    texts: Tensor

    @functools.cached_property
    def learn(self) -> Labelled:
        """To train on."""
        return self._part("learn")

    @functools.cached_property
    def held(self) -> Labelled:
        """To find coefficients on."""
        return self._part("held")

    @functools.cached_property
    def test(self) -> Labelled:
        """For the report."""
        return self._part("test")

    def _part(self, which: str) -> Labelled:
        x = self.kept[f"{which}_x"].to(self.device)
        x = _resized(TURNS[self.turn](x) if self.turn else x, self.side) / 255
        x = (x.expand(-1, 3, -1, -1) - MEAN.to(x)[:, None, None]) / STD.to(x)[:, None, None]
        return x, self.kept[f"{which}_y"].long().to(self.device)


def prompts(name: str) -> tuple[str, ...]:
    """A sentence for every class of a set, however its images are turned."""
    base, _, (low, high) = parsed(name)
    classes = data.load(base, "test", dtype=torch.uint8).info["classes"][low:high]
    words = [DIGITS[int(each)] if each in set("0123456789") else each for each in classes]
    return tuple(TEMPLATES.get(base, "a photo of a {}").format(word) for word in words)


def parsed(name: str) -> tuple[str, str, tuple[int, int | None]]:
    """`quickdraw:0-30/inverted` as the set, the turn, and the classes from .. to (None: all)."""
    whole, _, turn = name.partition("/")
    base, _, span = whole.partition(":")
    low, _, high = span.partition("-")
    if turn and turn not in TURNS:
        raise InputError(f"images cannot be {turn!r}; they can be {', '.join(TURNS)}")
    if span and not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise InputError(f"{base}:{span}: write classes as first-end, the end left out, as {base}:0-30 for thirty")
    return base, turn, (int(low), int(high)) if span else (0, None)


def task_images(name: str, counts: Counts, side: int, towers: Towers, device: str = "cpu") -> TaskImages:
    """The sample of a set and its classes' texts."""
    turn, plain = parsed(name)[1], name.partition("/")[0]
    kept = _kept(plain, counts, lambda: _drawn(plain, counts))
    told = _kept(f"texts of {plain}", towers, lambda: {"texts": _texts(prompts(plain), towers)})
    return TaskImages(kept, turn, side, device, told["texts"].to(device))


def _drawn(name: str, counts: Counts) -> dict[str, Tensor]:
    """The sample of a set. At most one sixth of what could be learned from is held out, if not so many of a class."""
    (x, y), (x_test, y_test) = stored(name, "train"), stored(name, "test")
    order = torch.randperm(len(y), generator=generator(0, "sample", name))
    if counts.per_class:
        learn = torch.cat([order[y[order] == c][: counts.learn] for c in range(int(y.max()) + 1)])
        held = order[~torch.isin(order, learn)][: counts.held]
    else:
        held, rest = order.tensor_split([min(counts.held, len(order) // 6)])
        learn = rest[: counts.learn]
    test = torch.randperm(len(y_test), generator=generator(0, "test", name))[: counts.test]
    found = {"learn": (x[learn], y[learn]), "held": (x[held], y[held]), "test": (x_test[test], y_test[test])}
    labels = {f"{key}_y": y.to(torch.int16) for key, (_, y) in found.items()}
    return {f"{key}_x": _resized(x, min(KEPT, x.shape[-1])).round().byte() for key, (x, _) in found.items()} | labels


def _resized(x: Tensor, side: int) -> Tensor:
    return F.interpolate(x.float(), size=(side, side), mode="bilinear", antialias=True, align_corners=False)


def stored(name: str, split: Literal["train", "test"]) -> Labelled:
    """Bytes [n, channels, side, side] of the classes `name` asks for, counted from 0."""
    base, _, (low, high) = parsed(name)
    found = data.load(base, split, dtype=torch.uint8)
    x = (found.x.float() * (255 / 16)).round().to(torch.uint8) if base == "digits" else found.x
    if high is None:
        return x, found.y
    keep = (found.y >= low) & (found.y < high)
    if not bool(keep.any()):
        raise InputError(f"{base} has no classes {low}-{high}")
    return x[keep], found.y[keep] - low


def _texts(sentences: tuple[str, ...], towers: Towers) -> Tensor:
    """Embeddings [classes, SIZE] of length 1: MiniLM's means over tokens, or one drawn for every sentence."""
    if towers == "drawn":
        each = [torch.randn(SIZE, generator=generator(0, "text", sentence)) for sentence in sentences]
        return F.normalize(torch.stack(each), dim=1)
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise InputError('the text tower needs transformers: pip install "biascope[hf]"') from error
    folder = data.get("minilm")
    split = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = split(list(sentences), padding=True, return_tensors="pt")
    with torch.no_grad():
        out = AutoModel.from_pretrained(folder, local_files_only=True).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return F.normalize((out * mask).sum(1), dim=1)


def encoder(stages: int, side: int, towers: Towers, seed: int, x: Tensor) -> nn.Module:
    """MobileNetV2 of so many stages and a projection to the texts, in eval mode, before any training here.

    Its batch norms keep their statistics (ImageNet's; of drawn weights those of images x) and are folded into the
    convolutions, so that the network is convolutions, ReLU6 and one linear layer.
    """
    net = nets.build("mobilenet-v2", seed=seed, image_size=side, stages=stages, outputs=SIZE)
    if towers == "imagenet":
        own = net.state_dict()
        name = "mobilenet-v2"
        found = _kept(name, "half", lambda: {k: t.half() for k, t in data.load_weights(name).items()})
        body = {k: t.to(own[k].dtype) for k, t in found.items() if k in own and not k.startswith("classifier")}
        net.load_state_dict({**own, **body})
    else:
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = None  # the mean over batches
        with torch.no_grad():
            net.train()(x.cpu())
    return _folded(net.eval()).requires_grad_(True)


def _folded(net: nn.Module) -> nn.Module:
    for layers in net.modules():
        if isinstance(layers, nn.Sequential):
            for i, (one, two) in enumerate(zip(list(layers), list(layers)[1:])):
                if isinstance(one, nn.Conv2d) and isinstance(two, nn.BatchNorm2d):
                    layers[i], layers[i + 1] = fuse_conv_bn_eval(one, two), nn.Identity()
    return net


def _kept(what: str, options: object, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """An ingredient from the cache, or made and put there."""
    recipe = json.dumps([what, repr(options), KEPT, TEMPLATES, 1])
    folder = Run(data.data_root() / "networks" / "ingredients", {}, {})
    return folder.cached(f"{what} {hashlib.sha256(recipe.encode()).hexdigest()[:8]}", make)
