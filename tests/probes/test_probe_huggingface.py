"""The callback of the Hugging Face Trainer, with transformers itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from biascope.probes import LossGrid, View, metric

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from biascope.probes.huggingface import ProbeCallback  # noqa: E402

GEN = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 20, (16, 5), generator=GEN)
LABELS = (IDS[:, 0] > 9).long()
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[i], "attention_mask": INPUTS["attention_mask"][i], "labels": LABELS[i]}


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8, num_labels=2)
    return transformers.BertForSequenceClassification(config)


def fit(callback: ProbeCallback, tmp_path: Path, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **{"logging_steps": 1, **options},
    )
    net = model()
    trainer = transformers.Trainer(net, args, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    return trainer


@pytest.mark.slow
def test_records_of_a_trainer_run(tmp_path: Path) -> None:
    callback = ProbeCallback(
        INPUTS, LABELS, metrics=["ntk_alignment", "group_losses", "sign_similarity"], schedule=4, max_overhead=None
    )
    trainer = fit(callback, tmp_path)
    assert [(r.step, r.epoch) for r in callback.records] == [(0, 0.0), (4, 1.0), (8, 2.0)]
    last = callback.records[-1]
    start = View.of(model(), INPUTS, LABELS)
    end = View.of(trainer.model, INPUTS, LABELS, init=start)
    for key, value in metric("ntk_alignment")(end).items():
        assert last[key] == pytest.approx(value, rel=1e-4)
    quiet = trainer.model.eval()
    with torch.no_grad():
        expected = float(quiet(**INPUTS, labels=LABELS).loss)
    assert last["group_losses/all/loss"] == pytest.approx(expected, rel=1e-5)
    assert any("without dropout" in note for note in callback.probe.notes)


@pytest.mark.slow
def test_a_schedule_by_the_loss_goes_by_logged_losses(tmp_path: Path) -> None:
    callback = ProbeCallback(INPUTS, LABELS, metrics=["effective_rank"], schedule=LossGrid(0.8), max_overhead=None)
    trainer = fit(callback, tmp_path)
    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    seen = callback.records[1:]
    assert seen
    assert all(r.raw_loss == pytest.approx(logged[r.step]) for r in seen)
