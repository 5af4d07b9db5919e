"""Labels of tokens by Hugging Face's conventions: every quantity is that of the model's own loss, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.curvature.uses import loss_gradients
from biascope.support.errors import InputError, UnsupportedError
from curvature.curvature_zoo import relative

transformers = pytest.importorskip("transformers")

WORDS, T = 11, 5
SMALL = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}


def seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


def gpt2() -> Any:
    sizes = {"n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "attn_implementation": "eager"}
    return seeded(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes)))


def llama() -> Any:
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=8, num_key_value_heads=1, **SMALL)
    return seeded(lambda: transformers.LlamaForCausalLM(config))


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **SMALL)
    return seeded(lambda: transformers.BertForMaskedLM(config))


def tagger() -> Any:
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=8, num_labels=3, **SMALL)
    return seeded(lambda: transformers.BertForTokenClassification(config))


MODELS = {"gpt2": (gpt2, 1), "llama": (llama, 1), "bert": (bert, 0), "tagger": (tagger, 0)}


def batch(classes: int = WORDS, n: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (n, T), generator=g)
    y = torch.randint(0, classes, (n, T), generator=g)
    y[0, 1], y[1, 3:] = -100, -100
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": y}


def example(data: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {k: v[i : i + 1] for k, v in data.items()}


def own_gradient(model: Any, data: dict[str, Tensor], i: int, shift: int) -> Tensor:
    """Gradient of the model's own loss of one example, times the labels it is the mean over.

    Hugging Face computes some losses in float32: their value is compared, and the same in float64 differentiated.
    """
    one = example(data, i)
    out, y = model(**one), shifted(one["labels"], shift)[0]
    loss = nn.functional.cross_entropy(out.logits[0], y, reduction="sum")
    assert relative(loss / (y != -100).sum(), out.loss) < 1e-6
    grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def jacobian(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[T, classes, p] of one example."""
    z = model(**inputs).logits[0]
    rows = [torch.autograd.grad(v, list(model.parameters()), retain_graph=True, allow_unused=True) for v in z.flatten()]
    flat = [
        torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(r, model.parameters())])
        for r in rows
    ]
    return torch.stack(flat).view(*z.shape, -1)


def exact(model: Any, data: dict[str, Tensor], counted: Tensor) -> Tensor:
    """Mean over the examples of the sum over counted positions of J^T (diag p - p p^T) J."""
    F: Any = 0
    inputs = {k: v for k, v in data.items() if k != "labels"}
    for i, which in enumerate(counted):
        J, z = jacobian(model, example(inputs, i)), model(**example(inputs, i)).logits[0].detach()
        for t in which.nonzero().flatten().tolist():
            p = torch.softmax(z[t], 0)
            F = F + J[t].T @ (torch.diag(p) - torch.outer(p, p)) @ J[t]
    return F / len(counted)


