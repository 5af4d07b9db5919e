"""Networks side by side: overlaps against closed forms, a page that is sound, refusals in words."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.errors import InputError
from biascope.reports import make_compare
from biascope.reports.compare import corrected, overlap, overlap_matrix, unique


def test_overlap_of_rotated_planes() -> None:
    """Two planes in four dimensions that share one axis and are turned by phi in the other: (1 + cos^2 phi) / 2."""
    eye = torch.eye(4, dtype=torch.float64)
    for phi in (0.0, 0.3, 1.2):
        c, s = np.cos(phi), np.sin(phi)
        other = torch.stack([eye[0], c * eye[1] + s * eye[2]])
        assert overlap(eye[:2], other) == pytest.approx((1 + c * c) / 2)
        mixed = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64)).Q @ other  # another basis of the same span
        assert overlap(eye[:2], mixed) == pytest.approx((1 + c * c) / 2)


def test_unrelated_spans_overlap_by_k_over_d() -> None:
    rng = torch.Generator().manual_seed(0)
    spans = [torch.linalg.qr(torch.randn(64, 8, generator=rng, dtype=torch.float64)).Q.T for _ in range(40)]
    matrix = overlap_matrix([(spans[2 * i], spans[2 * i + 1]) for i in range(20)])
    assert matrix.mean() == pytest.approx(8 / 64, abs=0.01)


def test_correction_for_noisy_spans() -> None:
    """Halves of one noisy span, and of two: correlations fall by the reliability, the correction takes that back."""
    matrix = np.array([[0.2, np.sqrt(0.2 * 0.8) * 0.5], [np.sqrt(0.2 * 0.8) * 0.5, 0.8]])
    assert np.allclose(corrected(matrix, 0.0), [[1, 0.5], [0.5, 1]])
    unknown = corrected(np.array([[0.05, 0.05], [0.05, 0.8]]), 0.05)
    assert np.isnan(unknown[0]).all()
    assert unknown[1, 1] == 1


def test_a_comparison_page(tmp_path: Path, check_page: Callable[[str], None]) -> None:
    before = torch.get_rng_state()
    made = make_compare(["lenet-avg", "lenet-avg", "logreg"], (1, 16, 16), tmp_path / "c.html", networks=32)
    assert torch.equal(torch.get_rng_state(), before)
    page = made.path.read_text()
    check_page(page)
    assert "lenet-avg (2)" in page
    assert made.overlaps[0, 1] == pytest.approx(made.overlaps[0, 0])  # the same seed: the same networks
    assert made.overlaps[0, 0] > 3 * made.overlaps[0, 2]
    assert np.allclose(made.overlaps, made.overlaps.T)
    check_page(made._repr_html_())
    assert f"<td>{made.overlaps[0, 0]:.2f}</td>" in made._repr_html_()
    assert "most alike are lenet-avg (2) and lenet-avg: overlap" in made.meaning
    assert "100% of what one span would show" in made.meaning
    assert "For logreg two halves" in made.meaning


def test_refusals() -> None:
    with pytest.raises(InputError, match="two or more networks"):
        make_compare(["lenet"])
    with pytest.raises(InputError, match="did you mean lenet"):
        make_compare(["lenet", "lenat"])
    assert unique(["a", "a", "b"]) == ["a", "a (2)", "b"]
