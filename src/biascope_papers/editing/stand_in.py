"""A stand-in for CLIP: two towers, aligned here on classes kept apart from the tasks, then fine-tuned on each task.

Image tower: MobileNetV2 from ImageNet and a projection. Text tower: MiniLM, frozen; a prompt per class. theta_0 is the
image tower after contrastive training (softmax over the texts of all its classes, with a learned temperature) on the
control set and those `beside` it; it sees no image and no class of a task. Heads are texts, as CLIP's are. Only the
image tower is fine-tuned or linearised. "Random": the same heads behind a tower that was never trained.

All studies work on the same networks, kept in the cache folder of the data (`networks/`) by setting, seed and code: 11
MB for every task and kind of fine-tuning. A run folder has its own copy of what was measured.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import TaskVector, data, linearize
from biascope.editing import fine_tune
from biascope.studies import Run
from biascope.support import derive
from biascope_papers.editing.ingredients import Counts, TaskImages, Towers, encoder, task_images

Start = Literal["pre-trained", "random"]
METHODS = ("non-linear", "post-hoc", "linear")
LABELS = {"non-linear": "fine-tuned", "post-hoc": "linearised after the fact", "linear": "tangent fine-tuning"}
LAYOUT = torch.contiguous_format  # of the convolutions' weights
DRAWN = ("quickdraw:0-30", "quickdraw:30-60")
EIGHT = ("mnist", "fashion-mnist", "cifar10:0-5", *DRAWN, "chest-xray", "elpv", "digits")


@dataclass(frozen=True)
class Setting:
    """Options of all studies of task arithmetic."""

    tasks: Annotated[tuple[str, ...], "image sets; name:0-30 takes classes, name/inverted turns images"] = EIGHT
    control: Annotated[str, "image set that is never fine-tuned on, the main one of pre-training"] = "quickdraw:60-345"
    beside: Annotated[tuple[str, ...], "other sets of pre-training"] = ("cifar10:5-10",)
    towers: Annotated[Towers, "imagenet: MobileNetV2 and MiniLM; drawn: both at random, nothing is fetched"] = (
        "imagenet"
    )
    side: Annotated[int, "pixels of a side, in colour; images come with at most 64 and are enlarged"] = 96
    shown: Annotated[int, "images of a class in pre-training, at most"] = 70
    often: Annotated[int, "times that sets beside the control count in pre-training"] = 8
    tune: Annotated[int, "images of a task in fine-tuning, at most"] = 2000
    held: Annotated[int, "images on which coefficients are found, at most"] = 300
    test: Annotated[int, "test images of a task, at most"] = 800
    pretrain_steps: Annotated[int, "steps of pre-training; 3,000 learn the images by heart (loss 0.005)"] = 500
    pretrain_lr: Annotated[float, "highest learning rate of pre-training"] = 3e-4
    pretrain_batch: Annotated[int, "images per step of pre-training"] = 256
    steps: Annotated[int, "steps of fine-tuning"] = 2000
    lr: Annotated[float, "highest learning rate of fine-tuning"] = 1e-5
    batch: Annotated[int, "images per step"] = 128
    seeds: Annotated[int, "pre-trainings, with all that follows"] = 1
    check: Annotated[bool, "compare with a random start how much of the gain addition keeps"] = True


Stages = Annotated[int, "of the MobileNetV2: 7 is all of it, 2.7 M weights; 6: 1.4 M, 5: 0.6 M"]
Several = Annotated[tuple[int, ...], "numbers of stages: encoders of several sizes"]
PAPER = Setting()
SMOKE: dict[str, Any] = {
    "tasks": "digits,digits/inverted,digits/turned", "control": "digits/mirrored", "beside": "", "towers": "drawn",
    "side": 32, "shown": 60, "tune": 300, "held": 60, "test": 80, "pretrain_steps": 60, "pretrain_lr": 2e-3,
    "pretrain_batch": 32, "steps": 20, "lr": 1e-3, "batch": 32, "seeds": 2,
}  # fmt: skip
LAPTOP: dict[str, Any] = {
    "side": 64, "test": 200, "held": 120, "tune": 600, "pretrain_steps": 400, "pretrain_lr": 5e-4, "pretrain_batch": 64,
    "steps": 100, "lr": 2e-4, "batch": 32,
}  # fmt: skip


def sizes(smoke: dict[str, Any], laptop: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sizes of a study, with what is its own."""
    return {"smoke": SMOKE | smoke, "laptop": LAPTOP | laptop, "paper": {}}


ONE_SIZE = sizes({"stages": 2}, {})
SIZES = sizes({"several": "1,2"}, {"several": "5,7"})


@dataclass(frozen=True)
class Networks:
    """theta_0, its task vectors and 1 / temperature."""

    encoder: nn.Module
    scale: float
    images: Mapping[str, TaskImages]
    vectors: Mapping[bool, Mapping[str, TaskVector]]  # by whether fine-tuning was tangent

    def head(self, name: str) -> Callable[[Tensor], Tensor]:
        """Logits of a set from the encoder's outputs: cosines with the texts of its classes."""
        texts = self.images[name].texts
        return lambda out: self.scale * F.normalize(out, dim=1) @ texts.T

    def predictor(self, method: str) -> tuple[nn.Module, Mapping[str, TaskVector]]:
        """Network at theta_0 (plain or linearised) and the task vectors that belong to a method."""
        model = self.encoder if method == "non-linear" else linearize(self.encoder)
        return model, self.vectors[method == "linear"]


