"""Equal progress: interpolation, pairing by seed, and the constructions the groups come from."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from biascope.support import derive
from biascope_papers.lazy.comparison import (
    LOWEST,
    at_progress,
    curve_series,
    estimate,
    loss_left,
    lowest_alignment,
    not_linear,
    paired_differences,
    shared_levels,
)
from biascope_papers.lazy.difficulty import DecileTask
from biascope_papers.lazy.label_noise import GAP, NoiseTask, accuracies, clean_loss, compared, memorisation_begins
from biascope_papers.lazy.setup import load, network, standardised
from biascope_papers.lazy.spurious import SpuriousTask
from biascope_papers.lazy.training import Trajectory
from claim_outcome import outcome


def trajectory(names: tuple[str, ...], losses: Tensor, kernel: float = 1.0) -> Trajectory:
    steps = torch.arange(len(losses))
    linearity = torch.tensor([[1.0, 1.0, 1.0], [1.0, kernel, 1.0]]).double()
    return Trajectory(names, steps, losses[:, 0], losses.double(), losses * 0, steps[[0, -1]], linearity)


def run_of(f: "torch.Tensor", speed: float) -> Trajectory:
    """Progress falls from 2 to 0.5 at some speed, and the other group is a function f of progress."""
    clean = 2 - 1.5 * torch.linspace(0, 1, 12, dtype=torch.float64) ** speed
    return trajectory(("clean", "noisy", "test"), torch.stack([clean, f(clean), clean], 1))  # type: ignore[operator]


def test_a_curve_is_read_where_it_first_gets_to_a_level() -> None:
    progress = torch.tensor([4.0, 2.0, 3.0, 1.0])
    values = torch.stack([progress * 10, torch.arange(4.0)], 1)
    found = at_progress(progress, values, torch.tensor([4.0, 3.0, 2.0, 1.5, 0.5, 5.0]))
    assert found[:4, 0].tolist() == [40, 30, 20, 15]
    assert found[:4, 1].tolist() == pytest.approx([0, 0.5, 1, 2])  # the bump back to 3 is no progress
    assert bool(found[4:].isnan().all())
    assert shared_levels([torch.tensor([2.0, 0.0]), torch.tensor([3.0, 1.0])], 3).tolist() == [2.0, 1.5, 1.0]  # type: ignore[union-attr]


def test_pairs_do_not_depend_on_speed() -> None:
    """Two runs with noisy = clean + 1 and 2 clean, at very different speeds: the gap is that of the functions."""
    one, other = run_of(lambda p: p + 1, 1.0), run_of(lambda p: 2 * p, 3.0)  # type: ignore[arg-type]
    gaps = paired_differences([one], [other], lambda t: t.losses("clean"), lambda t: t.losses("noisy"))
    levels = torch.linspace(2, 0.5, 40)
    assert float(gaps) == pytest.approx(float((levels + 1 - 2 * levels).mean()), abs=1e-6)
    several = paired_differences([one], [other], lambda t: t.losses("clean"), lambda t: t.loss)
    assert several.shape == (1, 3)
    assert float(several[0, 1]) == pytest.approx(float(gaps))


def test_runs_without_shared_progress_give_no_row() -> None:
    one = trajectory(("clean", "noisy"), torch.tensor([[3.0, 1.0], [2.0, 1.0]]))
    other = trajectory(("clean", "noisy"), torch.tensor([[1.0, 1.0], [0.5, 1.0]]))
    assert shared_levels([one.losses("clean"), other.losses("clean")]) is None
    gaps = paired_differences([one], [other], lambda t: t.losses("clean"), lambda t: t.losses("noisy"))
    assert len(gaps) == 0
    assert math.isnan(estimate(gaps).value)
    assert curve_series("x", [one, other], lambda t: t.losses("clean"), lambda t: t.losses("noisy")).x == ()


def noisy_run(height: float, test_best: float, turns: bool, wiggle: float) -> Trajectory:
    """Noisy loss rises by `height` until clean loss 1, then falls; test loss is lowest in the middle or at the end."""
    clean = torch.linspace(2, 0.1, 40, dtype=torch.float64)
    noisy = 2 + height * torch.where(clean > 1, 2 - clean, clean) + wiggle
    test = (test_best + (clean - 0.8).abs()) if turns else test_best + clean
    return trajectory(("clean", "noisy", "test"), torch.stack([clean, noisy, test], 1))


@pytest.mark.parametrize(
    ("height", "best", "turns", "loss", "test"),
    [
        (2.0, 0.5, True, "holds", "holds"),
        (2.0, 1.5, True, "holds", "fails"),  # noisy labels later, but the best test loss is worse
        (0.5, 0.5, True, "fails", "holds"),
        (2.0, 0.5, False, "holds", "open"),  # test loss still falling: its best is not known
    ],
)
def test_the_two_claims_on_noise(height: float, best: float, turns: bool, loss: str, test: str) -> None:
    hasty = [noisy_run(height, best, turns, w) for w in (0.0, 0.01, -0.01)]
    lazy = [noisy_run(1.0, 1.0, turns, w) for w in (0.005, 0.0, 0.0)]
    hasty = [replace(t, loss=t.loss + shift) for t, shift in zip(hasty, (0.0, 1e-3, -1e-3))]
    assert judged(hasty, lazy) == (loss, test)
    assert memorisation_begins(hasty[0]) == pytest.approx(1.0, abs=0.05)
    assert set(judged(hasty[:1], lazy[:1])) == {"open"}
    moved = [replace(t, linearity=t.linearity * 0.8) for t in lazy]
    assert judged(hasty, moved) == ("gate", "gate")  # those were no lazy runs
    barely = [replace(t, loss=t.loss[:2], steps=t.steps[:2], accuracy=t.accuracy[:2]) for t in lazy]
    assert loss_left({"lazy": barely}, clean_loss)["share of the loss left, lazy"].value > 0.7
    assert judged(hasty, barely) == ("gate", "gate")  # and those hardly learned
    least = accuracies({"hasty": hasty, "lazy": lazy})[f"{GAP}, lowest of the seeds"]
    assert (least.value > 0) == (loss == "holds")


def judged(hasty: list[Trajectory], lazy: list[Trajectory]) -> tuple[str, str]:
    runs = {"hasty": hasty, "lazy": lazy}
    numbers = compared(runs) | loss_left(runs, clean_loss)
    return outcome("linearization/5.2b", numbers), outcome("linearization/5.2b, best test loss", numbers)


def test_staying_linear_is_about_the_tangent_kernel() -> None:
    losses = torch.ones(3, 1)
    both = [trajectory(("a",), losses, 0.95), trajectory(("a",), losses, 0.8)]
    assert lowest_alignment(both)[LOWEST].value == pytest.approx(0.8)
    assert lowest_alignment(both[:1])[LOWEST].value == pytest.approx(0.95)
    assert not_linear("alpha = 100", [trajectory(("a",), losses, 0.95)]) == ""
    assert not_linear("alpha = 100", [trajectory(("a",), losses, 0.8)]) == " alpha = 100 did not stay linear."


def test_of_what_was_not_measured_nobody_knows_whether_it_stayed_linear() -> None:
    known = trajectory(("a",), torch.ones(3, 1), 0.95)
    unknown = replace(known, linearity_probes=known.linearity_probes[:0], linearity=known.linearity[:0])
    assert lowest_alignment([unknown]) == lowest_alignment([known, unknown]) == {}
    assert "was not measured (lin=0)" in not_linear("alpha = 100", [known, unknown])


def test_noise_task_has_wrong_labels_only_in_the_noisy_group() -> None:
    examples, watched = NoiseTask("digits", n=400, watched=1000).data(5, "cpu")
    clean, _ = standardised("digits", 400, 0, derive(5, "examples"), "cpu")
    wrong = examples.y != clean.y
    assert int(wrong.sum()) == 60
    assert torch.equal(wrong.long(), examples.group)
    assert watched.names == ("clean", "noisy", "test")
    assert torch.bincount(watched.group).tolist() == [340, 60, 360]
    assert torch.equal(watched.x[watched.group == 1], examples.x[wrong])
    assert abs(float(examples.x.mean())) < 1e-4


def test_a_result_says_how_its_network_differs_from_the_published_one() -> None:
    for task in (NoiseTask, DecileTask):
        assert str(task("cifar10", 500, net="resnet18-nobn", width=16, init="he")) == (
            "resnet18-nobn of width 16 with He initialisation on 500 examples of cifar10"
        )
        assert str(task("cifar10", 500, net="resnet18-nobn")) == "resnet18-nobn on 500 examples of cifar10"


@pytest.mark.parametrize("kind", ["colour", "patch"])
def test_spurious_groups_are_balanced_and_carry_what_they_say(kind: str) -> None:
    examples, watched = SpuriousTask("digits", 600, kind=kind, agreement=0.9, per_cell=12).data(2, "cpu")  # type: ignore[arg-type]
    assert examples.group is not None
    assert float(examples.group.double().mean()) == pytest.approx(0.1, abs=0.01)
    counts = torch.bincount(watched.group)
    assert counts.tolist() == [24] * 4
    for g, agrees in ((0, True), (1, False), (2, True), (3, False)):
        own, y = watched.x[watched.group == g], watched.y[watched.group == g]
        assert int(y.sum()) == 12
        if kind == "colour":
            attribute = (own[:, 1].amax((1, 2)) > -1).long()  # green is 1
        else:
            attribute = (own[:, 0, :3, -3:] == 1).flatten(1).all(1).long()
        assert bool(((attribute == y) == agrees).all())


def test_networks_have_no_batch_norm_and_depend_on_the_seed_alone() -> None:
    x = load("digits32", "test").x[:2]
    assert x.shape[1:] == (1, 32, 32)
    for name in ("lenet", "resnet18-nobn", "vgg11-nobn"):
        nets = [network(name, x, 10, 4, 2, "torch", seed) for seed in (0, 0, 1)]
        assert nets[0](x).shape == (2, 10)
        assert not any(isinstance(m, (torch.nn.BatchNorm2d, torch.nn.Dropout)) for m in nets[0].modules())
        weights = [next(n.parameters()) for n in nets]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
