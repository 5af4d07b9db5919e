"""Which bins are trained on, transposed twins, comparisons without the luck of one training, the map's layout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.studies import Run, configure, execute
from biascope.studies.result import Estimate
from biascope.support.errors import InputError
from biascope_papers.nad import frequencies as f
from biascope_papers.nad.anisotropy import spread_indices


def test_counts_of_the_public_map() -> None:
    assert len(f.Grid(32, 1).basis(0)) == 514
    assert len(f.Grid(32, 1).basis(0, "im")) == 510
    assert len(f.Grid(32).basis(0)) == 130  # 16 x 16 cells, 4 of them their own conjugates
    assert len(f.Grid(32).basis(0, "im")) == 126
    vectors = f.Grid(16).basis(0).vectors.flatten(1)
    assert torch.allclose(vectors @ vectors.T, torch.eye(len(vectors), dtype=vectors.dtype), atol=1e-12)


def test_partners_are_transposes() -> None:
    basis = f.Grid(16).basis(0)
    partner = f.partners(basis)
    for i, j in enumerate(partner):
        if j >= 0:
            assert partner[j] == i
            assert torch.allclose(basis.vectors[j], basis.vectors[i].T, atol=1e-12)
        else:
            assert torch.allclose(basis.vectors[i], basis.vectors[i].T, atol=1e-12)


def test_samples_come_in_pairs() -> None:
    basis = f.Grid(32, 2, sample=12).basis(3)
    assert len(basis) == 12
    assert (f.partners(basis) >= 0).all()


@pytest.mark.parametrize("sample", [20, 40, 80])
@pytest.mark.parametrize("seed", range(6))
def test_samples_are_spread_over_the_map(sample: int, seed: int) -> None:
    """Both frequencies odd multiples of the stride, near DC and far from it: each kind to its share, whatever the seed.

    A random choice of 20 had no pair of two odd multiples with seed 0.
    """
    whole, basis = f.Grid(32).basis(0), f.Grid(32, 2, sample=sample).basis(seed)
    assert len(basis) == sample
    whole = whole.select(torch.as_tensor(f.partners(whole) >= 0).nonzero()[:, 0])
    both_odd, near = ((lambda b: (b.bins % 4 == 2).all(1)), (lambda b: b.frequencies.square().sum(1) <= 12.5**2))
    for kind in (both_odd, near):
        share = float(kind(whole).float().mean())
        assert abs(int(kind(basis).sum()) - share * sample) <= 4
    assert len(torch.unique(basis.bins, dim=0)) == sample


def test_gap_is_unbiased_where_single_bins_are_not() -> None:
    """Pure noise: best minus worst chosen by the bins themselves is large, chosen by their twins it is zero."""
    partner, rng = f.partners(f.Grid(16).basis(0)), np.random.default_rng(0)
    gaps, naive = [], []
    for _ in range(300):
        values = rng.normal(size=len(partner))
        found = f.replicated_gap(values, partner)
        assert found is not None
        gaps.append(found.value)
        order = np.sort(values)
        naive.append(order[-8:].mean() - order[:8].mean())
    assert np.mean(naive) > 2
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / np.sqrt(300)


def test_gap_of_a_planted_map() -> None:
    basis = f.Grid(16).basis(0)
    partner = f.partners(basis)
    values = np.where((basis.frequencies.abs().sum(1) <= 8).numpy(), 1.0, 0.5)
    found = f.replicated_gap(values, partner)
    assert found == Estimate(0.5, 0.0, 13)
    assert f.reliability(values, partner) == pytest.approx(1.0)
    assert (values[f.worst_by_partner(values, partner, share=0.25)] == 0.5).all()
    assert f.replicated_gap(values[:3], np.array([1, 0, -1])) is None


def test_map_layout() -> None:
    basis = f.Grid(8).basis(0)
    values = (100 * basis.frequencies[:, 0] + basis.frequencies[:, 1]).double().numpy()
    shown = f.heat_map("m", "t", values, basis, low=None, high=None)
    assert shown.x == shown.y == (-4.0, -2.0, 0.0, 2.0)
    place = basis.frequencies.tolist().index([0, 2])
    assert shown.z[2][3] == values[place]  # row: vertical 0, column: horizontal 2
    assert shown.z[2][1] == values[place]  # its conjugate (0, -2)
    assert shown.z[2][2] == 0.0  # DC in the centre
    gaps = f.heat_map("m", "t", np.ones(len(f.Grid(8, 1).basis(0, "im"))), f.Grid(8, 1).basis(0, "im"), "im")
    assert sum(np.isnan(cell) for row in gaps.z for cell in row) == 4


def test_indices() -> None:
    assert spread_indices(0, 7) == list(range(7))
    found = spread_indices(20, 1024)
    assert found[0] == 0
    assert found[-1] == 1023
    assert 12 <= len(found) <= 20
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("study", "options", "says"),
    [
        ("nad/fig1", {"stride": 0}, r"stride = 0, .*: the stride counts from 1"),
        ("nad/fig2", {"stride": -2}, r"stride = -2, "),
        ("nad/fig11", {"window": 17}, r"window = 17, .* from 1 to the 16 frequencies of a side"),
        ("nad/fig10", {"sample": -1}, r"sample = -1"),
        (
            "nad/fig10",
            {"image_size": 16, "stride": 8},
            r'stride = 8, window = 0: no bin of 16 x 16 pixels with an "im"',
        ),
        ("nad/fig12", {"stride": 0}, r"stride = 0, "),
        ("nad/fig12", {"count": 1}, r"count must be at least 2, not 1"),
    ],
)
def test_grids_without_a_bin_name_the_option(tmp_path: Path, study: str, options: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        execute(Run.create(tmp_path / "run", configure(study, "smoke", overrides=options)))


def test_strides_of_odd_sides_are_symmetric() -> None:
    basis = f.Grid(15).basis(0)
    assert (basis.frequencies % 2 == 0).all()
    partner, diagonal = f.partners(basis), (basis.frequencies[:, 0].abs() == basis.frequencies[:, 1].abs()).numpy()
    assert (partner[~diagonal] >= 0).all()  # each has its twin


def test_extremes_are_chosen_by_twins_and_their_error_is_that_of_repeats() -> None:
    """Forty pairs, four of them good in both: the gap is theirs; noise alone has none, however far its ends lie."""
    partner, rng = np.concatenate([np.arange(40, 80), np.arange(40)]), np.random.default_rng(0)
    truth = np.where(np.arange(40) < 4, 0.9, 0.5)
    noise = 0.01 * rng.normal(size=80)
    found, nothing = (f.extremes(values + noise, partner) for values in (np.tile(truth, 2), np.full(80, 0.5)))
    assert found is not None
    assert nothing is not None
    assert found.value == pytest.approx(0.4, abs=0.02)
    assert 0 < (found.standard_error or 0) < 0.02
    assert abs(nothing.value) < 0.02
    assert f.extremes(noise[:6], np.array([3, 4, 5, 0, 1, 2])) is None
