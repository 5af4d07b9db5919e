import pytest
import torch

from biascope.data import Dataset, balanced_cells, corrupt_labels, easy_difficult, spurious
from biascope.support.errors import InputError


def test_corrupt_exact_and_uniform_over_wrong_classes() -> None:
    y = torch.arange(100_000) % 10
    new, changed = corrupt_labels(y, 0.15, seed=0)
    assert int(changed.sum()) == 15_000
    assert torch.equal(new != y, changed)
    shift = torch.bincount((new - y)[changed] % 10, minlength=10).double()
    assert shift[0] == 0
    assert float((shift[1:] - 15_000 / 9).abs().max()) < 5 * (15_000 / 9) ** 0.5
    assert int(new.min()) >= 0
    assert int(new.max()) <= 9


def test_corrupt_bernoulli() -> None:
    y = torch.zeros(100_000, dtype=torch.long)
    _, changed = corrupt_labels(y, 0.15, exact=False, seed=0)
    assert int(changed.sum()) != 15_000
    assert float(changed.double().mean()) == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / 1e5) ** 0.5)
    with pytest.raises(InputError, match="fraction"):
        corrupt_labels(y, 1.5)
    with pytest.raises(InputError, match=r"labels must be whole numbers .* below n_classes=10, not 10 to 10"):
        corrupt_labels(y + 10)


def test_easy_difficult_with_random_labels() -> None:
    x = torch.arange(6000.0)[:, None]
    d = Dataset(x, torch.full((6000,), 3), "threes")
    mix = easy_difficult(d, n_easy=2000, n_difficult=4000, seed=1)
    assert mix.group is not None
    assert bool((mix.y[mix.group == 0] == 3).all())
    counts = torch.bincount(mix.y[mix.group == 1], minlength=10).double()
    assert float((counts - 400).abs().max()) < 5 * 400**0.5
    assert len(mix.x.unique()) == 6000  # nobody twice
    with pytest.raises(InputError, match=r"6000 easy and 1 difficult examples of Dataset\('threes'"):
        easy_difficult(d, n_easy=6000, n_difficult=1)


def test_easy_difficult_with_another_set() -> None:
    a = Dataset(torch.zeros(50, 1), torch.zeros(50, dtype=torch.long), "a")
    b = Dataset(torch.ones(50, 1), torch.ones(50, dtype=torch.long), "b")
    mix = easy_difficult(a, b, 40, 10)
    assert mix.group is not None
    assert torch.equal(mix.x[:, 0].long(), mix.group)
    assert mix.info["difficult"] == "b"


def test_balanced_cells() -> None:
    y = torch.tensor([0] * 50 + [1] * 30)
    a = torch.tensor([0] * 40 + [1] * 10 + [0] * 5 + [1] * 25)
    index = balanced_cells(y, a, 5, seed=0)
    cells = torch.bincount(2 * y[index] + a[index])
    assert cells.tolist() == [5, 5, 5, 5]
    assert len(index.unique()) == 20
    with pytest.raises(InputError, match=r"\(1, 0\): 5"):
        balanced_cells(y, a, 6)
    assert len(balanced_cells(y, a, 180, cap=True)) == 20


@pytest.mark.parametrize("kind", ["patch", "colour"])
def test_spurious(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = 0.5 * torch.rand(200, 1, 8, 8, generator=g), torch.arange(200) % 2
    d = spurious(x, y, kind, agreement=0.9, seed=1)  # type: ignore[arg-type]
    assert d.group is not None
    for label in (0, 1):
        assert int(d.group[y == label].sum()) == 10  # exactly 10 % of each class disagree
    attribute = d.info["attribute"]
    assert torch.equal((attribute != y).long(), d.group)
    if kind == "patch":
        left = (d.x[:, 0, :3, :3] == 1).all(2).all(1)
        right = (d.x[:, 0, :3, -3:] == 1).all(2).all(1)
        assert torch.equal(left, attribute == 0)
        assert torch.equal(right, attribute == 1)
        assert torch.equal(d.x[:, :, 3:], x[:, :, 3:])
    else:
        assert torch.equal(d.x.sum(1), x[:, 0])
        assert torch.equal(d.x.flatten(2).sum(2).argmax(1), attribute)
    with pytest.raises(InputError, match="images has shape"):
        spurious(x[:, 0], y)
    with pytest.raises(InputError, match="need grey images"):
        spurious(x.expand(-1, 3, -1, -1), y)
    with pytest.raises(InputError, match="at least 9 wide"):
        spurious(x, y, patch=9)
    with pytest.raises(InputError, match="kind"):
        spurious(x, y, "sound")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"labels 0 and 1; got .* \[1, 2\]"):
        spurious(x, y + 1)
