"""A stand-in for CLIP: an encoder pre-trained here on a mixture of image sets, then fine-tuned on each of them.

A set is named `mnist`, `quickdraw:0-30` (its classes 0 to 29, counted anew) or `digits/inverted`. theta_0 sees every
image of the control set and `few` images per class of every task, with one cosine classifier over all classes; its rows
for a task's classes are that task's head, frozen from then on, as CLIP's text embeddings are. Only the encoder is
fine-tuned or linearised. "Random": the same heads behind an encoder that was never trained.

All studies work on the same networks, kept in the cache folder of the data (`networks/`) by setting, seed and code:
laptop runs leave 16 MB there, all paper runs about 5 GB. A run folder has its own copy of what was measured.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import InputError, TaskVector, data, linearize, nets
from biascope.editing import fine_tune
from biascope.studies import Run
from biascope.support import derive, generator

Start = Literal["pre-trained", "random"]
Labelled = tuple[Tensor, Tensor]  # images [n, 1, side, side], classes [n]
METHODS = ("non-linear", "post-hoc", "linear")
LABELS = {"non-linear": "fine-tuned", "post-hoc": "linearised after the fact", "linear": "tangent fine-tuning"}
SCALE = 20.0  # of the cosines: 1 / temperature
TURNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "inverted": torch.neg,
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
    "mirrored": lambda x: x.flip(3),
}


@dataclass(frozen=True)
class Setting:
    """Options of all studies of task arithmetic."""

    tasks: Annotated[tuple[str, ...], "image sets; name:0-30 takes classes, name/inverted turns images"] = (
        "mnist", "fashion-mnist", "cifar10", "quickdraw:0-30")  # fmt: skip
    control: Annotated[str, "image set that is never fine-tuned on"] = "quickdraw:30-90"
    side: Annotated[int, "pixels of a side, grey"] = 28
    few: Annotated[int, "images per class of every task in pre-training"] = 10
    shown: Annotated[int, "images per class of the control set in pre-training"] = 70
    tune: Annotated[int, "images of a task in fine-tuning, at most"] = 3000
    held: Annotated[int, "images on which coefficients are found, at most"] = 300
    test: Annotated[int, "test images of a task, at most"] = 400
    net: Annotated[Literal["lenet", "vit"], "the encoder"] = "lenet"
    depth: Annotated[int, "blocks of a vit"] = 4
    patch: Annotated[int, "pixels of a vit's patch"] = 7
    embed: Annotated[int, "outputs of the encoder"] = 64
    pretrain_steps: Annotated[int, "steps of pre-training"] = 1000
    pretrain_lr: Annotated[float, "highest learning rate of pre-training"] = 2e-3
    steps: Annotated[int, "steps of fine-tuning"] = 200
    lr: Annotated[float, "highest learning rate of fine-tuning"] = 1e-3
    batch: Annotated[int, "images per step"] = 64
    seeds: Annotated[int, "pre-trainings, with all that follows"] = 3
    check: Annotated[bool, "compare with a random start how much of the gain addition keeps"] = False


Width = Annotated[int, "of the encoder"]
Widths = Annotated[tuple[int, ...], "of encoders of several sizes"]
LAPTOP = Setting()
SMOKE: dict[str, Any] = {
    "tasks": "digits,digits/inverted,digits/turned", "control": "digits/mirrored", "side": 8, "few": 12, "shown": 40,
    "tune": 400, "held": 100, "test": 120, "embed": 16, "pretrain_steps": 100, "steps": 30, "pretrain_lr": 1e-2,
    "lr": 5e-3, "batch": 32, "seeds": 2, "check": True,
}  # fmt: skip
PAPER: dict[str, Any] = {
    "tasks": "mnist,fashion-mnist,cifar10,quickdraw:0-30,chest-xray", "control": "quickdraw:30-345", "few": 100,
    "shown": 80, "tune": 40_000, "held": 1000, "test": 2048, "net": "vit", "depth": 9, "patch": 4, "embed": 192,
    "pretrain_steps": 10_000, "pretrain_lr": 5e-4, "steps": 2000, "lr": 1e-5, "batch": 128, "check": True,
}  # fmt: skip


def sizes(smoke: dict[str, Any], paper: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sizes of a study, with what is its own."""
    return {"smoke": SMOKE | smoke, "laptop": {"check": True}, "paper": PAPER | paper}


