"""Accuracies are of labels that are classes, bce takes 0 and 1; buffers and shared memory train as in plain torch."""

import math

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import SGD, Networks, accuracy, data_order, record, train_ensemble
from biascope.ensembles.steppers import Training
from biascope.ensembles.work import Work
from biascope.geometry import geometry_evolution
from biascope.support.errors import InputError

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
SIGNS = torch.where(X.sum(1) > 0, 1, -1)


class Drifting(nn.Module):
    """A mean that follows the data and is put in the buffer's place, a scale that is so after the backward pass has
    noted the old one, and a counter that is changed where it lies."""

    mean: Tensor
    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        out: Tensor = self.layer(x - self.mean) * (1 + 0.01 * self.calls)
        scaled = out * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * out.detach().abs().mean(0)
        return scaled


def plain(x: Tensor, y: Tensor, i: int) -> dict[str, Tensor]:
    """Two epochs of three steps without clipping, as torch does them."""
    module = record(Drifting).draw(0, i, i + 1, dtype=torch.float64).module(0).train()
    sgd, step = torch.optim.SGD(module.parameters(), lr=0.3), 0
    for epoch in range(2):
        for batch in data_order(0, i, epoch, len(x)).split(8):
            sgd.param_groups[0]["lr"] = 0.3 * (1 - step / 6)
            sgd.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            step += 1
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_buffers_that_a_network_replaces_are_kept(engine) -> None:  # type: ignore[no-untyped-def]
    x, y = X.double(), (SIGNS > 0).long()
    done = train_ensemble(
        Drifting, [(x, y)] * 3, epochs=2, batch_size=8, lr=0.3, clip_norm=None, dtype=torch.float64, engine=engine
    )
    assert done.networks is not None
    for i in range(3):
        for name, value in plain(x, y, i).items():
            torch.testing.assert_close(done.networks.one(i)[name], value, rtol=1e-12, atol=1e-12)
    assert done.networks.buffers["mean"].abs().min() > 0


def test_the_step_that_graphs_capture_keeps_replaced_buffers_in_their_tensors() -> None:
    """A graph reads the same memory at every replay, so that is where the new value has to be."""
    x, y = X.double(), (SIGNS > 0).long()
    sgd = SGD(epochs=2, batch_size=8, lr=0.3, clip_norm=None)
    work = Work(
        record(Drifting), [(x, y)], sgd, nn.functional.cross_entropy, 0, torch.device("cpu"), torch.float64, "float32"
    )
    networks = work.start(range(1))
    training = Training(work, networks.module(0), x, y)
    training.load(networks, 0, 0, x, y)
    held = dict(training.module.named_buffers())
    for _ in range(6):
        training.step(8)
    for name, value in plain(x, y, 0).items():
        found = dict((*training.module.named_parameters(), *training.module.named_buffers()))[name]
        torch.testing.assert_close(found.detach(), value, rtol=1e-6, atol=1e-6)  # rates are held in float32
    assert all(value is held[name] for name, value in training.module.named_buffers())


@pytest.mark.parametrize(
    ("y", "loss"),
    [(SIGNS, "mse"), ((SIGNS + 1) // 2, "mse"), (X[:, 0], "mse"), (SIGNS, "hinge"), (X[:, 0].sigmoid(), "bce")],
    ids=["signs", "zero and one", "numbers", "hinge", "shares"],
)
def test_labels_that_are_no_classes_have_no_accuracy(y: Tensor, loss: str) -> None:
    """The sign of an output says nothing of a target near 0 or 1, and -1 is no class that a sign could hit."""
    hinge = lambda out, y: (1 - y * out[:, 0]).relu().mean()  # noqa: E731
    done = train_ensemble(
        lambda: nn.Linear(4, 1), [(X, y)] * 2, test=[(X, y)] * 2, loss=hinge if loss == "hinge" else loss, epochs=1
    )
    assert done.train_accuracy.numel() == done.test_accuracy.numel() == 0


def test_targets_of_several_numbers_have_no_accuracy_either() -> None:
    shares = nn.functional.one_hot((SIGNS > 0).long()) * 0.8 + 0.1
    done = train_ensemble(lambda: nn.Linear(4, 2), [(X, shares)], test=[(X, shares)], epochs=1)
    assert done.train_accuracy.numel() == done.test_accuracy.numel() == 0


def test_classes_may_come_as_numbers_and_tasks_without_them_have_nan() -> None:
    """The other task's labels are between the classes."""
    classes = (SIGNS > 0).double()
    tasks = [(X, classes), (X, 0.8 * classes + 0.1)]
    done = train_ensemble(lambda: nn.Linear(4, 1), tasks, test=tasks, loss="bce", epochs=40, batch_size=8)
    for found in (done.train_accuracy, done.test_accuracy):
        assert found[0] > 0.9
        assert math.isnan(found[1])


def test_left_out_labels_do_not_count() -> None:
    sign = Networks(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1, 1)}, {})
    x = torch.tensor([[[1.0], [-1.0], [2.0], [3.0]]])
    assert accuracy(sign, x, torch.tensor([[1, 1, -100, -100]])).item() == 0.5
    assert math.isnan(accuracy(sign, x, torch.full((1, 4), -100)).item())


def test_signs_are_no_labels_of_bce() -> None:
    """Its loss has no lower bound there, and goes down without end."""
    with pytest.raises(InputError, match="bce wants labels 0 and 1, or numbers"):
        train_ensemble(lambda: nn.Linear(4, 1), [(X, SIGNS)], loss="bce")
    with pytest.raises(InputError, match="bce wants labels 0 and 1, or numbers"):  # only the second one
        train_ensemble(lambda: nn.Linear(4, 1), [(X, (SIGNS + 1) // 2), (X, SIGNS)], loss="bce", engine="loop")


def test_parameters_in_the_memory_of_others_are_refused() -> None:
    """In plain torch a step of one moves the other; as stacks they would go separate ways."""

    class Aliased(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            if kind == "data":
                self.b.weight.data = self.a.weight.data
            elif kind == "buffer":
                self.register_buffer("start", self.a.weight.detach())
            elif kind == "tied":
                self.b.weight = self.a.weight
            else:
                whole = torch.randn(2, 4, 4)
                self.a.weight, self.b.weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x))
            return out[:, :2]

    data = [(X, (SIGNS > 0).long())]
    for kind, other in (("data", r"b\.weight"), ("buffer", "start")):
        with pytest.raises(InputError, match=rf"'a\.weight' and '{other}' share memory"):
            train_ensemble(lambda: Aliased(kind), data, epochs=1)  # noqa: B023
        with pytest.raises(InputError, match="share memory"):
            geometry_evolution(lambda: Aliased(kind), X, SIGNS.float(), n_networks=2)  # noqa: B023
    for kind in ("tied", "parts of one"):
        assert train_ensemble(lambda: Aliased(kind), data, epochs=1).losses.isfinite().all()  # noqa: B023
