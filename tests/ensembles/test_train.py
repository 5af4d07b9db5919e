"""Training many networks: the same numbers as a plain torch loop, for every engine."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import SGD, data_order, outputs, record, train_ensemble
from biascope.ensembles.steppers import Training
from biascope.ensembles.work import Work
from biascope.support.errors import InputError, UnsupportedError


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )


def tasks(count: int, n: int = 50) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        x = torch.randn(n, 1, 6, 6, generator=rng, dtype=torch.float64)
        made.append((x, (x[:, 0, i % 6].sum(1) > 0).long()))
    return made


SETTINGS = {"epochs": 3, "batch_size": 16, "lr": 0.3, "momentum": 0.9, "weight_decay": 1e-2, "clip_norm": 0.5}


def plain(i: int, x: Tensor, y: Tensor) -> tuple[nn.Module, list[float]]:
    """The obvious loop, written from the docstring of `train` alone."""
    module = record(net).draw(5, i, i + 1, dtype=torch.float64).module(0).train()
    sgd = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-2)
    losses: list[float] = []
    total = 3 * 4
    for epoch in range(3):
        order = data_order(5, i, epoch, len(x))
        for a, b in pairwise([0, 16, 32, 48, 50]):
            sgd.param_groups[0]["lr"] = 0.3 * (1 - len(losses) / total)
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(module(x[order[a:b]]), y[order[a:b]])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            sgd.step()
            losses.append(loss.item())
    return module, losses


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("group", [None, 2])
def test_same_as_a_plain_loop(engine, group) -> None:  # type: ignore[no-untyped-def]
    data = tasks(3)
    done = train_ensemble(net, data, seed=5, dtype=torch.float64, engine=engine, together=group, **SETTINGS)
    assert done.engine == engine
    assert done.networks is not None
    total = 3 * 4
    assert SGD(**SETTINGS).rates(50)[1] == pytest.approx(0.3 * (1 - 1 / total))
    for i, (x, y) in enumerate(data):
        module, losses = plain(i, x, y)
        assert done.losses[i].tolist() == pytest.approx(losses, rel=1e-6)
        state = module.state_dict()
        for name, value in done.networks.one(i).items():
            assert torch.allclose(value.double(), state[name].double(), atol=1e-10), name
        guess = module.eval()(x).argmax(1)
        assert done.train_accuracy[i].item() == pytest.approx((guess == y).double().mean().item())


def test_engines_agree_without_extras_and_test_accuracy() -> None:
    data, held_out = tasks(4), tasks(4, 31)
    a, b = (
        train_ensemble(
            net,
            data,
            test=held_out,
            epochs=2,
            clip_norm=None,
            lr=0.1,
            seed=1,
            engine=engine,
            dtype=torch.float64,
            keep=True,
        )
        for engine in ("vmap", "loop")
    )
    assert torch.allclose(a.losses, b.losses, rtol=1e-6)
    assert torch.equal(a.test_accuracy, b.test_accuracy)
    assert a.networks is not None
    out = outputs(a.networks, torch.stack([x for x, _ in held_out]), per_network=True)
    expected = (out.argmax(-1) == torch.stack([y for _, y in held_out])).float().mean(1)
    assert torch.equal(a.test_accuracy, expected)


def test_auto_runs_and_learns() -> None:
    """Separable data, one direction each: every network must reach full accuracy, and tasks must not mix."""
    rng = torch.Generator().manual_seed(1)
    data = []
    for i in range(6):
        x = torch.randn(256, 8, generator=rng)
        data.append((x, (x[:, i] > 0).long()))
    done = train_ensemble(lambda: nets.build("mlp", in_features=8, hidden=(16,), outputs=2), data, epochs=30, seed=0)
    assert done.engine in ("vmap", "loop")
    assert done.train_accuracy.min() > 0.96
    assert done.losses[:, -1].max() < done.losses[:, 0].min()


def test_other_losses_and_lazy_tasks() -> None:
    class Lazy:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            x = torch.linspace(-1, 1, 20)[:, None]
            return x, (x[:, 0] > 0.1 * i).long()

    for engine in ("vmap", "loop"):
        done = train_ensemble(
            lambda: nn.Linear(1, 1),
            Lazy(),
            loss="bce",
            epochs=80,
            batch_size=20,
            clip_norm=None,
            lr=2.0,
            schedule="constant",
            engine=engine,
        )  # type: ignore[arg-type]
        assert done.train_accuracy.min() >= 0.9
    x = torch.linspace(-1, 1, 20)[:, None]
    line = train_ensemble(
        lambda: nn.Linear(1, 1),
        [(x, 2 * x + 1)],
        loss="mse",
        epochs=200,
        batch_size=20,
        clip_norm=None,
        lr=0.3,
        keep=True,
    )
    assert line.networks is not None
    assert line.networks.params["weight"].item() == pytest.approx(2.0, abs=0.05)
    assert line.train_accuracy.numel() == 0


def test_dropout_leaves_the_global_state_alone() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    factory = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))  # noqa: E731
    before = torch.get_rng_state()
    for engine in ("vmap", "loop"):
        a, b = (train_ensemble(factory, [(x, y)] * 2, epochs=2, batch_size=8, engine=engine) for _ in range(2))
        assert torch.equal(a.losses, b.losses)
    assert torch.equal(before, torch.get_rng_state())


def test_different_sizes_need_the_loop() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    ragged = [(x, y), (x[:9], y[:9])]
    with pytest.raises(InputError, match="one shape"):
        train_ensemble(lambda: nn.Linear(4, 2), ragged, engine="vmap")
    done = train_ensemble(lambda: nn.Linear(4, 2), ragged, engine="loop", epochs=1, batch_size=5)
    assert done.losses.isnan().sum() == 2


class Half(nn.Module):
    """One layer frozen, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(36, 4), nn.Linear(4, 2), nn.Linear(3, 3)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.flatten(1))))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_frozen_and_unused_parameters_stay(engine) -> None:  # type: ignore[no-untyped-def]
    before = record(Half).draw(5, 0, 3, dtype=torch.float64)
    assert set(before.params) == {"body.weight", "body.bias", "idle.weight", "idle.bias"}
    done = train_ensemble(Half, tasks(3), seed=5, dtype=torch.float64, engine=engine, **SETTINGS)
    assert done.networks is not None
    for i in range(3):
        old, new = before.module(i).state_dict(), done.networks.module(i).state_dict()
        changed = {name for name in old if not torch.equal(old[name], new[name])}
        assert changed == {"body.weight", "body.bias"}
    assert not done.networks.module(0).head.weight.requires_grad


