import pytest
import torch

from biascope.data import Dataset, disk
from biascope.data.dataset import alternating_signs, as_labels, as_signs, generator, orthonormal, project_out
from biascope.support.errors import InputError


def toy(n: int = 10) -> Dataset:
    return Dataset(torch.arange(n)[:, None].double(), torch.arange(n), "toy", 0, {"k": 1}, torch.arange(n) % 2)


def test_train_test_partition_and_shuffle() -> None:
    train, test = toy().train_test(6)
    assert train.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert test.y.tolist() == [6, 7, 8, 9]
    a, b = toy().train_test(6, seed=3)
    assert a.y.tolist() != train.y.tolist()
    assert sorted(a.y.tolist() + b.y.tolist()) == list(range(10))
    assert a.y.tolist() == toy().train_test(6, seed=3)[0].y.tolist()
    # x, y and group stay together
    assert a.x[:, 0].long().tolist() == a.y.tolist()
    assert a.group is not None
    assert (a.y % 2).tolist() == a.group.tolist()


@pytest.mark.parametrize("n", [0, 10, 11])
def test_train_test_refuses_empty_parts(n: int) -> None:
    with pytest.raises(InputError, match="n_train"):
        toy().train_test(n)


def test_subset_to_repr_and_lengths() -> None:
    d = toy().subset(torch.tensor([4, 2])).to("cpu")
    assert d.y.tolist() == [4, 2]
    assert "toy" in repr(d)
    assert len(toy().subset(toy().y > 6)) == 3
    with pytest.raises(InputError, match="y has 2"):
        Dataset(torch.zeros(3, 1), torch.zeros(2), "bad")
    with pytest.raises(InputError, match="group has 1"):
        Dataset(torch.zeros(3, 1), torch.zeros(3), "bad", group=torch.zeros(1))


def test_seeds_are_integers_or_generators() -> None:
    g = torch.Generator().manual_seed(1)
    assert generator(g) is g
    for bad in ("1", None, True, 1.0):
        with pytest.raises(InputError, match=r"seed=.* an integer or a Generator is needed"):
            disk(4, seed=bad)  # type: ignore[arg-type]


def test_labels_and_signs() -> None:
    signs = alternating_signs(4)
    assert signs.tolist() == [-1, 1, -1, 1]
    assert as_labels(signs, "01").tolist() == [0, 1, 0, 1]
    assert as_labels(signs, "pm1").tolist() == [-1, 1, -1, 1]
    assert as_signs(torch.tensor([0, 1])).tolist() == [-1, 1]
    with pytest.raises(InputError, match="even n"):
        alternating_signs(5)
    with pytest.raises(InputError, match="binary labels"):
        as_signs(torch.tensor([0, 2]))
    with pytest.raises(InputError, match="labels='other' is not known"):
        disk(4, labels="other")  # type: ignore[arg-type]


def test_orthonormal_refuses() -> None:
    with pytest.raises(InputError, match="direction 0 has norm 0"):
        orthonormal(torch.zeros(3))
    with pytest.raises(InputError, match=r"not orthogonal \(cosine 0\.707\)"):
        orthonormal(torch.tensor([1.0, 0]), torch.tensor([1.0, 1.0]))
    with pytest.raises(InputError, match="or differ in shape"):
        orthonormal(torch.ones(2), torch.ones(3))


def test_project_out_equals_the_dense_projector() -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(12, 2, generator=g, dtype=torch.float64)).Q
    x = torch.randn(5, 3, 4, generator=g, dtype=torch.float64)
    dense = torch.eye(12, dtype=torch.float64) - q @ q.T
    out = project_out(x, q[:, 0].view(3, 4), q[:, 1].view(3, 4))
    assert torch.allclose(out.flatten(1), x.flatten(1) @ dense, atol=1e-12)
    with pytest.raises(InputError, match="direction has shape"):
        project_out(x, q[:, 0])
