"""The NAD studies on images at smoke size (digits as a stand-in), and what they are made of."""

from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.data import info
from biascope.data.images import carriers, nad_flip, poison
from biascope.studies import Run, StudyResult, configure, execute
from biascope_papers.nad.anisotropy import spread_indices
from biascope_papers.nad.cifar import against_clean
from biascope_papers.nad.directional import architecture
from biascope_papers.nad.images import Setting, image_set, train_on_images
from claim_outcome import outcome


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
    assert str(Setting("digits", n=100)) == "100 training images of 8 x 8 digits as a stand-in for CIFAR-10"
    assert str(Setting("digits", n=10**6)) == str(Setting("digits"))
    assert str(Setting()) == "50000 training images of CIFAR-10"
    assert len(images.test_y) == info("digits").n_test


def test_the_flip_and_the_mean_do_not_commute(tmp_path: Path) -> None:
    """Flipped before normalising, every image has one and the same picture m (F 1 - 1) / s added to it."""
    images = image_set(Run.create(tmp_path / "run", {"study": "nad/fig8", "seed": 0}), "digits", 32)
    U = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0].T
    x, mean, std = images.x.double(), images.mean.double().view(3, 1, 1), images.std.double().view(3, 1, 1)
    before, after = (nad_flip(x, U) - mean) / std, nad_flip((x - mean) / std, U)
    one = torch.ones(1, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(before - after, mean * (nad_flip(one, U) - one) / std, atol=1e-10)
    assert float((before - after).abs().max()) > 0.1


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
    setting = Setting(epochs=5)
    (found,) = train_on_images(run, ["a"], factory, lambda _: (x, images.y), lambda _: tests, setting)
    assert found["right"] > 0.8
    assert found["shifted"] < 0.2
    assert found["train"] > 0.9

    def fail(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("trained again")

    assert train_on_images(run, ["a"], factory, fail, lambda _: tests, setting) == [found]


def test_networks_trained_together_have_their_own_data_and_tests(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"study": "nad/fig7", "seed": 0})
    images, factory = image_set(run, "digits", 400), architecture("logreg", 16, 3, 10)
    x, test, setting = images.normalised(images.x), images.normalised(images.test_x), Setting(epochs=5)

    def data(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x, (images.y + i) % 10

    def tests(i: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"right": (test, (images.test_y + i) % 10), "other": (test, (images.test_y + 5) % 10)}

    found = train_on_images(run, ["a", "b"], factory, data, tests, setting)
    assert [row["right"] > 0.8 > 0.2 > row["other"] for row in found] == [True, True]
    assert train_on_images(run, ["b", "a"], factory, data, tests, setting) == found[::-1]  # stored by name
    assert train_on_images(run, ["c"], factory, data, tests, setting) != found[:1]  # another name, another start
    other = Run.create(tmp_path / "other", {"study": "nad/fig7", "seed": 0})
    (again,) = train_on_images(other, ["a"], factory, data, tests, setting)
    assert again == pytest.approx(found[0], abs=0.01)  # as if trained alone, but for rounding


def judged(tmp_path: Path, name: str, stored: dict[str, dict[str, float]], **overrides: object) -> StudyResult:
    """A run on CIFAR-10 whose networks are all trained: neither images nor directions are needed to judge it."""
    run = Run.create(tmp_path / f"run {len(list(tmp_path.iterdir()))}", configure(name, "paper", overrides=overrides))
    for key, values in stored.items():
        run.cached(key, lambda values=values: values)  # type: ignore[misc]
    return execute(run)


def test_parts_of_the_poisoning_claim(tmp_path: Path) -> None:
    indices = spread_indices(8, 1023)
    accuracy = dict(zip(indices, np.linspace(0.2, 0.88, len(indices))))

    def verdict(clean: float, **changed: float) -> str:
        own = {**accuracy, **{int(name[1:]): value for name, value in changed.items()}}
        stored = {f"carrier {i}": {"train": 1.0, "test": float(value)} for i, value in own.items()}
        numbers = judged(tmp_path, "nad/fig7", {"clean": {"train": 1.0, "test": clean}, **stored}, count=8).numbers
        return " ".join(outcome(f"nad/7, {which} carriers", numbers) for which in ("first", "last"))

    assert verdict(0.88) == "holds holds"
    assert verdict(0.95) == "holds fails"  # the last carrier costs 0.07
    assert verdict(0.88, _0=0.5) == "fails holds"  # the first one leaves more than half
    assert verdict(0.4) == "gate gate"  # nothing is learnt without a carrier
    ruined, spared = against_clean(0.8, 0.2, 0.8, 100)
    assert (ruined.value, spared.value) == pytest.approx((-0.2, 0.0))
    errors = np.sqrt([(0.16 + 0.16 / 4) / 100, 0.32 / 100])
    assert [ruined.standard_error, spared.standard_error] == pytest.approx(errors)


def test_flipped_images_must_be_learnt_where_original_ones_are(tmp_path: Path) -> None:
    def verdict(original: float, flipped: float) -> str:
        stored = {
            "lenet original 0": {"train": original, "test": 0.8},
            "lenet flipped 0": {"train": flipped, "test": 0.5},
        }
        numbers = judged(tmp_path, "nad/fig8", stored, nets="lenet").numbers
        assert outcome("nad/8, accuracy", numbers, "lenet") == "holds"
        return outcome("nad/8, training error", numbers, "lenet")

    assert verdict(1.0, 0.99) == "holds"
    assert verdict(1.0, 0.94) == "fails"
    assert verdict(0.94, 1.0) == "gate"


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
    assert outcome("nad/8, training error", result.numbers, "lenet") != "holds"  # so short a training fits neither


@pytest.mark.slow
def test_lenet_switches_from_the_channel_to_the_images(tmp_path: Path) -> None:
    _, result = start(tmp_path, "nad/underspecification", count=4)
    numbers = {name: value.value for name, value in result.numbers.items()}
    assert numbers["accuracy by D(v) alone, first index, lenet"] > 0.9
    assert numbers["accuracy by D(v) alone, last index, lenet"] < 0.6
    assert (
        numbers["accuracy by images alone, last index, lenet"] > numbers["accuracy by images alone, first index, lenet"]
    )
