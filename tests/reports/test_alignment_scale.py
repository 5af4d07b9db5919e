"""Alignment on the card stands between chance and a ceiling that it can reach; sentences agree with pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.reports.card import SENTENCES, summary
from biascope.reports.panels import directional, labels
from biascope.reports.panels.base import Panel, Subject, make_subject
from biascope.reports.panels.examples import Examples
from biascope.reports.panels.input_geometry import InputSpectrum, frequencies
from biascope.reports.panels.stability import found_again


def classes(n: int, c: int) -> torch.Tensor:
    return nn.functional.one_hot(torch.arange(n) % c, c).double()


def test_chance_is_the_mean_over_shuffled_labels() -> None:
    g = torch.Generator().manual_seed(0)
    F, Y = torch.randn(40, 5, generator=g, dtype=torch.float64), classes(40, 4)
    shuffled = [labels.aligned(F @ F.T, Y[torch.randperm(40, generator=g)]).value for _ in range(4000)]
    found = labels.aligned(F @ F.T, Y)
    error = float(np.std(shuffled) / np.sqrt(len(shuffled)))
    assert found.chance == pytest.approx(float(np.mean(shuffled)), abs=4 * error)
    assert found.chance > 0.05  # far from 0, which a reader would take it for


@pytest.mark.parametrize("c", [2, 3, 10])
def test_the_ceilings_are_reached_by_the_kernel_of_the_labels(c: int) -> None:
    """1 for the trace kernel; 1 / sqrt(c (c - 1)) for the full kernel whose outputs are alike."""
    Y = classes(20 * c, c)
    Z = Y - Y.mean(0)
    best = labels.aligned(Z @ Z.T, Y)
    assert best.value == pytest.approx(1.0)
    assert best.score == pytest.approx(1.0)
    full = torch.kron(torch.eye(c, dtype=torch.float64), Z @ Z.T)
    v = Z.mT.reshape(-1)
    assert labels.full_ceiling(Y) == pytest.approx(float(v @ full @ v / (full.norm() * v @ v)))
    assert labels.full_ceiling(Y) == pytest.approx(1 / np.sqrt(c * (c - 1)))


def test_the_trace_of_many_outputs_is_estimated_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 40)), torch.randn(24, 6)
    made = Subject("many", lambda _: net, (6,), data=Examples("xy", x, torch.arange(24) % 40))
    assert labels.kernel_name(made) == "trace over 40 outputs, from 16 random combinations, centred"
    exact = bs.ntk(net, x, outputs="trace")
    assert labels.measure(made, net).value == pytest.approx(exact.alignment(labels.targets(made, 24)), rel=0.2)
    monkeypatch.setattr(labels, "MOST_OUTPUTS", 4000)
    many = bs.ntk(labels.Combined(net, 40, 0), x, outputs="trace").tensor
    assert float((many - exact.tensor).norm() / exact.tensor.norm()) < 0.05


def test_a_network_that_has_learned_the_labels_is_not_turned_away_from_them(tmp_path: Path) -> None:
    """Judged where 1 can be reached, and against shuffled labels."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 6)
        )

    g = torch.Generator().manual_seed(0)
    y = torch.arange(96) % 6
    x = torch.randn(6, 8, generator=g)[y] + 0.7 * torch.randn(96, 8, generator=g)
    torch.manual_seed(1)
    net = build()
    adam = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(150):
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    assert bool((net(x).argmax(1) == y).all())
    torch.save(net.state_dict(), tmp_path / "w.pt")
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=y.numpy())
    made = make_subject(build, (8,), data=str(tmp_path / "d.npz"), weights=tmp_path / "w.pt")
    panel = labels.panel(made)
    assert "turned towards the labels" in panel.meaning
    assert "1 is the ceiling" in panel.meaning
    assert "chance" in panel.headline


def waves(*columns: int) -> np.ndarray:
    """Cosines of these frequencies along the columns of an 8 x 8 picture, [k, 64]."""
    rows = [np.tile(np.cos(2 * np.pi * k * np.arange(8) / 8), (8, 1)).reshape(-1) for k in columns]
    return np.stack([row / np.linalg.norm(row) for row in rows])


def test_the_sentence_on_frequencies_is_about_the_direction_that_is_shown() -> None:
    """The first is constant and stands out; the many weak ones of high frequency do not decide."""
    subject = Subject("waves", lambda _: nn.Identity(), (1, 8, 8))
    vectors = waves(0, 3, 4)
    values = np.array([30.0, 2.2, 2.1])
    words, text = frequencies(subject, InputSpectrum(values, vectors, 100_000, 64), 3)
    assert words == "the mean brightness"
    assert "The first is the mean brightness (100% of its energy is constant" in text
    assert "hold low ones" in text
    words, text = frequencies(subject, InputSpectrum(values[:1], waves(4), 100_000, 64), 1)
    assert words == "high frequencies"
    assert "all" not in text


def test_what_other_networks_share_is_found_again_and_noise_is_not() -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 100, generator=g, dtype=torch.float64)
    shared = noise + 6 * torch.randn(400, 1, generator=g) * torch.eye(100)[0]
    length, chance = found_again(shared, 3)
    assert length[0] > 0.95
    assert length[1] < 0.5
    assert chance[0] == pytest.approx(np.sqrt(2 / 100))
    pure = np.mean([found_again(torch.randn(400, 100, generator=g), 1)[0][0] for _ in range(40)])
    assert pure == pytest.approx(chance[0], abs=0.05)


def test_the_summary_has_three_sentences_with_their_panels() -> None:
    made = [Panel(f"Own {i}", "", "", headline=f"own {i}.") for i in range(3)]
    made += [Panel("Anatomy", "", ""), Panel("What it learns", "", "", headline="It learns.")]
    found = summary(made)
    assert [str(sentence) for sentence in found] == ["It learns.", "own 0.", "own 1."]
    assert len(found) == SENTENCES
    assert [sentence.anchor for sentence in found] == ["what-it-learns", "own-0", "own-1"]


def test_one_network_has_its_alignment_without_a_change() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    made = Subject("one", lambda _: net, (5,), data=Examples("xy", x, y), single=True)
    panel = labels.panel(made)
    want = bs.ntk(net, x, outputs="trace").alignment(y)
    assert f"with the labels is {want:.2f}, where chance gives" in panel.headline
    assert "turn" not in panel.meaning


def test_trainings_that_learned_nothing_are_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_subject("logreg", (1, 4, 4), networks=16)
    for accuracy, quoted in ((0.5, False), (0.9, True)):
        monkeypatch.setattr(
            directional, "train", lambda subject, v, effort, a=accuracy: torch.full((len(v), effort.seeds), a)
        )
        assert bool(directional.panel(made).headline) == quoted
