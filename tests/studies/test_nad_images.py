"""The NAD studies on images at smoke size (digits as a stand-in), and what they are made of."""

from pathlib import Path

import pytest
import torch

from biascope.data.images import carriers, nad_flip, poison
from biascope.studies import Run, StudyResult, configure, execute
from biascope.studies.nad.directional import architecture
from biascope.studies.nad.images import ImageProtocol, image_set, train_on_images


def start(tmp_path: Path, name: str, **overrides: object) -> tuple[Run, StudyResult]:
    run = Run.create(tmp_path / "run", configure(name, "smoke", seed=1, overrides=overrides))
    return run, execute(run)


def test_images(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"study": "nad/fig7", "seed": 0})
    images = image_set(run, "digits", 100)
    assert images.x.shape == (100, 3, 16, 16)
    assert torch.equal(images.x[:, 0, ::2, ::2], images.x[:, 2, 1::2, 1::2])  # every pixel doubled, channels equal
    assert float(images.x.min()) >= 0
    assert float(images.x.max()) <= 1
    x = images.normalised(images.x)
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3)) - 1).abs().max() < 1e-3
    assert "stand-in" in images.note


def test_poison_and_flip_keep_their_promises(tmp_path: Path) -> None:
    images = image_set(Run.create(tmp_path / "run", {"study": "nad/fig7", "seed": 0}), "digits", 64)
    U = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))[0].T.contiguous()
    x = poison(images.x, images.y, U.view(256, 16, 16), 5, eps=0.05, rule="code")
    for image, label, old in zip(x, images.y, images.x):
        offset, channel, sign = carriers(10, 3, "code")[int(label)]
        assert float(image[channel].flatten() @ U[5 + offset]) == pytest.approx(0.05 * sign, abs=1e-5)
        change = (image - old).flatten(1)
        assert torch.linalg.matrix_rank(change, atol=1e-4) <= 1
    flipped = nad_flip(images.x, U)
    assert torch.allclose(nad_flip(flipped, U), images.x, atol=1e-4)
    assert torch.allclose(flipped.norm(), images.x.norm(), rtol=1e-5)


def test_training_scores_every_test_set_and_is_stored(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"study": "nad/fig7", "seed": 0})
    images, factory = image_set(run, "digits", 400), architecture("logreg", 16, 3, 10)
    x, test = images.normalised(images.x), images.normalised(images.test_x)
    tests = {"right": (test, images.test_y), "shifted": (test, (images.test_y + 1) % 10)}
    protocol = ImageProtocol(epochs=5)
    found = train_on_images(run, "a", factory, lambda: (x, images.y), lambda: tests, protocol)
    assert found["right"] > 0.8
    assert found["shifted"] < 0.2
    assert found["train"] > 0.9

    def fail() -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("trained again")

    assert train_on_images(run, "a", factory, fail, lambda: tests, protocol) == found


@pytest.mark.slow
def test_early_carriers_poison(tmp_path: Path) -> None:
    run, result = start(tmp_path, "nad/fig7", count=4)
    first, last = (result.numbers[f"clean accuracy, {which} carrier"].value for which in ("first", "last"))
    assert last > first + 0.15, result.measured
    assert run.load_arrays("sweep")["indices"].tolist()[-1] == 254  # the last pair of directions


@pytest.mark.slow
def test_flip_runs(tmp_path: Path) -> None:
    _, result = start(tmp_path, "nad/fig8", seeds=2, epochs=6)
    lost = result.numbers["test accuracy lost by the flip, lenet"]
    assert lost.n == 2
    assert lost.value > 0
    assert result.verdict == "not confirmed"  # so short a training does not reach 95 % training accuracy


@pytest.mark.slow
def test_lenet_switches_from_the_channel_to_the_images(tmp_path: Path) -> None:
    _, result = start(tmp_path, "nad/underspecification", count=4)
    numbers = {name: value.value for name, value in result.numbers.items()}
    assert numbers["accuracy by D(v) alone, first index, lenet"] > 0.9
    assert numbers["accuracy by D(v) alone, last index, lenet"] < 0.6
    assert (
        numbers["accuracy by images alone, last index, lenet"] > numbers["accuracy by images alone, first index, lenet"]
    )