@pytest.mark.parametrize("factory", [net, Half])
def test_the_step_that_graphs_capture_is_that_of_the_loop(factory) -> None:  # type: ignore[no-untyped-def]
    """Its body, run here without a graph."""
    data, sgd = tasks(1), SGD(**SETTINGS)
    work = Work(
        record(factory), data, sgd, nn.functional.cross_entropy, 5, torch.device("cpu"), torch.float64, "float32"
    )
    x, y = work.load(range(1))
    training = Training(work, work.start(range(1)).module(0), x[0], y[0])
    training.load(work.start(range(1)), 0, 0, x[0], y[0])
    for size in [16, 16, 16, 2] * 3:
        training.step(size)
    done = train_ensemble(factory, data, seed=5, dtype=torch.float64, engine="loop", **SETTINGS)
    assert done.networks is not None
    torch.testing.assert_close(training.history, done.losses[0], rtol=1e-6, atol=1e-6)  # kept in float32
    for name, value in done.networks.module(0).state_dict().items():
        torch.testing.assert_close(training.module.state_dict()[name], value, rtol=1e-11, atol=1e-12)


def test_refusals() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(InputError, match="Linear has no parameter with requires_grad"):
        train_ensemble(lambda: nn.Linear(3, 2).requires_grad_(False), [(x, y)])
    with pytest.raises(UnsupportedError, match="CUDA"):
        train_ensemble(lambda: nn.Linear(3, 2), [(x, y)], engine="graph")
    with pytest.raises(InputError, match="0 tasks and 0 test sets: give one each"):
        train_ensemble(lambda: nn.Linear(3, 2), [])
    with pytest.raises(InputError, match="loss"):
        train_ensemble(lambda: nn.Linear(3, 2), [(x, y)], loss="nll")
    with pytest.raises(InputError, match="a task has 4 inputs and 3 labels"):
        train_ensemble(lambda: nn.Linear(3, 2), [(x, y[:3])])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"lr": -0.1}, r"lr=-0\.1: a finite number above 0 is"),
        ({"momentum": 1.0}, r"momentum=1\.0 must be below 1,"),
        ({"clip_norm": 0.0}, r"momentum=0\.0 must be below 1,"),
        ({"x": torch.empty(0, 3), "y": torch.empty(0, dtype=torch.long)}, "a task has 0 inputs and 0 labels"),
        ({"x": torch.full((4, 3), torch.nan)}, "the inputs of a task, 0 to 0, hold NaN"),
        ({"y": torch.tensor([0, 1, 2, 0])}, "labels from 0 to 2, but the network has 2 outputs"),
        ({"y": torch.tensor([0, 1, -1, 0])}, "labels from -1 to 1"),
        (
            {"y": torch.zeros(4, dtype=torch.float64)},
            r"cross-entropy does not take outputs \[4, 2\] and labels \[4\] of",
        ),
        ({"y": torch.zeros(4, 3), "loss": "mse"}, r"mse does not take outputs \[4, 2\] and labels \[4, 3\]"),
        ({"x": torch.ones(4, 5)}, r"Linear\(in_features=3.*cannot take inputs \[n, 5\]"),
        ({"factory": TwoHeads}, "TwoHeads returned a dict: let it return"),
        ({"factory": nn.Linear}, "callable without arguments"),
        ({"factory": nn.Flatten}, "Flatten has no parameters"),
        ({"device": "cuda:0"}, "torch sees no CUDA device here"),
        ({"device": "gpu"}, "is not a torch device"),
    ],
)
def test_what_cannot_be_trained_is_named(changed, message) -> None:  # type: ignore[no-untyped-def]
    if changed.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    given = {"x": torch.ones(4, 3), "y": torch.tensor([0, 1, 1, 0]), "factory": lambda: nn.Linear(3, 2), **changed}
    factory, task = given.pop("factory"), (given.pop("x"), given.pop("y"))
    with pytest.raises(InputError, match=message):
        train_ensemble(factory, [task], **given)


