"""The first two studies, end to end at smoke size; their verdicts rest on numbers checked here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from biascope import nets
from biascope.geometry.pooling import box_prefilter, pooling_bayes_accuracy, transfer
from biascope.studies import Run, configure, execute
from biascope.support.errors import InputError
from claim_outcome import outcome


def start(tmp_path: Path, name: str, **overrides: object) -> Run:
    return Run.create(tmp_path / "run", configure(name, "smoke", seed=1, overrides=overrides))


def test_fig4a_at_the_papers_setting(tmp_path: Path) -> None:
    result = execute(start(tmp_path, "nad/fig4a", D=128))
    assert outcome("nad/4a", result.numbers) == "holds"
    exact, real, printed = (np.array(series.y) for series in result.figures[0].series)
    assert exact[[5, 10, 20, 32, 48]] == pytest.approx([0.8823, 0.7091, 0.5743, 0.5, 0.5501], abs=6e-5)
    assert printed[[5, 10, 20]] == pytest.approx([0.9533, 0.7820, 0.6045], abs=6e-5)
    assert real[7] == pytest.approx(pooling_bayes_accuracy(box_prefilter(4, 128), 4, 7), abs=1e-12)
    assert result.numbers["largest error of the corrected closed form"].value < 1e-10


def test_fig4b_smoke(tmp_path: Path) -> None:
    run = start(tmp_path, "nad/fig4b")
    result = execute(run)
    assert outcome("nad/4b", result.numbers) == "holds", result.measured
    order = result.numbers["Spearman(zeta, loss averaged over seeds)"]
    assert order.n == 16
    assert order.standard_error is not None
    assert order.value < -0.9
    assert len(run.arrays()) == 16


def test_fig4b_resumes_with_the_same_bits(tmp_path: Path) -> None:
    small = {"D": 16, "seeds": 3, "steps": 10, "frequencies": 3}
    whole = execute(start(tmp_path / "a", "nad/fig4b", **small))
    run = start(tmp_path / "b", "nad/fig4b", **small)
    execute(run)
    (run.path / "arrays" / "seed 1.safetensors").unlink()  # as if it had been killed there
    assert execute(Run.resume(run.path)) == whole


def test_fig4b_cannot_learn_what_the_filter_removes(tmp_path: Path) -> None:
    """Where the filter is zero no step can bring the loss below 1; at DC the floor is sigma^2/(eps^2+sigma^2)."""
    result = execute(start(tmp_path, "nad/fig4b", D=32, seeds=4, steps=400, frequencies=3))
    final = {series.label.split(",")[0]: series.y[-1] for series in result.figures[0].series}
    assert final["l = 8"] > 0.95
    assert 0.08 < final["l = 0"] < 0.3


def test_both_rooms_mean_the_same_filter() -> None:
    """The network holds the magnitudes of the transfer function that the theory uses."""
    magnitudes = torch.tensor(np.abs(transfer(box_prefilter(4, 128))), dtype=torch.float32)
    assert torch.allclose(nets.linear_pooling.box_prefilter(128, 4), magnitudes, atol=1e-6)


@pytest.mark.parametrize(("D", "S"), [(6, 3), (64, 64), (64, 32), (7, 2)])
def test_fig4a_refuses_factors_that_leave_no_frequency(tmp_path: Path, D: int, S: int) -> None:
    with pytest.raises(InputError, match=f"D = {D}, S = {S}: S must divide D"):
        execute(start(tmp_path, "nad/fig4a", D=D, S=S))


def test_fig4a_with_few_frequencies(tmp_path: Path) -> None:
    assert execute(start(tmp_path, "nad/fig4a", D=12, S=4)).numbers["accuracy at DC"].value == pytest.approx(1.0)


def test_printed_formulas(tmp_path: Path) -> None:
    """Forms and directions are right, constants are not; what stands in their place agrees with sampled networks."""
    result = execute(start(tmp_path, "nad/theory", draws=4000))
    for name in ("Lemma 1", "Eq. 4", "Eq. 5", "Example 2", "Example 3", "Example 4"):
        assert result.numbers[f"{name}: sampled over exact"].value == pytest.approx(1.0, abs=0.05), name
    assert result.numbers["Lemma 1: exact over printed"].value == pytest.approx(1 / 4)
    assert result.numbers["Theorem 1, S = 4: largest error of the printed formula, real signals"].value > 0.08
    assert outcome("nad/theorem 1", result.numbers) == "fails"
    assert outcome("nad/lemma 2", result.numbers) == "fails"
