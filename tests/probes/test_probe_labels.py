"""Integer labels of a network with one output: values, or two classes."""

import pytest
import torch

from biascope.probes import View, representation_alignment
from biascope.probes.function_metrics import group_losses
from probes.probe_zoo import batch, mlp

X, Y = batch()


@pytest.mark.parametrize("centred", [None, False])
def test_representation_alignment_integers_are_values_for_one_output(centred: bool | None) -> None:
    """Counts 0 to 9 with a regression network are numbers, not ten classes; 0 and 1 are as 0.0 and 1.0."""
    net = mlp(3, 6, 1)
    for counts in (torch.tensor([0, 9, 4, 1, 7, 2, 2]), Y):
        found, wanted = (
            representation_alignment(View.of(net, X, y), centered=centred) for y in (counts, counts.double())
        )
        assert found["labels"] == pytest.approx(wanted["labels"], rel=1e-12)


def test_group_accuracy_of_a_regression() -> None:
    """With a squared loss 0, 1 are decided at 1/2; integers that are no classes have no accuracy."""
    net = mlp(3, 6, 1)
    with torch.no_grad():
        net[-1].weight.mul_(0.1)
        net[-1].bias.fill_(0.5)
    out = net(X)[:, 0].detach()
    assert bool((out > 0).all())
    assert 0 < int((out > 0.5).sum()) < 7
    bits = (out > 0.5).long()
    groups = {"ones": bits.nonzero()[:, 0], "zeros": (1 - bits).nonzero()[:, 0]}
    found = group_losses(View.of(net, X, bits, groups=groups, loss_fn="squared"))
    assert (found["ones/accuracy"], found["zeros/accuracy"]) == (1.0, 1.0)
    assert found["ones/loss"] == pytest.approx(float((out - 1)[bits > 0].square().mean()), rel=1e-12)
    found = group_losses(View.of(net, X, 2 * bits - 1, groups=groups, loss_fn="squared"))
    assert (found["ones/accuracy"], found["zeros/accuracy"]) == (1.0, 0.0)
    counts = torch.tensor([0, 9, 4, 1, 7, 2, 2])
    assert list(group_losses(View.of(net, X, counts, groups={"few": [0, 3]}, loss_fn="squared"))) == ["few/loss"]
