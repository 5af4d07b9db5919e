"""Backward passes for several cotangents in which convolutions see them as further examples."""

import importlib

import torch
from torch import nn

from biascope.network.functional import functional
from biascope.network.stream import anatomy, recorded

record = importlib.import_module("biascope.network.layers.record")  # the package has a function of that name


class Net(nn.Module):
    """Two convolutions around a residual sum, and a layer that the output does not see."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, stride=2)
        self.head, self.lost = nn.Linear(27, 4), nn.Linear(27, 5)

    def forward(self, x):
        x = self.a(x).relu()
        x = (self.b(x) + x[:, :, 1:-1:2, 1:-1:2]).relu().flatten(1)
        self.lost(x)
        return self.head(x)


def test_cotangents_folded_into_the_examples_give_the_single_gradients(monkeypatch):
    gen = torch.Generator().manual_seed(0)
    net = Net().double()
    x, cotangents = (torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in ((5, 2, 8, 8), (3, 5, 4)))
    f = functional(net, precision="float64")
    tape = recorded(f, anatomy(f, x), x)
    monkeypatch.setattr(record, "FOLDED", ("cpu",))
    seen = []
    monkeypatch.setattr(record.Tape, "_folded_gradients", spy(record.Tape._folded_gradients, seen))
    together = tape.batched_gradients(cotangents)
    assert seen == [1]
    single = [tape.gradients(u) for u in cotangents]
    assert [g is None for g in together] == [g is None for g in single[0]]
    assert sum(g is None for g in together) == 1
    for j in range(3):
        for one, other in zip(together, single[j], strict=True):
            if one is not None:
                torch.testing.assert_close(one[j], other, rtol=1e-12, atol=1e-12)


def spy(method, seen):
    def wrapped(*args):
        seen.append(1)
        return method(*args)

    return wrapped
