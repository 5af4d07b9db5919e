"""Data for a card as people hold them: the same inputs and labels from all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from biascope import data
from biascope.reports import make_card
from biascope.reports.panels.base import make_subject
from biascope.reports.panels.examples import Examples, load_examples
from biascope.support.errors import InputError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
WORDS = ["cat", "dog", "eel"]


class Rows(Dataset[Any]):
    """One example at a time, as dicts."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": X[i], "label": WORDS[int(Y[i])], "path": f"{i}.png"}


class Column:
    """What pandas and polars have in common."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return np.asarray(self.values)


def stored(held: dict[str, Any], folder: Path, kind: str) -> Path:
    path = folder / f"d.{kind}"
    if kind == "npz":
        np.savez(path, **{name: np.asarray(value) for name, value in held.items()})
    elif kind == "safetensors":
        save_file(held, path)
    else:
        torch.save(held, path)
    return path


KINDS: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda _: (X, Y),
    "arrays": lambda _: (X.numpy(), Y.numpy()),
    "doubles": lambda _: (X.numpy().astype(np.float64), Y.numpy().astype(np.uint8)),
    "lists": lambda _: (X.tolist(), Y.tolist()),
    "words": lambda _: (X, [WORDS[i] for i in Y]),
    "columns": lambda _: (Column(X.numpy()), Column([WORDS[i] for i in Y])),
    "one column": lambda _: (X, Y[:, None]),
    "whole floats": lambda _: (X, Y.double()[:, None]),
    "one-hot": lambda _: (X, nn.functional.one_hot(Y)),
    "dict": lambda _: {"data": X, "target": Y},
    "data set": lambda _: TensorDataset(X, Y),
    "loader": lambda _: DataLoader(TensorDataset(X, Y), batch_size=16),
    "shuffling loader": lambda _: DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),
    "dicts with words": lambda _: DataLoader(Rows(), batch_size=16, shuffle=True),
    "batches": lambda _: [(X[:16], Y[:16]), (X[16:], Y[16:])],
    "generator": lambda _: ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)),
    "own set": lambda _: data.Dataset(X, Y, "mine"),
    "npz": lambda folder: stored({"X": X, "Y": Y}, folder, "npz"),
    "npz of words": lambda folder: str(stored({"x": X, "y": [WORDS[i] for i in Y]}, folder, "npz")),
    "safetensors": lambda folder: stored({"images": X, "labels": Y}, folder, "safetensors"),
    "pt": lambda folder: stored({"data": X, "targets": Y}, folder, "pt"),
}


def rows(found: Examples) -> list[tuple[float, ...]]:
    return sorted((*row.tolist(), float(label)) for row, label in zip(found.x, found.y))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_examples(kind: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    found = load_examples(KINDS[kind](tmp_path))
    assert rows(found) == rows(Examples("", X, Y))
    assert (found.kind, found.classes) == ("classes", 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_of_many_is_random_and_the_same_every_time() -> None:
    x = torch.arange(2000.0)[:, None]
    loader = DataLoader(TensorDataset(x, torch.arange(2000) // 1000), batch_size=64, shuffle=True)
    one, two = load_examples(loader), load_examples(loader)
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, load_examples(loader, seed=1).x)
    assert one.x.shape == (512, 1)
    assert one.classes == 2  # of a set sorted by class


def test_real_targets_are_a_regression(tmp_path: Path) -> None:
    y = X @ torch.tensor([1.0, -2.0, 0.5])
    for given in ((X, y), (X, y[:, None].double().numpy()), {"x": X, "y": y.tolist()}):
        found = load_examples(given)
        assert (found.kind, found.y.shape, found.classes) == ("numbers", (40, 1), 0)
    card = make_card(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), data=(X, y), out=tmp_path / "c.html"
    )
    assert [panel.title for panel in card.panels if panel.skipped] == []
    ages = make_subject(lambda: nn.Linear(3, 1), data=(X, torch.arange(40)))  # whole numbers, one output
    assert ages.data is not None
    assert (ages.data.kind, ages.data.y.shape) == ("numbers", (40, 1))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match=r"holds pictures, y: call inputs and labels x and y \(known too: images, "):
        load_examples({"pictures": X, "y": Y})
    with pytest.raises(InputError, match=r"data is a Tensor: inputs and labels are needed, e\.g\. data=\(x, y\)"):
        load_examples(X)
    with pytest.raises(InputError, match="a batch of the data is a Tensor without labels"):
        load_examples(DataLoader(TensorDataset(X, Y), collate_fn=lambda rows: torch.stack([x for x, _ in rows])))
    with pytest.raises(
        InputError, match=r"a batch of the data is a list of 3: give pairs, e\.g\. \[\(b\[0\], b\[-1\]\)"
    ):
        load_examples(DataLoader(TensorDataset(X, torch.randn(len(X), 2), Y)))  # not the second part as labels
