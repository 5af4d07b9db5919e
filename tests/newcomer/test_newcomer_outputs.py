"""Outputs as networks give them: objects, dicts, tuples, many classes, half precision; each with the right number."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import InputError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Wrapped(nn.Module):
    """A linear network and what is made of its output."""

    def __init__(self, end: Callable[[Tensor], Any], classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, classes)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.head(torch.tanh(self.body(x))))


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "object with logits": lambda y: SimpleNamespace(loss=None, logits=y),
    "dict with logits": lambda y: {"loss": y.mean(), "logits": y, "hidden": y},
    "dict of one tensor": lambda y: {"loss": None, "scores": y},
    "tuple": lambda y: (y, (y, y)),
    "tuple with indices first": lambda y: (y.argmax(1), y, y),
}


def both(end: Callable[[Tensor], Any]) -> tuple[nn.Module, nn.Module]:
    net, plain = Wrapped(end), Wrapped(lambda y: y)
    plain.load_state_dict(net.state_dict())
    return net, plain


@pytest.mark.parametrize("kind", ENDS)
def test_the_tensor_that_is_meant(kind: str) -> None:
    net, plain = both(ENDS[kind])
    assert torch.equal(bs.ntk(net, X).tensor, bs.ntk(plain, X).tensor)
    assert torch.equal(bs.fisher(net, X, "kfac").trace(), bs.fisher(plain, X, "kfac").trace())
    found = bs.nads(lambda: Wrapped(ENDS[kind], 1), (4,), n_networks=1)
    assert torch.equal(found.eigenvalues, bs.nads(lambda: Wrapped(lambda y: y, 1), (4,), n_networks=1).eigenvalues)
    words = str(bs.Jacobian(net, X).coverage())
    where = {"object with logits": ".logits", "dict with logits": "['logits']", "dict of one tensor": "['scores']"}
    index = "[1]" if "indices" in kind else "[0]"
    assert words.splitlines()[-1].startswith(f"differentiated: {where.get(kind, index)} of the ")


def test_ten_classes_without_a_word_are_the_first_output() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 10))

    def first(out: Tensor) -> Tensor:
        return out[:, 0]

    for method in ("finite-difference", "autograd", "mixed-derivative", "ntk"):
        one, two = (bs.nads(build, (4,), 8, method, scalarise=scalar) for scalar in (None, first))  # type: ignore[arg-type]
        assert torch.equal(one.eigenvalues, two.eigenvalues), method
    one, two = (bs.average_geometry(build, (4,), 8, scalarise=scalar) for scalar in (None, first))
    assert torch.equal(one.matrix, two.matrix)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: torch.dtype) -> None:
    net, wide = both(lambda y: y)
    net, wide = net.to(kind), wide.to(kind).float()
    for given in (X, X.to(kind).float()):
        assert torch.equal(bs.ntk(net, given).tensor, bs.ntk(wide, given).tensor)
    assert bs.ntk(net, X).tensor.dtype == torch.float32
    assert next(net.parameters()).dtype == kind


def test_language_models_leave_their_cache_out() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 12, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = torch.arange(12).view(2, 6)
    for given in (ids, {"input_ids": ids}):
        K = bs.ntk(model, given, outputs="trace")
        assert K.tensor.shape == (2, 2)
    with torch.no_grad():
        out = model(ids).logits
    lin = bs.linearize(model)
    assert torch.allclose(lin(ids).logits, out, atol=1e-5)
    assert torch.allclose(lin(input_ids=ids).logits, out, atol=1e-5)


def test_half_precision_is_announced_once() -> None:
    net = Wrapped(lambda y: y).bfloat16()
    words = "the weights of Wrapped are bfloat16; they are computed in float32"
    with pytest.warns(UserWarning, match=words):
        bs.ntk(net, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bs.ntk(net, X[:4])
        bs.fisher(net, X, "kfac", likelihood="gaussian")
    with pytest.warns(UserWarning, match=words):
        found = bs.nads(lambda: Wrapped(lambda y: y, 1).bfloat16(), (4,), 8, "autograd")
    rounded = bs.nads(lambda: Wrapped(lambda y: y, 1).bfloat16().float(), (4,), 8, "autograd")
    assert torch.allclose(found.eigenvalues, rounded.eigenvalues, rtol=1e-6)  # derivatives are not rounded to 8 bits


LAZY: dict[str, Callable[[nn.Module], Any]] = {
    "ntk": lambda net: bs.ntk(net, X),
    "fisher": lambda net: bs.fisher(net, X),
    "Jacobian": lambda net: bs.Jacobian(net, X),
    "Probe": lambda net: bs.Probe(net, X, torch.arange(6) % 2),
    "linearize": bs.linearize,
    "TaskVector": lambda net: bs.TaskVector(net, net),
    "EKFAC": bs.optim.EKFAC,
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_layers_are_refused_with_the_line_that_helps(name: str) -> None:
    net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))
    with pytest.raises(InputError, match=r"run a batch through the network first, (with .*: )?net\(x\[:2\]\)"):
        LAZY[name](net)
    with torch.no_grad():
        net(X[:2])
    LAZY[name](net)


def test_lazy_factories_too() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(1))

    def ready() -> nn.Module:
        net = build()
        net(torch.zeros(1, 4))
        return net

    with pytest.raises(InputError, match=r"let the factory call it once, net\(torch\.zeros\(1, \.\.\.\)\)"):
        bs.nads(build, (4,), 8)
    assert bs.nads(ready, (4,), 8).eigenvalues.shape == (4,)
