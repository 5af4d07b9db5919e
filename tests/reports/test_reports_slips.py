"""Slips at the doors of cards and comparisons: each is answered by name, before any work, and loses nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from biascope.reports import make_card, make_compare
from biascope.reports.panels.base import make_subject
from biascope.reports.panels.examples import load_examples
from biascope.reports.panels.input_geometry import gradients
from biascope.reports.panels.loading import put_weights
from biascope.support.errors import BiascopeError, InputError

X = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype(np.float32)
Y = np.arange(20) % 2


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec": nn.Linear(16, 2), "input_shape": None}, r"Linear: say what one input looks like"),
        ({"spec": build, "input_shape": None}, r"build: say what one input looks like"),
        ({"spec": lambda: [build()]}, "returned a list; it must return an nn.Module"),
        ({"spec": nn.Linear}, "Linear raised TypeError.*in_features"),
        ({"spec": "trained.pt"}, r"holds weights.*weights='trained\.pt'"),
        ({"networks": 1}, "networks must be at least 2, not 1"),
        ({"device": "cuda:99"}, "CUDA device"),
        ({"device": "mps"}, "device 'mps' is not supported here; use cpu"),
        ({"device": ""}, "device ''"),
        ({"options": {3: 4}}, "has no option '3'"),
    ],
)
def test_a_card_refuses(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        make_card(**{"spec": "logreg", "input_shape": (1, 4, 4), "out": tmp_path / "c.html", "networks": 8, **given})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("networks", [0, 3])
def test_a_comparison_needs_four_networks_of_each(networks: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="networks must be at least 4"):
        make_compare(["logreg", "mlp"], (1, 4, 4), tmp_path / "c.html", networks=networks)


def test_functions_are_networks_too(tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    assert make_card(build, (1, 4, 4), page, networks=8).name == "build"
    assert "<h1>build</h1>" in page.read_text()
    both = make_compare([build, "logreg"], (1, 4, 4), page, networks=16)
    assert both.names == ("build", "logreg")
    named = make_subject(f"{__file__}:build", (1, 4, 4))
    handed = make_subject(build, (1, 4, 4))
    x = handed.inputs(3)
    assert torch.equal(named.network(x), handed.network(x))  # the same seed draws the same network either way


@pytest.mark.parametrize("name", ["net.py", "w.pt", "notes"])
def test_what_is_no_page_is_not_replaced(name: str, tmp_path: Path) -> None:
    mine = tmp_path / name
    mine.write_bytes(b"\x80 hours of work")
    with pytest.raises(InputError, match=f"{name}' is there and is no page"):
        make_card("logreg", (1, 4, 4), mine, networks=8)
    assert mine.read_bytes() == b"\x80 hours of work"


@pytest.mark.parametrize(
    ("name", "message"),
    [("c.pdf", r"the page is HTML, e\.g\. out='.*c\.html"), ("a" * 300 + ".html", "File name too long")],
)
def test_pages_that_cannot_be(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        make_card("logreg", (1, 4, 4), tmp_path / name, networks=8)


def test_a_page_on_a_disk_that_takes_none_is_refused_before_the_work() -> None:
    if not Path("/proc/version").exists():
        pytest.skip("there is no /proc")
    with pytest.raises(InputError, match="nothing can be written into /proc"):
        make_card("logreg", (1, 4, 4), "/proc/c.html", networks=8)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.float32(1), Y, r"x is a single number"),
        ((X * 50).astype(np.uint8)[:, None], Y, r"bytes .*scale them as in training, e\.g\. x\.float\(\) / 255"),
        (X.astype(np.complex64), Y, r"complex numbers"),
        (X, Y * 10**9, r"labels from 0 to 1000000000; number the classes"),
        (X, Y - 1, "labels from -1 to 0; number the classes"),
        (X, Y.astype(complex), "complex numbers"),
    ],
)
def test_data_that_would_mislead(x: Any, y: Any, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=x, y=y)
    with pytest.raises(InputError, match=message):
        load_examples(str(tmp_path / "d.npz"))


@pytest.mark.parametrize("kind", [np.uint16, np.uint64, bool])
def test_labels_of_any_whole_kind_are_taken(kind: type, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=Y.astype(kind))
    assert load_examples(str(tmp_path / "d.npz")).y.tolist() == Y.tolist()


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    torch.save({"x": "a", "y": "b"}, tmp_path / "d.pt")
    with pytest.raises(InputError, match="x should be a tensor, an array or a list, it is a str"):
        load_examples(str(tmp_path / "d.pt"))
    torch.save({"x": torch.from_numpy(X).to_sparse(), "y": torch.from_numpy(Y)}, tmp_path / "d.pt")
    assert torch.equal(load_examples(str(tmp_path / "d.pt")).x, torch.from_numpy(X))
    (tmp_path / "d.csv").write_text("1,2\n")
    with pytest.raises(InputError, match=r"d\.csv: a file must be \.npz"):
        load_examples(str(tmp_path / "d.csv"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t * torch.nan, "1.weight holds nan or infinity"),
        (lambda t: t.long(), r"1\.weight is torch\.int64 in the weights"),
        (lambda t: t.to(torch.complex64), r"1\.weight is torch\.complex64"),
    ],
)
def test_weights_that_would_mislead(spoil: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    network = build()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(InputError, match=message):
        put_weights(network, {name: spoil(value) for name, value in before.items()}, "w.pt")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    half = {name: value.half() for name, value in before.items()}
    assert put_weights(network, half, "w.pt")(torch.zeros(1, 16)).dtype == torch.float32


def test_more_networks_than_fit_are_refused_at_once() -> None:
    with pytest.raises(BiascopeError, match=r"1000000000000 networks need about .* GiB.*fewer --networks"):
        gradients(make_subject("logreg", (1, 4, 4), networks=10**12))


def test_data_by_their_path(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    made = make_card(build, None, tmp_path / "c.html", networks=8, data=tmp_path / "d.npz")
    assert {panel.title for panel in made.panels if not panel.skipped} >= {"Anatomy", "Alignment with the labels"}
