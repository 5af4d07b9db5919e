"""Given weights against initialisations: only what exceeds their spread is called a change."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.reports.panels import labels, tangent_kernel
from biascope.reports.panels.base import Subject, make_subject
from biascope.reports.panels.initialisations import COUNTS, Spread
from biascope.reports.panels.labels import Alignment, Start
from biascope.reports.panels.pace import Pace
from biascope.reports.panels.tangent_kernel import KernelFacts
from biascope.support.seeds import derive


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 6, 3, 2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)),
    )


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random images with random labels."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    np.savez(path, x=rng.normal(size=(128, 1, 12, 12)).astype("float32"), y=rng.integers(0, 2, 128))
    return str(path)


def with_weights(noise: str, seed: int, folder: Path) -> Subject:
    torch.manual_seed(derive(seed, "weights"))
    torch.save(network().state_dict(), folder / "w.pt")
    made = make_subject(network, (1, 12, 12), data=noise, weights=folder / "w.pt")
    made._shared["pace"] = Pace(1e-5, 1e-5, 1e-5)
    return made


def test_untrained_weights_and_random_labels_show_no_turn(noise: str, tmp_path: Path) -> None:
    """Against one initialisation most of them would: the error of the probes leaves out how networks differ."""
    turned = []
    for seed in range(5):
        made = with_weights(noise, seed, tmp_path)
        meaning = labels.panel(made).meaning
        assert "over 8 initialisations" in meaning
        turned.append("turned" in meaning)
        assert turned[-1] or "within the spread of initialisations: no turn of the kernel is seen" in meaning
    assert sum(turned) <= 1  # each with a chance of 1 in 20


def test_a_kernel_that_is_turned_is_still_said_to_be(tmp_path: Path) -> None:
    """Training on labels that can be learned turns the kernel towards them, beyond any initialisation."""

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=y.numpy())
    torch.manual_seed(0)
    net = mlp()
    adam = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(100):
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    made = make_subject(mlp, (4,), data=str(tmp_path / "d.npz"), weights=tmp_path / "w.pt")
    made._shared["pace"] = Pace(1e-4, 1e-4, 1e-4)
    assert "the kernel is turned towards the labels of these examples, most in" in labels.panel(made).meaning


def spread_start(whole: Spread, layers: dict[str, Spread]) -> Start:
    """Without chance, so that alignments are scores."""
    zero = Spread(0.0, 0.0, whole.count)
    return Start(whole, zero, whole, layers, dict.fromkeys(layers, zero), layers)


def test_a_layer_that_turns_alone_is_named() -> None:
    """The whole kernel within the spread does not mean that nothing turned; one of many layers may be out by chance."""
    start = spread_start(Spread(0.012, 0.002, 8), {f"layer {i}": Spread(0.01, 0.002, 8) for i in range(20)})

    def given(value: float) -> Alignment:
        return Alignment(
            0.013, 0.0, {name: Alignment(0.01, 0.0) for name in start.layers} | {"layer 7": Alignment(value, 0.0)}
        )

    said = labels._meaning(start, given(0.07))
    assert said.endswith("no turn of the kernel is seen as a whole; layer 7 by itself is beyond it (0.010 to 0.070).")
    assert labels._meaning(start, given(0.016)).endswith("no turn of the kernel is seen.")  # 3 deviations, of 20
    assert start.layers["layer 7"].side(0.016) == 1
    assert start.layers["layer 7"].side(0.016, among=20) == 0


def test_the_mean_is_over_networks_that_the_subject_builds(noise: str) -> None:
    made = make_subject(network, (1, 12, 12), data=noise)
    made._shared["pace"] = Pace(1e-4, 1e-4, 1e-4)
    n, count = labels.sizes(made)
    assert count == 8
    assert made.data is not None
    values = [bs.ntk(made.build(i), made.inputs(n), outputs="trace").alignment(made.data.y[:n]) for i in range(count)]
    said = labels.panel(made).meaning
    digits = max(0, 1 - math.floor(math.log10(np.std(values, ddof=1))))
    assert f"is {np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f} over 8 initialisations" in said


def test_a_slow_network_has_fewer_initialisations_and_one_claims_nothing(noise: str, tmp_path: Path) -> None:
    made = with_weights(noise, 0, tmp_path)
    counts = set()
    for pace in (1e-2, 0.5, 1.0):
        made._shared["pace"] = Pace(pace, pace, pace)
        counts.add(labels.sizes(made)[1])
    assert counts == set(COUNTS)
    part = Spread.of([0.2])
    text = labels._meaning(spread_start(part, {"a": part}), Alignment(0.9, 0.0, {"a": Alignment(0.9, 0.0)}))
    assert "so nothing is said about a change" in text
    assert "turned" not in text


def facts(rank: float, trace: float) -> KernelFacts:
    return KernelFacts(np.array([trace]), rank, {"a": 1.0})


@pytest.mark.parametrize(
    ("rank", "trace", "words"),
    [
        (4.1, 11.0, "both within the spread of initialisations"),
        (9.0, 11.0, "the kernel is broader, beyond the spread of initialisations; its trace is within their spread"),
        (1.0, 500.0, "the kernel is narrower and larger, beyond the spread of initialisations"),
        (4.0, 0.1, "the kernel is smaller, beyond the spread of initialisations; its rank is within"),
    ],
)
def test_rank_and_trace_are_compared_with_the_spread(rank: float, trace: float, words: str) -> None:
    starts = [facts(4 + 0.2 * i, 10 + i) for i in range(-2, 3)]
    assert words in tangent_kernel._change(starts, facts(rank, trace))
    assert "no change is claimed" in tangent_kernel._change(starts[:1], facts(rank, trace))
    assert tangent_kernel._change(starts, None) == ""


def test_the_kernel_panel_draws_several_initialisations(noise: str, tmp_path: Path) -> None:
    assert "over 8 initialisations" in tangent_kernel.panel(with_weights(noise, 3, tmp_path)).meaning


def test_one_more_draw_is_beyond_in_one_of_twenty() -> None:
    rng = np.random.default_rng(1)
    draws = rng.normal(2.0, 0.3, size=(2000, 9))
    beyond = [Spread.of(row[:8].tolist()).side(float(row[8])) for row in draws]
    assert np.mean(np.abs(beyond)) == pytest.approx(0.05, abs=0.015)
    same = Spread.of([0.25] * 8)
    assert (same.side(0.25 * (1 + 1e-6)), same.side(0.26), same.side(0.24)) == (0, 1, -1)
    assert Spread.of([1.0, math.nan, 3.0]) == Spread.of([1.0, 3.0])
    assert "nan" in str(Spread.of([math.nan]))
