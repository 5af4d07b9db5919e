"""The card of a language model: text as data, and the panel of positions and heads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.reports import make_card
from biascope.reports.panels import words
from biascope.reports.panels.adapter import shown_output
from biascope.reports.panels.base import first_output, is_shown, make_subject
from biascope.reports.panels.tangent_kernel import kernel_facts
from biascope.reports.panels.texts import text_examples
from biascope.support.errors import InputError, UnsupportedError

WORDS, WIDTH, HEADS = 7, 6, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)  # one head of keys for two of queries

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.q_proj(x).view(n, t, HEADS, 3).transpose(1, 2)
        k, v = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        scores = (q @ k.mT).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        out: Tensor = self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": Attention(), "mlp": nn.Linear(WIDTH, WIDTH)})])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["attn"](x)  # type: ignore[index]
            x = x + layer["mlp"](x).tanh()  # type: ignore[index]
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.fixture
def network() -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Language().double().eval()


def gradients(network: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of every log-probability of a next word: {name: [n, T - 1, *shape]}."""
    named = dict(network.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for text in ids:
        logp = network(text[None])[0].log_softmax(-1)
        for t in range(len(text) - 1):
            for name, g in zip(
                named, torch.autograd.grad(logp[t, text[t + 1]], list(named.values()), retain_graph=True)
            ):
                rows[name].append(g)
    return {k: torch.stack(r).unflatten(0, (len(ids), -1)) for k, r in rows.items()}


def test_facts_are_those_of_gradients_taken_one_by_one(network: Language) -> None:
    ids = torch.tensor([[1, 2, 3, 2], [2, 3, 6, 0], [5, 4, 2, 3]])
    found, g = words.word_facts(network, ids), gradients(network, ids)
    J = torch.cat([t.flatten(2) for t in g.values()], -1)
    np.testing.assert_allclose(found.strength, J.square().sum(-1).mean(0).numpy())
    unit = J / J.norm(dim=-1, keepdim=True)
    np.testing.assert_allclose(found.within, torch.einsum("itp,isp->ts", unit, unit).numpy() / 3, atol=1e-12)
    cosine = torch.einsum("itp,jsp->itjs", unit, unit)
    same, other = [], []
    for i, j in ((a, b) for a in range(3) for b in range(3) if a != b):
        for t in range(3):
            for s in range(3):
                (same if ids[i, t + 1] == ids[j, s + 1] else other).append(float(cosine[i, t, j, s]))
    np.testing.assert_allclose([found.same, found.other], [np.mean(same), np.mean(other)])
    whole = float(J.square().sum())
    assert found.parts["attention"] == pytest.approx(
        sum(float(v.square().sum()) for k, v in g.items() if "attn" in k) / whole
    )
    assert sum(found.parts.values()) == pytest.approx(1)
    assert set(found.parts) == {"attention", "MLP and experts", "embedding", "normalisation", "head"}
    assert found.heads is not None
    q, kv = (
        g["layers.0.attn.q_proj.weight"],
        [g[f"layers.0.attn.{x}_proj.{w}"] for x in "kv" for w in ("weight", "bias")],
    )
    first = q[:, :, :3].square().sum() + g["layers.0.attn.q_proj.bias"][:, :, :3].square().sum()
    first += sum(t.square().sum() for t in kv) / 2 + g["layers.0.attn.o_proj.weight"][..., :3].square().sum()
    assert found.heads[0, 0] == pytest.approx(float(first) / whole)


def test_both_sides_count_where_the_model_is_not_causal(network: Language) -> None:
    ids = torch.tensor([[1, 2, 3, 2], [2, 3, 6, 0]])
    assert words.is_causal(network, ids)
    mixing = nn.Sequential(network, SimpleMix())
    assert not words.is_causal(mixing, ids)
    assert words.WordScores(mixing, False)(ids).shape == (2, 4)
    with pytest.raises(UnsupportedError, match="words at every position"):
        words.every_logit(nn.Sequential(network, nn.Flatten()), ids)


class SimpleMix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_the_panel_is_for_networks_of_tokens() -> None:
    with_tokens = make_subject(Language, (4,))
    assert is_shown(words.panel, with_tokens)
    made = words.panel(with_tokens)
    assert "attention heads hold" in made.meaning
    assert "same word" in made.headline
    assert not is_shown(words.panel, make_subject("logreg", (1, 8, 8)))


def test_text_becomes_windows_and_the_tokens_after_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    known = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(tmp_path)
    file = tmp_path / "text.txt"
    file.write_text("a b c z " * 20)
    examples = text_examples(f"hf:{tmp_path}", file, 3)
    assert examples.x[:3].tolist() == [[1, 2, 3], [0, 1, 2], [3, 0, 1]]
    assert examples.y[:3].tolist() == [0, 3, 2]
    file.write_text("a b c")
    with pytest.raises(InputError, match="3 tokens; 16 windows"):
        text_examples(f"hf:{tmp_path}", file, 3)
    with pytest.raises(InputError, match="needs the tokenizer"):
        text_examples("hf:bert", file, 3)
    with pytest.raises(InputError, match="both given"):
        make_card("hf:bert", data="digits", text=file, out=tmp_path / "c.html")


def test_children_of_any_name(network: Language) -> None:
    """What wraps a network must not hide a part of it that is called as one of its own attributes."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.causal = network, nn.Identity()

        def forward(self, ids: Tensor) -> Tensor:
            return self.causal(self.net(ids))  # type: ignore[no-any-return]

    ids = torch.arange(12).view(2, 6) % WORDS
    wrapped, plain = words.WordScores(Wrapped(), True), words.WordScores(network, True)
    assert wrapped.get_submodule("net.head") is network.head
    assert torch.equal(wrapped(ids), plain(ids))
    one, two = words.word_facts(Wrapped().eval(), ids), words.word_facts(network, ids)
    assert np.allclose(one.strength, two.strength)
    assert one.parts == pytest.approx(two.parts)


def test_the_score_of_padding_is_not_the_function_that_a_card_shows(tmp_path: Path) -> None:
    """A tied head has padding's row of the table, zeros: a score that depends on nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=8, pad_token_id=0, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    subject = make_subject(f"hf:{tmp_path}", (4,))
    x = subject.inputs(3)
    network = subject.network.eval()
    assert shown_output(network) == 1
    assert torch.equal(first_output(subject, network, x), network(x)[:, 1])
    tokens = torch.arange(1, 13).view(3, 4) % 8 + 1
    assert kernel_facts(network, tokens).values.sum() == pytest.approx(
        float(bs.ntk(network, tokens, outputs=1).trace()), rel=1e-5
    )
    classifier = transformers.BertForSequenceClassification(config)
    classifier.save_pretrained(tmp_path)
    assert shown_output(make_subject(f"hf:{tmp_path}", (4,)).network) == 0
