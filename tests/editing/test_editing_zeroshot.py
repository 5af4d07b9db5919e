"""CLIP's loss and zero-shot head against closed forms in float64, and where the head is used."""

import math

import pytest
import torch
from torch import Tensor, nn

from biascope.editing import TaskVector, fine_tune, task_addition
from biascope.editing.zeroshot import ZeroShotHead, contrastive_loss, zero_shot_head
from biascope.support.errors import InputError
from editing.editing_nets import mlp, points, random_vector


def rounded(angles: Tensor) -> Tensor:
    """Unit vectors of the plane at these angles."""
    return torch.stack([angles.cos(), angles.sin()], 1)


@pytest.mark.parametrize("temperature", [0.07, 1.0, 10.0])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_loss_of_orthonormal_pairs(n: int, temperature: float) -> None:
    """Cosines 1 and 0: log(1 + (n - 1) exp(-1 / temperature)), whatever the lengths and in both directions."""
    pairs = torch.eye(n, dtype=torch.float64)
    wanted = math.log1p((n - 1) * math.exp(-1 / temperature))
    for symmetric in (False, True):
        found = contrastive_loss(3 * pairs, 0.1 * pairs, temperature=temperature, symmetric=symmetric)
        assert float(found) == pytest.approx(wanted, rel=1e-12)
    small = contrastive_loss(1e-30 * pairs.float(), 1e30 * pairs.float(), temperature=temperature)
    assert float(small) == pytest.approx(wanted, rel=1e-5, abs=1e-6)  # rounding of float32


def test_loss_is_the_definition() -> None:
    """Sums of cosines of angles, written out; over texts and over images they differ."""
    a, b, T = torch.tensor([0.1, 1.0, 2.5]).double(), torch.tensor([0.4, 0.9, 3.0]).double(), 0.3

    def over(rows: Tensor, columns: Tensor) -> float:
        terms = []
        for i, x in enumerate(rows.tolist()):
            scores = [math.exp(math.cos(x - y) / T) for y in columns.tolist()]
            terms.append(-math.log(scores[i] / math.fsum(scores)))
        return math.fsum(terms) / len(terms)

    images, texts = 2 * rounded(a), 0.5 * rounded(b)
    forward, backward = over(a, b), over(b, a)
    assert abs(forward - backward) > 1e-3
    assert float(contrastive_loss(images, texts, temperature=T)) == pytest.approx(forward, rel=1e-12)
    both = contrastive_loss(images, texts, temperature=T, symmetric=True)
    assert float(both) == pytest.approx((forward + backward) / 2, rel=1e-12)


def test_gradients_of_the_loss() -> None:
    images, texts = points(4, 1).requires_grad_(), points(4, 2).requires_grad_()
    temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for symmetric in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, t, T, s=symmetric: contrastive_loss(x, t, temperature=T, symmetric=s),
            (images, texts, temperature),
        )


def test_rows_of_the_head_are_averages_of_prompts() -> None:
    """Prompts at angles m - h and m + h average to the angle m; lengths count only where they are left."""
    around = torch.tensor([0.3, 1.7, -2.0]).double()
    prompts = {
        k: rounded(m + torch.tensor([-0.4, 0.4]).double()) * torch.tensor([[2.0], [2.0]]) for k, m in zip("abc", around)
    }
    head = zero_shot_head(prompts, scale=7.0)
    torch.testing.assert_close(head.weight, rounded(around))
    z = torch.tensor([0.5, -1.0]).double()
    torch.testing.assert_close(head(9 * rounded(z)), 7 * torch.cos(z[:, None] - around))
    assert head.classes == ("a", "b", "c")
    assert not list(head.parameters())
    assert "classes=3, features=2, scale=7" in repr(head)
    uneven = [torch.tensor([[3.0, 0.0], [0.0, 1.0]])]
    torch.testing.assert_close(zero_shot_head(uneven).weight, torch.tensor([[1.0, 1.0]]) / 2**0.5)
    torch.testing.assert_close(zero_shot_head(uneven, unit_prompts=False).weight, torch.tensor([[3.0, 1.0]]) / 10**0.5)
    stacked = torch.stack(list(prompts.values()))
    assert torch.equal(zero_shot_head(stacked, scale=7.0).weight, head.weight)
    assert zero_shot_head(stacked).classes == ("0", "1", "2")


def test_cross_entropy_of_the_head_is_the_loss() -> None:
    head, z, y = zero_shot_head(list(points(5, 1)[:, None]), scale=4.0), points(30, 2), torch.arange(30) % 5
    expected = nn.functional.cross_entropy(head(z), y)
    torch.testing.assert_close(contrastive_loss(z, 3 * head.weight, y, temperature=0.25), expected)
    assert head(z.float()).dtype == torch.float32
    assert bool(head(torch.zeros(1, 4)).isnan().all())  # no direction, no class


def test_a_head_behind_the_network() -> None:
    """Fine-tuning moves the embeddings towards the texts and leaves the head; merging scores through it."""
    net, x = mlp(), points(60, 3)
    head = zero_shot_head(list(torch.eye(3, dtype=torch.float64)[:, None]), scale=10.0)
    y, before = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), head.weight.clone()
    tuned = fine_tune(net, (x, y), head=head, steps=100, batch_size=30, lr=1e-2, weight_decay=0.0)
    assert torch.equal(head.weight, before)
    losses = [contrastive_loss(m(x).detach(), head.weight, y, temperature=0.1) for m in (net, tuned.model)]
    assert float(losses[1]) < 0.5 * float(losses[0])
    found = task_addition(net, {"a": tuned.vector}, {"a": (x, y)}, alphas=[1.0], heads={"a": head})
    accuracy = (tuned.model(x) / tuned.model(x).norm(dim=1, keepdim=True)).argmax(1) == y
    assert found.absolute()[0] == pytest.approx(float(accuracy.double().mean()))
    whole = nn.Sequential(net, head)
    vector = TaskVector.from_tensors({f"0.{k}": t for k, t in random_vector(net, 1).tensors.items()})
    assert isinstance(vector.apply_to(whole)[1], ZeroShotHead)  # type: ignore[index]
    assert torch.equal(vector.apply_to(whole)[1].weight, before)  # type: ignore[index]


def test_refusals() -> None:
    z = torch.ones(3, 2)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match=r"temperature=.*above 0"):
            contrastive_loss(z, z, temperature=temperature)
    with pytest.raises(InputError, match="3 images, 2 texts: give target="):
        contrastive_loss(z, z[:2])
    with pytest.raises(InputError, match="not with symmetric=True"):
        contrastive_loss(z, z, torch.arange(3), symmetric=True)
    assert contrastive_loss(torch.zeros(2, 2), torch.eye(2)).isnan()
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match=f"scale={scale}"):
            zero_shot_head([z], scale=scale)
    with pytest.raises(InputError, match="prompts of '0' has shape"):
        zero_shot_head([z[0]])
    with pytest.raises(InputError, match="'b' are zero, not finite, or cancel"):
        zero_shot_head({"a": z, "b": torch.zeros(1, 2)})
    with pytest.raises(InputError, match="'0' are zero, not finite"):
        zero_shot_head([torch.full((1, 2), math.nan)], unit_prompts=False)
    for unit_prompts in (True, False):
        with pytest.raises(InputError, match="'b' are zero, not finite, or cancel one another"):
            zero_shot_head({"a": z, "b": torch.tensor([[0.1, 0.3], [-0.1, -0.3]])}, unit_prompts=unit_prompts)
