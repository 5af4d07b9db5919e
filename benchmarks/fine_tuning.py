"""Does the tangent kernel of a pretrained encoder predict its fine-tuning? After Malladi et al. (arXiv 2210.05643).

    python benchmarks/fine_tuning.py FOLDER [--steps 60] [--rate 0.2] [--out FILE]

FOLDER holds an encoder and its tokenizer as `save_pretrained` wrote them, such as all-MiniLM-L6-v2. The task is
few-shot sentiment: "The film was ADJECTIVE." with adjectives in training that are not in the test. The classifier is a
prompt's: the score is the inner product of the pooled encoding with the difference of the encodings of two label words,
fixed, so that fine-tuning begins at the zero-shot classifier. The loss is 0.5 ||f - y||^2 with y = +-scale, by
full-batch gradient descent, which the kernel predicts in closed form (`bs.gradient_descent`). Asked are

- how well the predicted outputs on the test follow the real ones, and both accuracies;
- how far the kernel moves (1 - cosine) while the network is fine-tuned;
- the same for LoRA: kernels of the adapters alone, if peft is installed.
"""

import argparse
import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import machine
from torch import Tensor, nn

import biascope as bs

GOOD = [
    "great", "wonderful", "brilliant", "charming", "delightful", "superb", "moving", "clever", "funny",
    "beautiful", "excellent", "gripping", "fresh", "warm", "stunning", "touching", "masterful", "enjoyable",
    "thrilling", "witty",
]  # fmt: skip
BAD = [
    "awful", "terrible", "boring", "dull", "dreadful", "lousy", "tedious", "clumsy", "annoying", "ugly",
    "horrible", "weak", "stale", "cold", "painful", "pointless", "sloppy", "forgettable", "lifeless", "stupid",
]  # fmt: skip
NOUNS, LABEL_WORDS = ("film", "book", "play", "show"), ("good", "bad")


class PromptClassifier(nn.Module):
    """Tokens to the score of the first label word against the second [n, 1]; `direction` [d] is fixed."""

    def __init__(self, encoder: nn.Module, direction: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("direction", direction)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return encoded(self.encoder, input_ids, attention_mask) @ self.direction[:, None]


def encoded(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the last hidden states over the tokens that count [n, d]."""
    hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    weight = attention_mask[..., None].to(hidden)
    return (hidden * weight).sum(1) / weight.sum(1)


def prompt_classifier(encoder: nn.Module, label_words: dict[str, Tensor]) -> PromptClassifier:
    """The zero-shot classifier of two label words, tokenised."""
    with torch.no_grad():
        first, second = encoded(encoder, **label_words)
    return PromptClassifier(encoder, (first - second) / (first - second).norm())


def fine_tune(model: nn.Module, x: dict[str, Tensor], y: Tensor, lr: float, steps: int) -> None:
    """Full-batch gradient descent on 0.5 ||f - y||^2, in place."""
    params = [p for p in model.parameters() if p.requires_grad]
    for _ in range(steps):
        grads = torch.autograd.grad(0.5 * (model(**x)[:, 0] - y).square().sum(), params, allow_unused=True)
        with torch.no_grad():
            for p, g in zip(params, grads):
                if g is not None:
                    p.sub_(lr * g)


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two tensors."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def compare(model: nn.Module, train: Any, test: Any, steps: int, scale: float, rate: float) -> dict[str, float]:
    """Prediction by the kernel against the real thing; the model is not changed."""
    (x, y), (x_test, y_test) = train, test
    y, tuned = scale * y, copy.deepcopy(model)
    K, K_test = bs.ntk(model, x, outputs=0), bs.ntk(model, x_test, x, outputs=0)
    with torch.no_grad():
        f0, f0_test = model(**x)[:, 0], model(**x_test)[:, 0]
    lr = rate / float(K.eigh().values[0])
    curve = bs.gradient_descent(K, y, [steps], lr, K_test, f0, f0_test)
    predicted = curve.test[0].flatten().float()
    fine_tune(tuned, x, y, lr, steps)
    with torch.no_grad():
        real = tuned(**x_test)[:, 0]
    after = bs.ntk(tuned, x, outputs=0)
    return {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rate": lr,
        "accuracy_before": float(((f0_test > 0) == (y_test > 0)).float().mean()),
        "accuracy_predicted": float(((predicted > 0) == (y_test > 0)).float().mean()),
        "accuracy_real": float(((real > 0) == (y_test > 0)).float().mean()),
        "cosine_of_moves": cosine(predicted - f0_test, real - f0_test),
        "error_of_move": float((predicted - real).norm() / (real - f0_test).norm()),
        "kernel_moved": 1 - cosine(K.tensor, after.tensor),
    }


def sentences(tokenize: Callable[[list[str]], dict[str, Tensor]], good: list[str], bad: list[str]) -> Any:
    """Inputs and labels +-1."""
    texts = [f"The {noun} was {word}." for words in (good, bad) for word in words for noun in NOUNS[:2]]
    y = torch.tensor([1.0] * (len(texts) // 2) + [-1.0] * (len(texts) // 2))
    return tokenize(texts), y


def run(
    encoder: nn.Module,
    tokenize: Callable[[list[str]], dict[str, Tensor]],
    steps: int,
    shots: int,
    scale: float,
    rate: float,
) -> dict[str, Any]:
    """All parameters, and LoRA's alone."""
    train = sentences(tokenize, GOOD[:shots], BAD[:shots])
    test = sentences(tokenize, GOOD[-10:], BAD[-10:])
    model = prompt_classifier(encoder.eval(), tokenize(list(LABEL_WORDS)))
    found = {"all parameters": compare(model, train, test, steps, scale, rate)}
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        adapted = get_peft_model(copy.deepcopy(encoder), LoraConfig(r=8, target_modules=["query", "value"]))  # type: ignore[arg-type]
        lora = PromptClassifier(adapted.eval(), model.direction)
        found["LoRA"] = compare(lora, train, test, steps, scale, rate)
        full, small = bs.ntk(model, train[0], outputs=0), bs.ntk(lora, train[0], outputs=0)
        found["LoRA"]["cosine_with_kernel_of_all"] = cosine(full.tensor, small.tensor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shots", type=int, default=10, help="adjectives of each kind; two sentences with each")
    parser.add_argument("--scale", type=float, nargs="+", default=[0.5, 2.0], help="how far fine-tuning has to move")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate times the first eigenvalue")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    encoder = AutoModel.from_pretrained(options.folder, local_files_only=True)

    def tokenize(texts: list[str]) -> dict[str, Tensor]:
        made = tokenizer(texts, padding=True, return_tensors="pt")
        return {k: made[k] for k in ("input_ids", "attention_mask")}

    report = {"machine": machine("cpu", ["transformers", "peft"]), "steps": options.steps, "shots": options.shots}
    report["rate"] = options.rate
    for scale in options.scale:
        report[f"scale {scale}"] = run(encoder, tokenize, options.steps, options.shots, scale, options.rate)
        print(json.dumps(report[f"scale {scale}"], indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