ONE_WIDTH = sizes({"width": 4}, {"width": 192})
WIDTHS = sizes({"widths": "2,4"}, {"widths": "96,192,384"})


# ------------------------------------------------------------------------------------------------------- image sets


@dataclass(frozen=True)
class TaskImages:
    """The parts of one set: `few` for pre-training, `tune` for fine-tuning, `held` to find coefficients on, `test`."""

    classes: int
    few: Labelled
    tune: Labelled
    held: Labelled
    test: Labelled


def grey(name: str, split: str, side: int, index: Tensor | None = None) -> Labelled:
    """Images of a set (those at `index`) between -1 and 1, [n, 1, side, side], with their classes counted from 0."""
    name, _, turn = name.partition("/")
    if turn and turn not in TURNS:
        raise InputError(f"images cannot be {turn!r}; they can be {', '.join(TURNS)}")
    x, y = stored(name, split)
    if index is not None:
        x, y = x[index], y[index]
    x = x.float().mean(1, keepdim=True) / (16.0 if name.startswith("digits") else 255.0) * 2 - 1
    if x.shape[-1] != side:
        x = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
    return (TURNS[turn](x) if turn else x), y


@functools.lru_cache(maxsize=16)  # several seeds cut the same sets, which are checked against their sums when loaded
def stored(name: str, split: str) -> Labelled:
    """Images as stored (grey levels, [n, channels, side, side]) of the classes `name` asks for, counted from 0."""
    name, _, span = name.partition(":")
    found = data.load(name, split, dtype=torch.uint8)  # type: ignore[arg-type]
    if not span:
        return found.x, found.y
    low, _, high = span.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise InputError(
            f"{name}:{span}: write classes as first-end, the end left out, e.g. {name}:0-30 for the first thirty"
        )
    keep = (found.y >= int(low)) & (found.y < int(high))
    if not bool(keep.any()):
        raise InputError(f"{name} has no classes {span}")
    return found.x[keep], found.y[keep] - int(low)


