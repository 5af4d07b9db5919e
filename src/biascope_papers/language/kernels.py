"""Does the tangent kernel of a pretrained encoder predict its fine-tuning? After Malladi et al.

The task is few-shot sentiment, "The film was ADJECTIVE.", tested on other adjectives. With a prompt, the score is the
inner product of the pooled encoding with the fixed difference of the encodings of two label words; the random head is
a direction of the same length. The loss is 0.5 ||f - y||^2 with y = +-scale, by full-batch gradient descent, which the
kernel predicts in closed form. LoRA trains B and A of W + B A, with B = 0 and A random at the start.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope import data, gradient_descent, ntk
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import generator

GOOD = [
    "great", "wonderful", "brilliant", "charming", "delightful", "superb", "moving", "clever", "funny", "beautiful",
    "excellent", "gripping", "fresh", "warm", "stunning", "touching", "masterful", "enjoyable", "thrilling", "witty",
    "amazing", "lovely", "perfect", "elegant", "inspiring", "impressive",
]  # fmt: skip
BAD = [
    "awful", "terrible", "boring", "dull", "dreadful", "lousy", "tedious", "clumsy", "annoying", "ugly", "horrible",
    "weak", "stale", "cold", "painful", "pointless", "sloppy", "forgettable", "lifeless", "stupid", "unpleasant",
    "nasty", "disappointing", "ridiculous", "miserable", "poor",
]  # fmt: skip
NOUNS, LABEL_WORDS = ("film", "book", "play", "show"), ("good", "bad")
Batch = dict[str, Tensor]
Tokenise = Callable[[list[str]], Batch]


@dataclass(frozen=True)
class Setting:
    """Options of the study."""

    encoder: Annotated[Literal["minilm", "random"], "pretrained, or a small one that is not"] = "minilm"
    shots: Annotated[int, "adjectives of each kind, two sentences with each"] = 10
    tested: Annotated[int, "adjectives of each kind to test on"] = 10
    steps: Annotated[int, "of gradient descent"] = 60
    rate: Annotated[float, "learning rate times the kernel's first eigenvalue"] = 0.2
    scale: Annotated[float, "the targets, + and -"] = 0.5
    ranks: Annotated[tuple[int, ...], "of LoRA; the first one is fine-tuned"] = (8, 32, 128)
    seeds: Annotated[int, "splits of the adjectives, with random heads and adapters"] = 5


class PromptClassifier(nn.Module):
    """Tokens to the score of the first label word against the second [n, 1]; `direction` [d] is fixed."""

    def __init__(self, encoder: nn.Module, direction: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("direction", direction)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: D102
        return encoded(self.encoder, input_ids, attention_mask) @ self.direction[:, None]  # type: ignore[index]


class Adapted(nn.Module):
    """A linear layer that stays, and B A beside it."""

    def __init__(self, layer: nn.Linear, rank: int, gen: torch.Generator) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        A = torch.randn(rank, layer.in_features, generator=gen, device="cpu") / rank**0.5
        self.A = nn.Parameter(A.to(layer.weight))
        self.B = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.layer(x) + x @ self.A.T @ self.B.T  # type: ignore[no-any-return]


class Small(nn.Module):
    """An encoder of one layer, not trained, as a pretrained one is called."""

    def __init__(self, words: int, width: int = 16) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(words, width), nn.Linear(width, width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # noqa: D102
        x = self.table(input_ids)
        scores = self.query(x) @ x.mT / x.shape[-1] - 1e4 * (attention_mask[:, None] == 0)
        return SimpleNamespace(last_hidden_state=x + torch.tanh(self.mix(scores.softmax(-1) @ self.value(x))))


def encoded(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the last hidden states over the tokens that count [n, d]."""
    hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    weight = attention_mask[..., None].to(hidden)
    return (hidden * weight).sum(1) / weight.sum(1)  # type: ignore[no-any-return]


def loaded(name: str, seed: int, device: str) -> tuple[nn.Module, Tokenise]:
    """An encoder in eval mode and its tokeniser."""
    if name == "random":
        words = {w: i for i, w in enumerate([".", "the", "was", *NOUNS, *LABEL_WORDS, *GOOD, *BAD], 1)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            small = Small(len(words) + 1)

        def split(texts: list[str]) -> Batch:
            rows = [torch.tensor([words[w] for w in t.lower().replace(".", " .").split()]) for t in texts]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": ids.to(device), "attention_mask": (ids > 0).long().to(device)}

        return small.eval().to(device), split
    data.load_weights("minilm")  # is it there, and as it should be?
    transformers, folder = import_module("transformers"), data.data_root() / "minilm"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True)

    def cut(texts: list[str]) -> Batch:
        made = tokenizer(texts, padding=True, return_tensors="pt")
        return {k: made[k].to(device) for k in ("input_ids", "attention_mask")}

    return encoder.eval().to(device), cut


def with_adapters(model: nn.Module, rank: int, gen: torch.Generator) -> tuple[nn.Module, list[str]]:
    """A copy whose query and value layers have adapters, which are all that is trained, and the adapted weights."""
    model = copy.deepcopy(model).requires_grad_(False)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.endswith(("query", "value"))]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(name), rank, gen))  # type: ignore[arg-type]
    return model, [f"{name}.weight" for name in names]


