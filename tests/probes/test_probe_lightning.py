"""The Lightning callback, with Lightning itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from biascope.probes import LossGrid, Probe
from probes.probe_zoo import batch, mlp

lightning = pytest.importorskip("lightning")
from biascope.probes.lightning import ProbeCallback  # noqa: E402

X, Y = batch(24)
X = X.float()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 8, 2).float()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def fit(callback: ProbeCallback, tmp_path: Path, epochs: int = 3, **options: Any) -> Module:
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=False))
    return module


def test_a_loader_or_arrays_are_taken_as_the_probe_takes_them(tmp_path: Path) -> None:
    given = DataLoader(TensorDataset(X, Y), batch_size=6)
    options: dict[str, Any] = {"network": "net", "metrics": ["label_alignment"], "schedule": 6, "max_overhead": None}
    runs = [(X, Y), (given,), (X.numpy(), Y.numpy())]
    found = []
    for k, args in enumerate(runs):
        torch.manual_seed(0)
        callback = ProbeCallback(*args, **options)
        fit(callback, tmp_path / str(k), epochs=1)
        found.append([r["label_alignment"] for r in callback.records])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_records_of_a_lightning_run(tmp_path: Path) -> None:
    callback = ProbeCallback(X, Y, network="net", metrics=["ntk_alignment"], schedule=4, max_overhead=None)
    module = fit(callback, tmp_path)
    assert [(r.step, r.epoch) for r in callback.records] == [(0, 0.0), (4, 1.0), (8, 2.0), (12, 3.0)]
    assert [r.loss for r in callback.records[1:]] == pytest.approx([module.losses[i] for i in (3, 7, 11)])

    net = mlp(3, 8, 2).float()  # the same training by hand
    probe = Probe(net, X, Y, ["ntk_alignment"], schedule=4, max_overhead=None)
    sgd = torch.optim.SGD(net.parameters(), lr=0.3)
    for s in range(12):
        i = slice(6 * (s % 4), 6 * (s % 4) + 6)
        loss = F.cross_entropy(net(X[i]), Y[i])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        probe.step(loss)
    expected = [r["ntk_alignment"] for r in probe.records]
    assert [r["ntk_alignment"] for r in callback.records] == pytest.approx(expected, rel=1e-6)


def test_the_module_itself_by_epochs_with_files(tmp_path: Path) -> None:
    callback = ProbeCallback(
        X, Y, metrics=["sign_similarity"], schedule="epochs", max_overhead=None, out=tmp_path / "probe"
    )
    fit(callback, tmp_path, epochs=2)
    assert [r.step for r in callback.records] == [0, 4, 8]
    assert len((tmp_path / "probe" / "records.jsonl").read_text().splitlines()) == 4


def test_accumulated_gradients_count_as_one_step(tmp_path: Path) -> None:
    callback = ProbeCallback(X, Y, metrics=["effective_rank"], schedule=1, max_overhead=None)
    module = fit(callback, tmp_path, epochs=1, accumulate_grad_batches=2)
    assert [r.step for r in callback.records] == [0, 1, 2]
    assert callback.records[1].loss == pytest.approx(module.losses[1])


def test_by_loss_and_training_is_not_changed(tmp_path: Path) -> None:
    callback = ProbeCallback(X, Y, metrics=["effective_rank"], schedule=LossGrid(0.9), max_overhead=None)
    probed = fit(callback, tmp_path)
    plain = fit(ProbeCallback(X, Y, metrics=["effective_rank"], schedule=10**9), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(probed.parameters(), plain.parameters()))
    assert all(r.loss <= r.threshold * (1 + 1e-8) for r in callback.records[1:] if r.threshold)
    assert len(callback.records) > 2


def test_part_of_the_module(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="body"):
        fit(ProbeCallback(X, Y, network="body"), tmp_path)
    callback = ProbeCallback(X, Y, network=lambda m: m.net, metrics=["effective_rank"])
    fit(callback, tmp_path, epochs=1)
    assert isinstance(callback.probe.model, nn.Sequential)