def task_images(
    name: str, side: int, seed: int, *, few: int, tune: int, held: int, test: int, device: str = "cpu"
) -> TaskImages:
    """Disjoint parts of a set: `few` per class, then at most so many images to tune and hold out, and test images.

    At most one sixth of what `few` leaves is held out, if there is something to tune on.
    """
    y, y_test = (stored(name.partition("/")[0], split)[1] for split in ("train", "test"))
    order = torch.randperm(len(y), generator=generator(seed, "parts", name))
    classes = int(y.max()) + 1
    shown = torch.cat([order[y[order] == c][:few] for c in range(classes)])
    rest = order[~torch.isin(order, shown)]
    cut = min(held, len(rest) // 6 if tune else len(rest))
    chosen = torch.randperm(len(y_test), generator=generator(seed, "test", name))[:test]

    def part(split: str, index: Tensor) -> Labelled:
        x, y = grey(name, split, side, index)
        return x.to(device), y.to(device)

    spans = (("train", shown), ("train", rest[cut : cut + tune]), ("train", rest[:cut]), ("test", chosen))
    return TaskImages(classes, *(part(split, index) for split, index in spans))


# --------------------------------------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class Networks:
    """theta_0 and its task vectors. `rows`: {set: class embeddings [classes, embed] of length 1}."""

    encoder: nn.Module
    rows: Mapping[str, Tensor]
    images: Mapping[str, TaskImages]
    vectors: Mapping[bool, Mapping[str, TaskVector]]  # by whether fine-tuning was tangent

    def head(self, name: str) -> Callable[[Tensor], Tensor]:
        """Logits of a set from the encoder's outputs: cosines with its class embeddings."""
        rows = self.rows[name]
        return lambda out: SCALE * F.normalize(out, dim=1) @ rows.T

    def predictor(self, method: str) -> tuple[nn.Module, Mapping[str, TaskVector]]:
        """Network at theta_0 (plain or linearised) and the task vectors that belong to a method."""
        model = self.encoder if method == "non-linear" else linearize(self.encoder)
        return model, self.vectors[method == "linear"]


class Whole(nn.Module):
    """Encoder and cosine classifier over the classes of all sets, [n, 1, side, side] -> [n, classes]."""

    def __init__(self, encoder: nn.Module, classes: int, embed: int, seed: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.rows = nn.Parameter(torch.randn(classes, embed, generator=generator(seed, "class embeddings")))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1, side, side] -> [n, classes]."""
        return SCALE * F.normalize(self.encoder(x), dim=1) @ F.normalize(self.rows, dim=1).T


def encoder(setting: Setting, width: int, seed: int, device: str = "cpu") -> nn.Module:
    """An untrained encoder in eval mode."""
    kind, shape = "lenet-avg", dict[str, Any](channels=(width, 2 * width), hidden=(8 * width,), padding="same")
    if setting.net == "vit":
        if width % 16:
            raise InputError(f"width={width} of a vit must be a multiple of 16, the width of a head")
        shape = {"patch": setting.patch, "depth": setting.depth, "width": width, "heads": width // 16, "mlp": 4 * width}
        kind = "vit"
    made = nets.build(kind, seed=seed, image_size=setting.side, outputs=setting.embed, **shape)
    return made.to(device).eval()


def networks(
    run: Run,
    setting: Setting,
    width: int,
    seed: int,
    start: Start = "pre-trained",
    tasks: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
) -> Networks:
    """theta_0 of a seed and the task vectors of `tasks` (all, if none is named), from the cache or trained now."""
    cache = store(run, setting, width, seed)
    chosen = derive(run.seed, "networks", seed)
    s, sets = setting, (*setting.tasks, setting.control)

    def cut(name: str) -> TaskImages:
        few, tune = (s.shown, 0) if name == s.control else (s.few, s.tune)
        return task_images(name, s.side, chosen, few=few, tune=tune, held=s.held, test=s.test, device=run.device)

    images = {name: cut(name) for name in sets}
    counts = [images[name].classes for name in sets]

    def pretrain() -> dict[str, Tensor]:
        whole = Whole(encoder(s, width, derive(chosen, "encoder"), run.device), sum(counts), s.embed, chosen)
        x = torch.cat([images[name].few[0] for name in sets])
        y = torch.cat([images[name].few[1] + sum(counts[:i]) for i, name in enumerate(sets)])
        found = fine_tune(
            whole.to(run.device).eval(), (x, y), steps=s.pretrain_steps, lr=s.pretrain_lr, batch_size=s.batch,
            weight_decay=0.05, seed=chosen,
        )  # fmt: skip
        return dict(found.model.state_dict())

    state = _tensors(cache.cached("pre-trained", pretrain), run.device)
    rows = torch.split(F.normalize(state.pop("rows"), dim=1), counts)
    start_at = encoder(s, width, derive(chosen, "never trained"), run.device)
    if start == "pre-trained":
        start_at.load_state_dict({k.removeprefix("encoder."): t for k, t in state.items()})
    made = Networks(start_at, dict(zip(sets, rows)), images, {})

    def tune(name: str, tangent: bool) -> dict[str, Tensor]:
        found = fine_tune(
            start_at, images[name].tune, tangent=tangent, steps=s.steps, lr=s.lr, batch_size=s.batch,
            head=made.head(name), seed=derive(chosen, "order", name),
        )  # fmt: skip
        return dict(found.vector.tensors)

    def vector(name: str, tangent: bool) -> TaskVector:
        key = f"{start}, {'tangent' if tangent else 'plain'}, {name}"
        return TaskVector.from_tensors(_tensors(cache.cached(key, lambda: tune(name, tangent)), run.device))

    kinds = sorted({method == "linear" for method in methods})
    vectors = {tangent: {name: vector(name, tangent) for name in tasks or s.tasks} for tangent in kinds}
    return dataclasses.replace(made, vectors=vectors)


def store(run: Run, setting: Setting, width: int, seed: int) -> Run:
    """The folder of one pre-training and all that follows from it; settings, seeds and code each have their own."""
    parts = {**dataclasses.asdict(setting), "seeds": seed, "check": ""}  # not how many seeds, but which
    device = torch.device(run.device).type
    text = repr((sorted(parts.items()), width, run.seed, device, torch.__version__, _code()))
    path = data.data_root() / "networks" / hashlib.sha256(text.encode()).hexdigest()[:16]
    return Run(path, {}, {})


@functools.cache
def _code() -> str:
    """A sum over the code that trains and measures: what it made before a change is not used after it."""
    library = Path(data.__path__[0]).parent
    above = {library / room for room in ("studies", "reports", "cli")}
    places = [place for place in library.rglob("*.py") if above.isdisjoint(place.parents)]
    places += [Path(__file__), Path(__file__).with_name("measures.py")]
    return hashlib.sha256(b"".join(place.read_bytes() for place in sorted(places))).hexdigest()


def _tensors(found: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)}
