"""A GPU is asked for its answers once, not chunk by chunk, and is not sent thousands of small operations."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import biascope as bs
from biascope.curvature import contract, passes

ANSWERS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"}
WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "lift_fresh"}  # the last: torch.tensor(...)


class Operations(TorchDispatchMode):
    """Counts what is sent to the device, and what of it waits for the device or copies to it."""

    def __init__(self):
        super().__init__()
        self.all, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.all[name] += 1
        masked = name.startswith("index") and any(
            t.dtype == torch.bool for arg in args[1:2] if isinstance(arg, list | tuple) for t in arg if t is not None
        )
        self.waits[name] += name in WAITING or masked
        return func(*args, **(kwargs or {}))


class Answers(TorchFunctionMode):
    """Counts tensors that are read by Python."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.asked[name] += name in ANSWERS
        return func(*args, **(kwargs or {}))


def counted(net, x, representation, batch, **options):
    """(operations, waits) of the second call: the first one looks at the network."""

    def call():
        bs.fisher(net, x, representation, estimator="monte-carlo", batch_size=batch, **options)

    call()
    with Operations() as seen, Answers() as read:
        call()
    return seen.all.total(), +seen.waits + +read.asked


@pytest.fixture
def like_a_gpu(monkeypatch):
    monkeypatch.setattr(contract, "CACHED", ())
    monkeypatch.setattr(passes, "LATER", {"cpu": 32})


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 9, 3),
    )


@pytest.mark.parametrize(("representation", "once", "per_chunk"), [("kfac", 80, 230), ("diagonal", 40, 170)])
def test_waits_and_operations_of_a_convolutional_network(representation, once, per_chunk, like_a_gpu):
    net, x = convolutional(), torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    few, waits = counted(net, x, representation, 4)
    more, waits_of_more = counted(net, x, representation, 2)
    assert waits == waits_of_more  # none in the loop over the chunks
    assert waits.total() <= 2, waits  # are the inputs numbers, and the results?
    assert (more - few) / 3 <= per_chunk
    assert few - (more - few) <= once


@pytest.mark.parametrize(("representation", "bound"), [("kfac", 106), ("diagonal", 94)])
def test_operations_of_a_multilayer_perceptron(representation, bound, like_a_gpu):
    net = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    operations, waits = counted(net, torch.randn(20, 9), representation, None)
    assert operations <= bound
    assert waits.total() <= 2, waits


def test_a_wait_is_counted():
    with Operations() as seen, Answers() as read:
        x = torch.tensor([1.0, 2.0])
        x[x > 1]
        x.sum().item()
        x.tolist()
    assert seen.waits["lift_fresh"] == 1
    assert seen.waits["index"] == 1
    assert (read.asked["item"], read.asked["tolist"]) == (1, 1)