def fine_tune(model: nn.Module, x: Batch, y: Tensor, lr: float, steps: int) -> None:
    """Full-batch gradient descent on 0.5 ||f - y||^2, in place."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(**x)[:, 0] - y).square().sum()).backward()
        optimizer.step()


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two tensors."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def compare(model: nn.Module, train: Any, test: Any, s: Setting) -> dict[str, float]:
    """Prediction by the kernel against the real thing; the model is not changed."""
    (x, y), (x_test, y_test), tuned = train, test, copy.deepcopy(model)
    K, K_test = ntk(model, x, outputs=0), ntk(model, x_test, x, outputs=0)
    with torch.no_grad():
        f0, f0_test = model(**x)[:, 0], model(**x_test)[:, 0]
    lr = s.rate / float(K.eigh().values[0])
    curve = gradient_descent(K, s.scale * y, [s.steps], lr, K_test, f0, f0_test)
    assert curve.test is not None
    predicted = curve.test[0].flatten().float()
    fine_tune(tuned, x, s.scale * y, lr, s.steps)
    with torch.no_grad():
        real = tuned(**x_test)[:, 0]
    before, guess, after = (float(((f > 0) == (y_test > 0)).float().mean()) for f in (f0_test, predicted, real))
    return {
        "accuracy, before": before,
        "accuracy, predicted": guess,
        "accuracy, real": after,
        "accuracy gained": after - before,
        "accuracy, predicted minus real": guess - after,
        "error of the predicted move": float((predicted - real).norm() / (real - f0_test).norm()),
        "1 - cosine of the kernels before and after": 1 - cosine(K.tensor, ntk(tuned, x, outputs=0).tensor),
    }


def sentences(tokenise: Tokenise, good: list[str], bad: list[str]) -> tuple[Batch, Tensor]:
    """Inputs and labels +-1."""
    texts = [f"The {noun} was {word}." for words in (good, bad) for word in words for noun in NOUNS[:2]]
    x = tokenise(texts)
    return x, torch.tensor([1.0, -1.0]).repeat_interleave(len(texts) // 2).to(x["input_ids"].device)


def one_split(seed: int, s: Setting, run_seed: int, device: str) -> dict[str, float]:
    """All numbers of one split of the adjectives."""
    gen = generator(run_seed, "split", seed)
    encoder, tokenise = loaded(s.encoder, run_seed, device)
    good, bad = ([words[int(i)] for i in torch.randperm(len(words), generator=gen)] for words in (GOOD, BAD))
    end = s.shots + s.tested
    train = sentences(tokenise, good[: s.shots], bad[: s.shots])
    test = sentences(tokenise, good[s.shots : end], bad[s.shots : end])
    with torch.no_grad():
        first, second = encoded(encoder, **tokenise(list(LABEL_WORDS)))
    heads = {"prompt": first - second, "random head": torch.randn(first.shape, generator=gen).to(first)}
    models = {name: PromptClassifier(encoder, d / d.norm()) for name, d in heads.items()}
    found = {
        f"{key}, all parameters, {head}": value
        for head, model in models.items()
        for key, value in compare(model, train, test, s).items()
    }
    first, other = (found[f"accuracy, predicted, all parameters, {head}"] for head in models)
    found["accuracy, predicted, all parameters, prompt minus random head"] = first - other
    for j, rank in enumerate(s.ranks):
        lora, weights = with_adapters(models["prompt"], rank, gen)
        K, own = ntk(lora, train[0], outputs=0), ntk(models["prompt"], train[0], outputs=0, params=weights)
        found[f"cosine of the kernels of LoRA and of the adapted matrices, rank {rank}"] = cosine(K.tensor, own.tensor)
        if not j:
            found |= {f"{k}, LoRA of rank {rank}, prompt": v for k, v in compare(lora, train, test, s).items()}
    return found


SMOKE = {"encoder": "random", "shots": 4, "tested": 4, "steps": 10, "ranks": "4,16", "seeds": 2}


@study("language/kernels", sizes={"smoke": SMOKE, "laptop": {}, "paper": {"shots": 16}})
def kernels(run: Run, *, setting: Setting = Setting()) -> StudyResult:
    """Fine-tuning of an encoder against the prediction of its tangent kernel, all parameters and LoRA."""
    rows: list[dict[str, Any]] = run.cached_each(
        "split", range(setting.seeds), partial(one_split, s=setting, run_seed=run.seed, device=run.device)
    )
    numbers = {key: Estimate.of([row[key] for row in rows]) for key in rows[0]}
    cosines = [numbers[f"cosine of the kernels of LoRA and of the adapted matrices, rank {r}"] for r in setting.ranks]
    first, last = (
        f"cosine of the kernels of LoRA and of the adapted matrices, rank {setting.ranks[i]}" for i in (0, -1)
    )
    numbers["cosine of the kernels, largest minus smallest rank"] = Estimate.of([r[last] - r[first] for r in rows])
    accuracy = [numbers[f"accuracy, {k}, all parameters, prompt"] for k in ("before", "predicted", "real")]
    return StudyResult(
        measured=f"With a prompt, accuracy {accuracy[0]} before, {accuracy[1]} as the kernel predicts, {accuracy[2]} "
        f"really. Cosine of LoRA's kernel with that of the adapted "
        f"matrices: {cosines[0]} at rank {setting.ranks[0]}.",
        numbers=numbers,
        figures=(
            Chart("ranks", "LoRA's kernel and that of the matrices it adapts", "rank", "cosine of the kernels",
                  (Series.of("cosine", range(1, len(cosines) + 1), [c.value for c in cosines],
                             [c.standard_error or 0.0 for c in cosines], "points"),),
                  alt="The cosine rises towards 1 with the rank.", x_names=tuple(map(str, setting.ranks)),
                  caption="Mean over splits, with standard errors."),
        ),
    )  # fmt: skip
