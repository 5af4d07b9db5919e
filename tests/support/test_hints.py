"""Errors about inputs end with the call that mends them, and that call does mend them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.arguments import tensor_fix
from biascope.support.errors import InputError
from biascope.support.hints import input_hint, pairs_hint

X = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))


def mended(message: str, **names: object) -> object:
    """The value of the call that a message ends with."""
    return eval(message.rsplit("pass ", 1)[-1].split(", e.g. ")[-1].split(", scaled")[0], {"torch": torch, **names})


def test_channels_in_the_last_axis() -> None:
    x = X.permute(0, 2, 3, 1)
    with pytest.raises(InputError, match=r"channels come before pixels: pass x\.permute\(0, 3, 1, 2\)$") as caught:
        bs.ntk(cnn(), x)
    assert torch.equal(mended(str(caught.value), x=x), X)


def test_no_hint_where_the_layer_did_not_get_the_input_itself() -> None:
    odd = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(6, 3, 3))  # the second has the wrong width, whatever x is
    with pytest.raises(InputError, match=r"instead\)$"):
        bs.ntk(odd, X)
    assert input_hint(nn.Conv2d(3, 1, 1), torch.zeros(2, 3, 4, 3)) == ""  # channels first already
    assert input_hint(nn.Conv1d(3, 1, 1), torch.zeros(2, 5, 4, 3)) == ""  # another number of axes
    assert input_hint(nn.Embedding(3, 1), Y) == ""


def test_whole_numbers_and_tokens() -> None:
    with pytest.raises(InputError, match=r"its numbers are torch\.uint8: pass x\.float\(\), scaled as in training$"):
        bs.fisher(cnn(), X.to(torch.uint8))
    with pytest.raises(InputError, match=r"pass x\.long\(\), or, .* embedded tokens$"):
        bs.nads(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 1)), (3,), n_networks=2)


@pytest.mark.parametrize("call", [bs.ntk, bs.fisher, bs.label_alignment, bs.Jacobian])
def test_batches_of_dicts(call: object) -> None:
    named = [{"picture": X, "label": Y}]
    for batch in (named, [{**named[0], "path": ["a"] * 6}]):
        with pytest.raises(
            InputError, match=r"pass pairs, e\.g\. \[\(batch\['picture'\], batch\['label'\]\)"
        ) as caught:
            call(cnn(), batch)  # type: ignore[operator]
        [(x, y)] = mended(str(caught.value), loader=batch)  # type: ignore[misc, attr-defined]
        assert torch.equal(x, X)
        assert torch.equal(y, Y)
    assert "'path' is a list: leave it out" in str(caught.value)


def test_pairs_by_the_names_of_the_entries() -> None:
    one, two = torch.zeros(2), torch.zeros(2, 3)
    assert "batch['pixels'], batch['target']" in pairs_hint({"id": one, "target": one, "pixels": two})
    assert "batch['x'], batch['key']" in pairs_hint({"x": two, "key": one})


def test_loaders_and_lists_where_tensors_are_meant() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 3)
    assert torch.equal(mended(tensor_fix([X[:2], X[2:]], "x"), x=[X[:2], X[2:]]), X)
    for slip, words_ in (
        (lambda: bs.geometry_evolution(cnn, loader, Y.float()), r"got DataLoader; pass .* next\(iter\(loader\)\)$"),
        (lambda: bs.ntk(cnn(), np.array(["a"])), r"x holds <U1 values, not numbers"),
    ):
        with pytest.raises(InputError, match=words_):
            slip()


def test_whole_numbers_as_images() -> None:
    """Other calls fail in the first layer; this one brings its inputs into the precision of the networks."""
    bytes_ = (50 * X).to(torch.uint8)
    with pytest.raises(InputError, match=r"x_train is torch\.uint8: .* x_train\.float\(\)"):
        bs.geometry_evolution(cnn, bytes_, Y.float(), n_networks=2)


def test_functions_that_return_no_network(tmp_path: Path) -> None:
    words = r"returned the class Identity; it must return a network, e\.g\. Identity\(\.\.\.\)$"
    with pytest.raises(InputError, match=words):
        bs.nads(lambda: nn.Identity, (3,))
    script = tmp_path / "mine.py"
    script.write_text("from torch import nn\n\n\ndef build():\n    return nn.Identity\n")
    with pytest.raises(InputError, match=words):
        bs.nets.build(f"{script}:build")


def test_one_hot_labels_and_tokens_of_a_language_model() -> None:
    hot = nn.functional.one_hot(Y, 3)
    with pytest.raises(InputError, match=r"rows of probabilities are no class indices: y\.argmax\(1\)$"):
        bs.hessian(cnn(), (X, 0.9 * hot))
    with pytest.raises(InputError, match=r"pass y\.long\(\), or say likelihood='gaussian'"):
        bs.hessian(cnn(), (X, Y + 0.5))
    ids = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    language = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))  # [n, 4 tokens, 5 words]
    assert bs.hessian(language, (ids, ids), class_dim=-1).shape == (45, 45)


def test_a_dict_that_a_network_returns() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = cnn()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.net(x), "scaled": 2 * self.net(x)}

    with pytest.raises(InputError, match=r"with output=lambda out: out\['scores'\]$"):
        bs.ntk(Named(), X)
    assert bs.ntk(Named(), X, output=lambda out: out["scores"]).tensor.shape == (6, 3, 6, 3)
