"""Cases of a first try that no other file has: refusals, defaults and sentences, one test each."""

import html
import importlib.util
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.reports.compare import in_words
from biascope.reports.spans import Overlaps
from biascope.support.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("kind", [bs.optim.EKFAC, bs.optim.KFAC, bs.optim.SuperNat])
def test_fine_tuning_with_batch_norm_in_eval_mode(kind: type) -> None:
    """As docs/howto/task-arithmetic.md advises: its statistics stay, its weights and those of all layers move."""
    net = normed()
    net(X)  # statistics of its own
    net.eval()
    held = {name: value.clone() for name, value in net.state_dict().items()}
    opt, losses = kind(net), list[float]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(X), Y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for name, value in net.state_dict().items():
        kept = "running" in name or "num_batches" in name
        assert torch.equal(value, held[name]) == kept, name


@pytest.mark.parametrize("kind", [bs.optim.EKFAC, bs.optim.KFAC, bs.optim.SuperNat])
def test_plain_cross_entropy_trains_without_a_warning(kind: type) -> None:
    """Fitted examples have no gradient; nothing is ignored by the loss."""
    net = nn.Linear(6, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-200.0], [200.0]]) * torch.eye(6)[0])
    y = Y.clone()
    y[0] = 1 - y[0]
    opt = kind(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            opt.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            opt.step()


@pytest.mark.parametrize("lr", [1e-3, 1.0])
@pytest.mark.parametrize("kind", [bs.optim.EKFAC, bs.optim.KFAC, bs.optim.SuperNat])
def test_learning_rates_that_people_try_train(kind: type, lr: float) -> None:
    net = normed()
    opt, losses = kind(net, lr), list[float]()
    for _ in range(60):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X), Y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_partly_frozen_network_is_what_is_left_of_it() -> None:
    net = normed().eval()
    net[0].requires_grad_(False)
    parts = [name for name, p in net.named_parameters() if p.requires_grad]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(net(x[None])[0, c], [net.get_parameter(n) for n in parts])])
        for x in X[:3]
        for c in range(2)
    ]
    J = torch.stack(rows)
    assert torch.allclose(bs.ntk(net, X[:3]).tensor.reshape(6, 6), J @ J.T, rtol=1e-4)


@pytest.mark.parametrize("name", ["EKFAC", "fisher"])
def test_a_network_of_one_real_output_says_what_to_do(name: str) -> None:
    net = nn.Linear(6, 1)
    if name == "fisher":
        with pytest.raises(InputError, match="likelihood='gaussian'"):
            bs.fisher(net, X)
        assert bs.fisher(net, X, likelihood="gaussian").trace() > 0
    else:
        bs.optim.EKFAC(net)  # reads the loss itself


def test_two_networks_are_compared_without_a_superlative() -> None:
    values, ones = np.array([[0.5, 0.1], [0.1, 0.5]]), np.ones((2, 2))
    shares = np.array([[1.0, 0.2], [0.2, 1.0]])
    said = in_words(["a", "b"], Overlaps(values, 0.01 * ones, shares, 0.06 * ones, 4, 0.1), 64)
    assert said.startswith("b and a: overlap 0.100 ± 0.010, 20% ± 6% of what two samples of one network share.")


def test_what_was_measured_is_no_wall() -> None:
    """The page of ekfac/fig4.3 held 800 characters in one paragraph."""
    from biascope.reports.study_page import measured

    text = json.loads((ROOT / "reproductions" / "ekfac-fig4.3-laptop-cpu" / "result.json").read_text())["measured"]
    assert max(len(part) for part in re.findall(r"<p>(.*?)</p>", measured(text))) < 300
    assert re.sub(r"</?(div|p)[^>]*>", " ", measured(text)).split() == html.escape(text).split()
    assert measured("One. Two.").count("<p>") == 1


SAID = [  # sentences of the first report that nobody understood
    *("along the first one of half of the networks", "what one span would show", "signs are as they were"),
    *("tells pairs from strangers", "Yes, or it says no", "not to be had here", "surely within"),
    *("A claim counts by its runs", "mixed: they differ", "Do not edit.", "What the input sees", "ends at its door"),
    *("are no weights", "the shortest solution", "The most alike are A and B"),
]


@pytest.mark.parametrize("words", SAID)
def test_sentences_that_nobody_understood_are_gone(words: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    plain = re.compile(re.escape(words), re.IGNORECASE)
    assert [str(page.relative_to(ROOT)) for page in pages if plain.search(page.read_text(encoding="utf-8"))] == []


def test_the_papers_are_named_with_their_numbers() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"arxiv\.org/abs/\d{4}\.\d{5}|arXiv:\d{4}\.\d{5}", readme)) >= 4


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_token_models_of_ones_own_have_a_card(tmp_path: Path) -> None:
    import transformers

    from biascope.reports import make_card
    from biascope.reports.panels import anatomy

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

    def build() -> nn.Module:
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=30))  # type: ignore[no-any-return]

    card = make_card(build, (6,), tmp_path / "c.html", networks=4, panels=[anatomy.panel])
    assert [panel.title for panel in card.panels if panel.skipped] == []
    assert "Its inputs are tokens" in card.path.read_text()


class Padded(nn.Module):
    """Zeros are padding, which attention and the mean leave out: nothing is left of a text of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids == 0
        words = self.encoder(self.table(ids), src_key_padding_mask=mask) * ~mask[..., None]
        return self.head(words.sum(1) / (~mask).sum(1, keepdim=True))


def test_a_transformer_with_padding_has_a_card(tmp_path: Path) -> None:
    from biascope.reports import make_card
    from biascope.reports.panels import anatomy

    ids = torch.randint(1, 20, (24, 6), generator=torch.Generator().manual_seed(0))
    ids[::2, 4:] = 0
    card = make_card(Padded, data=(ids, torch.arange(24) % 3), out=tmp_path / "c.html", panels=[anatomy.panel])
    assert [panel.title for panel in card.panels if panel.skipped] == []
    assert "linear1" in card.path.read_text()
    embedded = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    names = [row[0] for row in anatomy.layers(card_network(), embedded)]
    assert names.index("encoder.layers.0.linear1") < names.index("encoder.layers.0.linear2") < names.index("head")


def card_network() -> nn.Module:
    from biascope.reports.panels.adapter import Adapted, Way, meant

    return Adapted(Padded(), Way(meant, table="table")).eval()


def test_the_table_names_tests_that_exist() -> None:
    """README.md of this folder; "cases::name" is a test of this file, "…::" the file named before."""
    named = re.findall(r"`([\w/….]+)::(\w+)", (ROOT / "tests" / "newcomer" / "README.md").read_text(encoding="utf-8"))
    path, missing = "", []
    for place, name in named[1:]:  # the first explains
        short = f"tests/newcomer/test_newcomer_{place}.py"
        path, name = (
            (path if place == "…" else place, name) if "/" in place or place == "…" else (short, f"test_{name}")
        )
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
            missing.append(f"{path}::{name}")
    assert len(named) > 40
    assert missing == []
