"""Inputs of functions as people hold them: each gives the number that plain tensors give."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import biascope as bs
from biascope.support.errors import InputError

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 3
WORDS = ["cat", "dog", "eel"]
SET = TensorDataset(X, Y)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


class Column:
    """What pandas and polars have in common."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return self.values


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": X[i], "label": int(Y[i]), "path": f"{i}.png"}


INPUTS: dict[str, Any] = {
    "array": X.numpy(),
    "array of doubles": X.double().numpy(),
    "list": X.tolist(),
    "table": Column(X.numpy()),
    "table of objects": Column(X.numpy().astype(object)),
    "read-only array": np.broadcast_to(X.numpy(), (10, 3)),
    "pair of arrays": (X.numpy(), Y.numpy()),
    "list of batches": [X[:4], X[4:]],
    "list of arrays": [X[:4].numpy(), X[4:].numpy()],
    "pairs of arrays": [(X[:4].numpy(), Y[:4].numpy()), (X[4:].numpy(), Y[4:].numpy())],
    "data set": SET,
    "own set": bs.data.Dataset(X, Y, "mine"),
    "loader": DataLoader(SET, batch_size=4),
    "loader of dicts": DataLoader(Dicts(), batch_size=4),
    "dict": {"image": X.numpy(), "label": Y.tolist(), "path": ["a"] * 10},
    "keywords": {"input": X.numpy()},
    "list of examples": [(x, int(y)) for x, y in zip(X, Y)],
    "list of arrays and labels": [(x.numpy(), y) for x, y in zip(X, Y.numpy())],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_kernels_metrics_and_jacobians_of_any_input(kind: str) -> None:
    given, model = INPUTS[kind], net()
    assert torch.allclose(bs.ntk(model, given).tensor, bs.ntk(model, X).tensor, rtol=1e-5)
    assert torch.allclose(bs.fisher(model, given, "kfac").trace(), bs.fisher(model, X, "kfac").trace(), rtol=1e-5)
    assert torch.allclose(bs.Jacobian(model, given).to_dense(), bs.Jacobian(model, X).to_dense(), rtol=1e-5)


@pytest.mark.parametrize(
    "kind",
    ["pair of arrays", "pairs of arrays", "data set", "loader of dicts", "dict", "own set", "list of examples"],
)
def test_labels_that_come_with_the_inputs(kind: str) -> None:
    model = net()
    want = bs.fisher(model, (X, Y), "diagonal", estimator="empirical").diagonal()
    assert torch.allclose(bs.fisher(model, INPUTS[kind], "diagonal", estimator="empirical").diagonal(), want, rtol=1e-5)
    found = bs.label_alignment(model, INPUTS[kind], sketch=30)
    assert found.value == pytest.approx(bs.label_alignment(model, X, Y, sketch=30).value, rel=1e-5)


LABELS: dict[str, Any] = {
    "array": Y.numpy(),
    "list": Y.tolist(),
    "bytes": Y.numpy().astype(np.uint8),
    "words": [WORDS[i] for i in Y],
    "array of words": np.array(WORDS)[Y],
    "column of words": Column(np.array(WORDS, dtype=object)[Y]),
    "column": Y[:, None],
    "whole floats": Y.float(),
    "one-hot": nn.functional.one_hot(Y),
    "list of tensors": list(Y),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_any_kind(kind: str) -> None:
    y, model = LABELS[kind], net()
    assert torch.allclose(
        bs.hessian(model, (X, y), representation="dense").to_dense(),
        bs.hessian(model, (X, Y), representation="dense").to_dense(),
    )
    want = bs.label_alignment(model, X, Y, sketch=30).value
    assert bs.label_alignment(model, X, y, sketch=30).value == pytest.approx(want, rel=1e-6)
    K = bs.ntk(model, X)
    assert K.alignment(y) == pytest.approx(K.alignment(Y), rel=1e-6)


def test_truth_values_and_signs() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    one = X[:, 0] > 0
    K, want = bs.ntk(model, X), bs.ntk(model, X).alignment(one.long())
    for y in (one, one.numpy(), one[:, None], one.float()[:, None]):
        assert K.alignment(y) == pytest.approx(want, rel=1e-6)
        assert bs.label_alignment(model, X, y).value == pytest.approx(want, rel=1e-5)
        assert bs.Probe(model, X, y, ["label_alignment"]).records[0]["label_alignment"] == pytest.approx(want, rel=1e-5)
    with pytest.raises(InputError, match=r"y holds -1 and 1, .* as classes of 2 pass \(y > 0\)\.long\(\)"):
        K.alignment(2 * one.long() - 1)


def test_classes_of_places_come_with_their_line() -> None:
    """Labels of pixels; the line of the message gives what cross-entropy's classes on axis 1 mean."""
    net = nn.Conv2d(1, 2, 1)
    x, y = torch.randn(4, 1, 2, 2), torch.arange(16).view(4, 2, 2) % 3 % 2
    with pytest.raises(InputError, match=r"class per place one_hot\(y, 2\)\.movedim\(-1, 1\)\.flatten\(1\)"):
        bs.label_alignment(net, x, y)
    rows = nn.functional.one_hot(y, 2).movedim(-1, 1).flatten(1)
    J = bs.Jacobian(net, x).to_dense().double().flatten(0, 1)
    J, v = J.view(4, 8, -1) - J.view(4, 8, -1).mean(0), rows.double() - rows.double().mean(0)
    J, v = J.flatten(0, 1), v.flatten()
    want = float((J.T @ v).square().sum() / ((J @ J.T).norm() * v.square().sum()))
    assert bs.label_alignment(net, x, rows).value == pytest.approx(want, rel=1e-5)


def test_sets_of_the_datasets_library() -> None:
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    want = bs.label_alignment(net(), X, Y, sketch=30).value
    assert bs.label_alignment(net(), held, sketch=30).value == pytest.approx(want, rel=1e-5)


class LikeDatasets:
    """Its items are lists until a format is asked for, as in the datasets library."""

    column_names = ("x", "label")

    def __init__(self, torched: bool = False) -> None:
        self.torched = torched

    def with_format(self, kind: str) -> "LikeDatasets":
        return LikeDatasets(kind == "torch")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i] if self.torched else X[i].tolist(), "label": int(Y[i])}