def shifted(y: Tensor, shift: int) -> Tensor:
    return torch.cat([y[:, shift:], y.new_full((len(y), shift), -100)], 1)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_metrics_are_those_of_the_models_own_loss(name: str) -> None:
    make, shift = MODELS[name]
    model = make()
    data = batch(3 if name == "tagger" else WORDS)
    truth = torch.stack([own_gradient(model, data, i, shift) for i in range(3)])
    assert relative(loss_gradients(model, data), truth) < 1e-9
    assert relative(loss_gradients(model, [example(data, i) for i in range(3)]), truth) < 1e-9
    tol = 1e-6 if name == "llama" else 1e-9  # transformers computes its normalisation in float32, whatever the weights
    F = bs.fisher(model, data, "implicit", estimator="empirical")
    v = torch.randn(truth.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert relative(F @ v, truth.T @ (truth @ v) / 3) < tol
    counted = shifted(data["labels"], shift) != -100
    G = bs.fisher(model, data, "implicit")
    assert relative(G @ v, exact(model, data, counted) @ v) < tol


def test_without_labels_padding_does_not_count() -> None:
    model, data = gpt2(), batch()
    del data["labels"]
    truth = exact(model, data, data["attention_mask"] == 1)
    assert relative(bs.fisher(model, data, "diagonal").diagonal(), truth.diagonal()) < 1e-9
    everything = bs.fisher(model, data["input_ids"], "diagonal").diagonal()  # no mask: all positions count
    assert relative(everything, truth.diagonal()) > 1e-2


def test_labels_that_stand_at_their_positions() -> None:
    model, data = gpt2(), batch()
    y = data.pop("labels")
    rows = loss_gradients(model, (data, shifted(y, 1)))
    assert relative(rows, loss_gradients(model, {**data, "labels": y})) < 1e-12
    floating = loss_gradients(model, {**data, "labels": y.double()})  # they were taken to stand at their positions
    assert relative(rows, floating) < 1e-12
    ids = data["input_ids"]
    with pytest.raises(InputError, match="the labels are the input tokens"):
        bs.fisher(model, (ids, ids), "diagonal", estimator="empirical")


def test_an_output_that_is_picked_by_hand() -> None:
    model, data = gpt2(), batch()
    rows = loss_gradients(model, data, output=lambda out: out.logits)
    assert relative(rows, loss_gradients(model, data)) < 1e-12
    with pytest.raises(InputError, match="labels of 5 tokens do not fit outputs of 4 positions"):
        loss_gradients(model, data, output=lambda out: out.logits[:, :-1], class_dim=-1)


def test_gauss_newton_of_the_models_mean_loss() -> None:
    model, data = gpt2(), batch()
    data["labels"] = data["input_ids"].clone()  # four labels count in every example
    ones = torch.ones_like(data["input_ids"], dtype=torch.bool)
    ones[:, -1] = False
    G = bs.ggn(model, data, "diagonal").diagonal()
    assert relative(G, exact(model, data, ones).diagonal() / (T - 1)) < 1e-9
    H = bs.hessian(model, data)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    params = list(model.parameters())
    loss = nn.functional.cross_entropy(model(**data).logits[:, :-1].mT, data["labels"][:, 1:])
    grads = torch.autograd.grad(loss, params, create_graph=True)
    inner = torch.cat([g.flatten() for g in grads]) @ v
    truth = torch.cat([h.flatten() for h in torch.autograd.grad(inner, params)])
    assert relative(H @ v, truth) < 1e-8
    data["labels"][0, 2] = -100
    with pytest.raises(UnsupportedError, match="weigh unequally"):
        bs.ggn(model, data, "diagonal")


def test_what_does_not_fit_is_refused() -> None:
    model, data = gpt2(), batch()
    none = {**data, "labels": torch.full_like(data["labels"], -100)}
    with pytest.raises(InputError, match="no position of the data has a label"):
        bs.fisher(model, none, "diagonal")
    longer = {**data, "labels": torch.cat([data["labels"], data["labels"]], 1)}
    with pytest.raises(InputError, match="labels of 10 tokens do not fit outputs of 5 positions"):
        bs.fisher(model, longer, "diagonal")
    wrong = {**data, "labels": data["labels"].clone().fill_(WORDS)}
    with pytest.raises(InputError, match="label 11 is not a class: the model has 11"):
        bs.fisher(model, wrong, "diagonal", estimator="empirical")
    unknown = {**data, "input_ids": data["input_ids"] + WORDS}
    with pytest.raises(InputError, match="cannot take inputs"):
        bs.fisher(model, unknown, "diagonal")
    bs.fisher(model, data, "diagonal")  # it is known now, and later examples are wrong
    unknown["input_ids"] = torch.cat([data["input_ids"][:2], unknown["input_ids"][2:]])
    with pytest.raises(InputError, match="cannot take inputs"):
        bs.fisher(model, unknown, "diagonal")
    for wrong, message in ((none, "no position"), (longer, "labels of 10 tokens"), (unknown, "cannot take inputs")):
        with pytest.raises(InputError, match=message):
            bs.influence(model, wrong, data, None, damping=0.0)


def test_a_loss_of_its_own_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt2()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            out = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            if labels is not None:
                out.loss = 1.5 * out.loss
            return out

    with pytest.raises(InputError, match="is neither the cross entropy"):
        bs.fisher(Odd(), batch(), "diagonal")


def test_half_precision_weights() -> None:
    model = gpt2().to(torch.bfloat16)
    rows = loss_gradients(model, batch())
    assert relative(rows.double(), loss_gradients(model.double(), batch())) < 1e-4