class Aligned(nn.Module):
    """The image tower before all texts of pre-training, with CLIP's learned temperature: [n, 3, s, s] -> [n, texts]."""

    texts: Tensor

    def __init__(self, tower: nn.Module, texts: Tensor) -> None:
        super().__init__()
        self.encoder, self.scale = tower, nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.register_buffer("texts", texts)

    def forward(self, x: Tensor) -> Tensor:
        """Cross-entropy of these is the contrastive loss over texts (`contrastive_loss` with a target)."""
        return self.scale.clamp(max=math.log(100)).exp() * F.normalize(self.encoder(x), dim=1) @ self.texts.T


def networks(
    run: Run,
    setting: Setting,
    stages: int,
    seed: int,
    start: Start = "pre-trained",
    tasks: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
) -> Networks:
    """theta_0 of a seed and the task vectors of `tasks` (all, if none is named), from the cache or trained now."""
    cache, chosen, s = store(run, setting, stages, seed), derive(run.seed, "networks", seed), setting
    shown, tuned = Counts(s.shown, 2 * s.held, s.test, per_class=True), Counts(s.tune, s.held, s.test)
    first = {name: task_images(name, shown, s.side, s.towers, run.device) for name in (s.control, *s.beside)}
    some = torch.cat([each.held[0][:128] for each in first.values()])  # for the statistics of drawn weights

    def pretrain() -> dict[str, Tensor]:
        whole = Aligned(
            encoder(stages, s.side, s.towers, derive(chosen, "encoder"), some),
            torch.cat([each.texts for each in first.values()]),
        )
        parts, classes = [], 0
        for name, each in first.items():
            parts += [(each.learn[0], each.learn[1] + classes)] * (1 if name == s.control else s.often)
            classes += len(each.texts)
        x, y = (torch.cat(list(column)) for column in zip(*parts))
        found = fine_tune(
            _placed(whole, run.device), (x, y), steps=s.pretrain_steps, lr=s.pretrain_lr, batch_size=s.pretrain_batch,
            seed=chosen,
        )  # fmt: skip
        run.log(pre_training=seed, stages=stages, first=found.losses[0], last=found.losses[-50:].mean())
        return {k: t.contiguous() for k, t in found.model.state_dict().items() if k != "texts"}

    state = _tensors(cache.cached("pre-trained", pretrain), run.device)
    scale = min(100.0, float(state.pop("scale").exp()))
    never = start == "random"
    towers: Towers = "drawn" if never else s.towers
    tower = encoder(stages, s.side, towers, derive(chosen, "never trained" if never else "encoder"), some)
    if not never:
        tower.load_state_dict({k.removeprefix("encoder."): t for k, t in state.items()})
    images = {name: task_images(name, tuned, s.side, s.towers, run.device) for name in s.tasks} | first
    made = Networks(_placed(tower, run.device), scale, images, {})

    def tune(name: str, tangent: bool) -> dict[str, Tensor]:
        found = fine_tune(
            made.encoder, images[name].learn, tangent=tangent, steps=s.steps, lr=s.lr, batch_size=s.batch,
            head=made.head(name), seed=derive(chosen, "order", name),
        )  # fmt: skip
        run.log(start=start, tangent=tangent, task=name, first=found.losses[0], last=found.losses[-50:].mean())
        return {k: t.contiguous() for k, t in found.vector.tensors.items()}

    def vector(name: str, tangent: bool) -> TaskVector:
        key = f"{start}, {'tangent' if tangent else 'plain'}, {name}"
        return TaskVector.from_tensors(_tensors(cache.cached(key, lambda: tune(name, tangent)), run.device))

    kinds = sorted({method == "linear" for method in methods})
    vectors = {tangent: {name: vector(name, tangent) for name in tasks or s.tasks} for tangent in kinds}
    return dataclasses.replace(made, vectors=vectors)


def store(run: Run, setting: Setting, stages: int, seed: int) -> Run:
    """The folder of one pre-training and all that follows from it; settings, seeds and code each have their own."""
    parts = {**dataclasses.asdict(setting), "seeds": seed, "check": ""}  # not how many seeds, but which
    device = torch.device(run.device).type
    text = repr((sorted(parts.items()), stages, run.seed, device, torch.__version__, _code()))
    path = data.data_root() / "networks" / hashlib.sha256(text.encode()).hexdigest()[:16]
    return Run(path, {}, {})


@functools.cache
def _code() -> str:
    """A sum over the code that trains and measures: what it made before a change is not used after it."""
    library = Path(data.__path__[0]).parent
    above = {library / room for room in ("studies", "reports", "cli")}
    places = [place for place in library.rglob("*.py") if above.isdisjoint(place.parents)]
    places += [Path(__file__), *map(Path(__file__).with_name, ("measures.py", "ingredients.py"))]
    return hashlib.sha256(b"".join(place.read_bytes() for place in sorted(places))).hexdigest()


def _placed(net: nn.Module, device: str) -> nn.Module:
    return net.to(device).to(memory_format=LAYOUT).eval()  # type: ignore[call-overload,no-any-return]


def _tensors(found: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)}