def test_lists_of_a_data_set_become_tensors() -> None:
    want = bs.label_alignment(net(), X, Y, sketch=30).value
    assert bs.label_alignment(net(), LikeDatasets(), sketch=30).value == pytest.approx(want, rel=1e-6)


def test_pictures_without_a_transform_get_the_line_that_helps() -> None:
    image = pytest.importorskip("PIL.Image")

    class Pictures(Dataset[Any]):  # torchvision's sets give this unless they are told otherwise
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Any, int]:
            return image.new("L", (4, 4)), i % 2

    for call in (lambda d: bs.fisher(net(), d), lambda d: bs.Probe(net(), d)):
        with pytest.raises(InputError, match=r"PIL.*pictures need a transform, .* torchvision\.transforms\.ToTensor"):
            call(Pictures())


def test_words_of_single_batches_have_no_common_numbers() -> None:
    with pytest.raises(InputError, match=r"batch 0 of x: its labels are words; number the classes in the data set"):
        bs.label_alignment(net(), [(X[:5], ["dog"] * 5), (X[5:], ["cat"] * 5)])


SHUFFLED: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(SET, batch_size=4, shuffle=True),
    "last dropped": lambda: DataLoader(SET, batch_size=4, shuffle=True, drop_last=True),
    "subset": lambda: DataLoader(SET, batch_size=4, sampler=SubsetRandomSampler([7, 1, 4])),
    "weighted": lambda: DataLoader(SET, batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10)),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_loaders_that_shuffle_are_read_in_one_order(kind: str) -> None:
    model = net()
    with pytest.warns(UserWarning, match="in the order of its data set"):
        K = bs.ntk(model, SHUFFLED[kind]())
    places = {"shuffle": range(10), "last dropped": range(8), "subset": [7, 1, 4]}.get(kind)
    if places is not None:
        assert torch.allclose(K.tensor, bs.ntk(model, X[list(places)]).tensor)
    with pytest.warns(UserWarning, match="in the order of its data set"):
        J = bs.Jacobian(model, SHUFFLED[kind]())
    assert torch.equal(J @ torch.ones(J.p), J @ torch.ones(J.p))  # the same rows at every pass


