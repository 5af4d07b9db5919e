"""Fine-tuning on a GPU, where steps are a replayed graph, against the same on the CPU. Skipped without CUDA."""

from typing import Any

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.editing import fine_tune
from biascope.support.errors import InputError
from editing.editing_nets import mlp, points

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("tangent", [False, True])
@pytest.mark.parametrize("held", ["gpu", "cpu"])
def test_a_replayed_step_is_the_step(tangent: bool, held: str) -> None:
    x = points(48, 1)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1)
    how: Any = {"tangent": tangent, "steps": 40, "batch_size": 20, "lr": 0.03}
    expected = fine_tune(mlp(), (x, y), **how)
    data = (x.cuda(), y.cuda()) if held == "gpu" else (x, y)
    net = mlp().cuda()
    before = {k: p.clone() for k, p in net.named_parameters()}
    found = fine_tune(net, data, **how)
    # the rate of a graph is a float32
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-6)
    for name, tensor in expected.vector.tensors.items():
        torch.testing.assert_close(found.vector[name].cpu(), tensor, rtol=1e-3, atol=1e-5)
        assert torch.equal(before[name], net.get_parameter(name))
    again = fine_tune(net, data, **how)
    assert torch.allclose(again.losses, found.losses, rtol=1e-6)


@pytest.mark.parametrize("tangent", [False, True])
def test_a_convolutional_network_learns_as_on_the_cpu(tangent: bool) -> None:
    net = nets.build("mobilenet-v2", seed=0, image_size=32, stages=2, outputs=3).eval()
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (64,), generator=g)
    x = torch.randn(64, 3, 32, 32, generator=g) + 2 * nn.functional.one_hot(y, 3)[:, :, None, None]
    how: Any = {"tangent": tangent, "steps": 30, "batch_size": 16, "lr": 1e-2}
    expected = fine_tune(net, (x, y), **how).losses
    found = fine_tune(net.cuda(), (x.cuda(), y.cuda()), **how).losses
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # tf32 convolutions
    assert float(found[-5:].mean()) < 0.95 * float(found[0])


def test_a_label_that_is_no_class_is_refused_before_the_graph() -> None:
    with pytest.raises(InputError, match="classes from 0 to 2"):
        fine_tune(
            nn.Linear(4, 3).cuda(), (torch.randn(9, 4).cuda(), torch.full((9,), 3).cuda()), steps=20, batch_size=4
        )
