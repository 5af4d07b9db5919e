"""`bs.Probe` with what people train on: loaders, data sets, pairs; and defaults that draw a curve."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import biascope as bs
from biascope.probes.batch import EXAMPLES
from biascope.support.errors import InputError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def rows(probe: bs.Probe) -> list[tuple[float, ...]]:
    x, y = probe.setup.x, probe.setup.y
    assert isinstance(x, Tensor)
    assert y is not None
    return sorted((*row.tolist(), float(label)) for row, label in zip(x, y))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": X[i], "label": int(Y[i]), "path": f"{i}.png"}


GIVEN: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=16),
    "shuffling loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),
    "loader of dicts": lambda: DataLoader(Rows(), batch_size=7, shuffle=True),
    "data set": lambda: TensorDataset(X, Y),
    "pair": lambda: (X, Y),
    "pair of arrays and words": lambda: (X.numpy(), ["no" if y == 0 else "yes" for y in Y.tolist()]),
    "dict": lambda: {"image": X, "label": Y},
    "batches": lambda: [(X[:16], Y[:16]), (X[16:], Y[16:])],
}


@pytest.mark.parametrize("kind", GIVEN)
def test_examples_and_labels_in_one_argument(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    state, plain = torch.get_rng_state(), bs.Probe(net(), X, Y, max_overhead=None)
    probe = bs.Probe(net(), GIVEN[kind](), max_overhead=None)
    assert torch.equal(torch.get_rng_state(), state)
    assert rows(probe) == rows(plain)
    name = "label_alignment"
    assert probe.records[0][name] == pytest.approx(plain.records[0][name], rel=1e-5)
    assert not probe.notes
    assert not recwarn.list  # examples and labels come in the same order, whichever it is


def test_of_many_examples_a_fixed_random_part() -> None:
    x = torch.arange(1000.0)[:, None].expand(-1, 3)
    data = TensorDataset(x, torch.arange(1000) // 500)  # sorted by class
    one, two = (bs.Probe(net(), DataLoader(data, batch_size=64, shuffle=True), metrics="sign_similarity") for _ in "ab")
    assert rows(one) == rows(two)
    assert len(rows(one)) == EXAMPLES
    assert {row[-1] for row in rows(one)} == {0.0, 1.0}
    assert one.notes == (f"measured at {EXAMPLES} of 1000 examples",)
    assert rows(bs.Probe(net(), data, metrics="sign_similarity", seed=1)) != rows(one)


def test_endless_data_are_read_once() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(3), 1

    probe = bs.Probe(net(), DataLoader(Endless(), batch_size=50), metrics="sign_similarity")
    assert len(rows(probe)) == EXAMPLES


def test_two_sets_of_labels_are_a_question() -> None:
    with pytest.raises(InputError, match="a loader or a data set as x_probe brings its own labels"):
        bs.Probe(net(), TensorDataset(X, Y), Y)
    with pytest.raises(InputError, match="x_probe holds labels and y_probe gives others"):
        bs.Probe(net(), (X, Y), Y)