def test_keywords_that_are_no_pair() -> None:
    """A network may take x and y, or an image and a label, as arguments."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) * self.b(y)  # type: ignore[no-any-return]

    assert bs.ntk(Two(), {"x": X, "y": X}).tensor.shape == (10, 2, 10, 2)
    assert bs.ntk(Two(), [{"x": X.numpy(), "y": X.numpy()}]).tensor.shape == (10, 2, 10, 2)


def test_other_functions_take_arrays_too() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = x + 0.1 * rng.normal(size=(200, 1))
    assert float(bs.mutual_information(x, y, estimator="ksg").nats) > 1
    probe = bs.Probe(net(), X.numpy(), Y.tolist(), ["label_alignment"])
    probe.step()
    assert probe.finish()[0].values
    kernel = bs.ntk(net(), X, outputs="trace")
    assert bs.kernel_regression(kernel, Y.numpy(), ridge=1e-3) is not None


def test_an_iterator_can_be_read_once_only() -> None:
    def once() -> Iterator[Tensor]:
        yield X

    with pytest.raises(InputError, match="one-shot iterator"):
        bs.Jacobian(net(), once())


class Photo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.meta, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, image: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.pixels(image) + self.meta(age)))


AGE = torch.randn(10, 2, generator=torch.Generator().manual_seed(5))
SEVERAL: dict[str, Any] = {
    "tuple": (X, AGE),
    "tuple with labels": (X, AGE, Y),
    "arrays": (X.numpy(), AGE.numpy(), Y.numpy()),
    "inputs and labels": ((X, AGE), Y),
    "loader": DataLoader(TensorDataset(X, AGE), batch_size=4),
    "loader with labels": DataLoader(TensorDataset(X, AGE, Y), batch_size=4),
    "batches": [((X[:4], AGE[:4]), Y[:4]), ((X[4:], AGE[4:]), Y[4:])],
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_inputs_come_one_after_another(kind: str) -> None:
    """As a loader gives them: (image, age, label) of a network that needs an image and an age."""
    torch.manual_seed(0)
    given, model, named = SEVERAL[kind], Photo(), {"image": X, "age": AGE}
    assert torch.equal(bs.ntk(model, given).tensor, bs.ntk(model, named).tensor)
    assert torch.allclose(bs.fisher(model, given, "kfac").trace(), bs.fisher(model, named, "kfac").trace(), rtol=1e-5)
    if kind in {"tuple", "loader"}:
        return
    want = bs.label_alignment(model, named, Y).value
    assert bs.label_alignment(model, given).value == pytest.approx(want, rel=1e-5)
    probe = bs.Probe(model, given, metrics=["label_alignment"])
    assert probe.records[0]["label_alignment"] == pytest.approx(bs.ntk(model, named).alignment(Y), rel=1e-5)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        words = self.table(ids) if mask is None else self.table(ids) * mask[..., None]
        return scale * self.head(words.mean(1))


def test_a_third_part_that_may_be_an_input_is_asked_about() -> None:
    """(ids, mask, labels) was read as (inputs, labels, something), which left the mask out."""
    ids, mask = torch.arange(20).reshape(10, 2) % 9, torch.tensor([1, 0]).expand(10, 2)
    for given in ((ids, mask, Y), DataLoader(TensorDataset(ids, mask, Y), batch_size=5)):
        with pytest.raises(InputError, match=r"a batch of 3 parts: say what they are, \{'ids': ..., 'mask': ..., 'l"):
            bs.ntk(Masked(), given)
    assert bs.ntk(Masked(), {"ids": ids, "mask": mask, "labels": Y}).tensor.shape == (10, 2, 10, 2)
    ids = torch.where(mask == 0, 7, ids)  # what a tokenizer gives: padding is one token, at one end
    for given in ((ids, mask, Y), DataLoader(TensorDataset(ids, mask, Y), batch_size=5)):
        model = Masked()
        named = {"ids": ids, "mask": mask, "labels": Y % 2}
        assert torch.equal(bs.ntk(model, given).tensor, bs.ntk(model, named).tensor)
    with pytest.raises(
        InputError, match=r"a batch of 2 parts: say .*'mask': \.\.\.\} or \{'ids': \.\.\., 'labels': \.\.\.\}"
    ):
        bs.ntk(Masked(), (ids, mask))  # a mask, or a label for every token
    with_index = DataLoader(TensorDataset(X, Y, torch.arange(10)), batch_size=4)
    assert torch.equal(bs.ntk(net(), with_index).tensor, bs.ntk(net(), X).tensor)


@pytest.mark.parametrize("call", [lambda m, b: bs.ntk(m, b), lambda m, b: bs.Probe(m, b)])
def test_batches_padded_to_several_lengths(call: Any) -> None:
    ids = torch.arange(24).reshape(4, 6) % 9
    with pytest.raises(InputError, match=r"batch 1 of x\w* has examples of shape \[4\], batch 0 \[6\].*pad"):
        call(Masked(), [{"ids": ids, "labels": Y[:4]}, {"ids": ids[:, :4], "labels": Y[:4]}])