def test_a_last_batch_of_one_example_is_found_before_training() -> None:
    factory = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
    x, y = torch.randn(7, 3), torch.zeros(7, dtype=torch.long)
    with pytest.raises(InputError, match=r"layer '1', BatchNorm1d\(4.*got \[n, 4\]"):
        train_ensemble(factory, [(x, y)], batch_size=3)
    assert train_ensemble(factory, [(x, y)], batch_size=4, epochs=1).losses.shape == (1, 2)


def test_ignored_labels_are_no_classes() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, -100, 1, -100])
    assert torch.isfinite(train_ensemble(lambda: nn.Linear(3, 2), [(x, y)], epochs=1).losses).all()


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_graph_engine_equals_the_loop(momentum) -> None:  # type: ignore[no-untyped-def]
    data = [(x.float().repeat(1, 1, 6, 6)[..., :32, :32], y) for x, y in tasks(2, 300)]
    factory = lambda: nets.build("resnet18", width=8, outputs=2)  # noqa: E731
    a, b = (
        train_ensemble(
            factory, data, epochs=1, lr=0.05, momentum=momentum, weight_decay=1e-3, device="cuda", engine=engine
        )
        for engine in ("graph", "loop")
    )
    assert torch.allclose(a.losses, b.losses, rtol=2e-2)
    assert a.networks is not None
    assert b.networks is not None
    for name, value in b.networks.buffers.items():
        assert torch.allclose(a.networks.buffers[name].float(), value.float(), rtol=5e-2, atol=5e-2), name
    low = train_ensemble(factory, data, epochs=1, lr=0.05, device="cuda", engine="graph", precision="bf16")
    assert (low.losses[:, 0] - a.losses[:, 0]).abs().max() < 0.05


@pytest.mark.gpu
def test_stacked_networks_equal_the_loop_on_a_gpu() -> None:
    """Captured steps, used again by a second group of networks, and a last batch that is not full."""
    data = tasks(4)
    a, b = (
        train_ensemble(net, data, seed=5, dtype=torch.float64, device="cuda", engine=engine, together=2, **SETTINGS)  # type: ignore[arg-type]
        for engine in ("vmap", "loop")
    )
    assert torch.allclose(a.losses, b.losses, rtol=1e-5)  # kept in float32
    assert a.networks is not None
    assert b.networks is not None
    mine = {**a.networks.params, **a.networks.buffers}
    for name, value in {**b.networks.params, **b.networks.buffers}.items():
        assert torch.allclose(mine[name].double(), value.double(), rtol=1e-8, atol=1e-10), name
