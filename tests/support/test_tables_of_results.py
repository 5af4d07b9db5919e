"""Every result shows itself in a notebook: its numbers are there, and names are escaped."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import biascope as bs
from biascope import linalg, nets, probes, spectral, studies
from biascope.curvature import Plan as CurvaturePlan
from biascope.data import Dataset
from biascope.kernels import LabelAlignment
from biascope.kernels.regression import KernelFit
from biascope.network.jacobian import Coverage, CoverageRow
from biascope.reports import ledger, summary
from biascope.studies import Chart, HeatMap, Series
from biascope.support.tables import number, several
from tables_reader import Reader, network

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_several_numbers() -> None:
    assert several([1.0, 2.5]) == "1, 2.5"
    assert several(torch.arange(7.0)) == "0, 1, 2, 3, 4, ..."


def test_coverage_shows_the_fallback_first() -> None:
    rows = [CoverageRow(f"<w{i}>", (2, 3), "layer rule", "Linear") for i in range(40)]
    found = Coverage((*rows, CoverageRow("<odd>", (7,), "autograd fallback", "a & b")))
    read = Reader(found._repr_html_())
    assert any(cell.startswith("41 parameters, 1 by the autograd fallback") for cell in read.cells)
    assert {"<odd>", "[7]", "a & b", "<w39>"} <= set(read.cells)
    assert "4 parameters, 0 by the autograd fallback" in Reader(bs.Jacobian(network(), X).coverage()._repr_html_())


def test_spectrum_and_eigenpairs() -> None:
    values = torch.linalg.eigvalsh(bs.ntk(network(), X).matrix()).flip(0)
    read = Reader(bs.ntk(network(), X).eigh()._repr_html_())
    assert several(values) in read
    assert "12 of 12" in read
    metric = Reader(bs.metric_eigenpairs(network(), X, 3)._repr_html_())
    assert several(values[:3] / 6) in metric
    assert "50" in metric


def test_label_alignment_by_layer() -> None:
    y = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = bs.label_alignment(network(), X, y, by_layer=True)
    read = Reader(found._repr_html_())
    assert number(found.value, found.standard_error) in read
    assert all(number(part.value, part.standard_error) in read for part in found.layers.values())
    parts = {"<a&b>": found}
    assert "<a&b>" in Reader(LabelAlignment(**{**vars(found), "layers": parts})._repr_html_())


def test_regression_and_norm() -> None:
    K, y = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64)), torch.tensor([2.0, 3.0], dtype=torch.float64)
    fit = bs.kernel_regression(K, y, ridge=1.0)
    assert isinstance(fit, KernelFit)
    # y_j (1 / (lambda_j + 1)) is left, lambda / (lambda + 1) degrees of freedom each
    read = Reader(fit._repr_html_())
    assert {number((0.4**2 + 1.5**2) ** 0.5), number(0.8 + 0.5), "2.5", "Kernel regression on 2 examples"} <= set(
        read.cells
    )
    assert {number(10**0.5), "10"} <= set(Reader(bs.rkhs_norm(K, y)._repr_html_()).cells)  # 4 / 4 + 9
    curve = Reader(bs.gradient_flow(K, y, [0.0, 1.0])._repr_html_())
    assert {"6.5", number(float(2 * torch.exp(torch.tensor(-8.0)) + 4.5 * torch.exp(torch.tensor(-2.0))))} <= set(
        curve.cells
    )


def test_sketch_and_plan() -> None:
    sketch = bs.sketched_ntk(network(), X, dim=64, seed=5)
    read = Reader(sketch._repr_html_())
    assert {"6", "64", "5", "50", f"{sketch.kernel().error:.2g}"} <= set(read.cells)
    plan = bs.ntk(network(), X).plan
    assert plan is not None
    shown = Reader(plan._repr_html_())
    assert any(cell.startswith("6 x 6 examples") for cell in shown.cells)
    assert any("0.weight" in cell for cell in shown.cells)


def test_plans_of_curvature_and_ensembles() -> None:
    plan = bs.fisher(network(), X, "kfac").plan
    read = Reader(plan._repr_html_())
    assert {"parameter", "shape", "representation", "why", "0.weight", "linear rule"} <= set(read.cells)
    assert read.cells.count("kfac") == 4
    odd = Reader(CurvaturePlan("<mixed>", (("<w>", (2, 3), "dense", "a & b"),))._repr_html_())
    assert {"<mixed>: 1 parameters", "<w>", "[2, 3]", "a & b"} <= set(odd.cells)
    many = CurvaturePlan("diagonal", tuple((f"w{i}", (1,), "diagonal", "diagonal") for i in range(40)))
    assert {"w0", "w39"} <= set(Reader(many._repr_html_()).cells)


def test_equal_progress() -> None:
    runs = [
        [probes.Record(i, 1.0 / (i + 1), values={"<v>": 0.5 * i + shift}) for i in range(5)] for shift in (0.0, 0.25)
    ]
    read = Reader(probes.equal_progress(*runs, thresholds=[0.5, 0.01])._repr_html_())
    assert {"threshold", "<v>_a", "<v>_b", "0.5", "0.75"} <= set(read.cells)
    assert "Equal progress by loss: 1 thresholds, 1 missed" in read


def test_data_and_networks() -> None:
    held = Dataset(torch.zeros(4, 2), torch.arange(4), "<toy>", 3, {"b&": 1}, torch.tensor([0, 0, 1, 1]))
    assert {"<toy>", "4", "[4, 2] torch.float32", "3", "2", "b&"} <= set(Reader(held._repr_html_()).cells)
    assert "groups" not in Reader(Dataset(torch.zeros(4, 2), torch.arange(4), "toy")._repr_html_())
    shown = Reader(nets.info("lenet-avg")._repr_html_())
    assert {"lenet-avg", "1 x 32 x 32"} <= set(shown.cells)
    assert any("pool='avg'" in cell for cell in shown.cells)


def test_estimates() -> None:
    one = linalg.trace.SampledEstimate(torch.tensor(0.91234), torch.tensor(0.0123), 7, 9, 0)
    assert {"0.912 ± 0.012", "7", "9"} <= set(Reader(one._repr_html_()).cells)
    many = linalg.trace.SampledEstimate(torch.arange(7.0), torch.full((7,), torch.nan), 1, 1, 0)
    assert "0, 1, 2, 3, 4, ..." in Reader(many._repr_html_())
    assert "2.00 ± 0.58 (n = 3)" in Reader(studies.Estimate.of([1.0, 2.0, 3.0])._repr_html_())


def test_spectral_results() -> None:
    decay = spectral.decay.Decay(-2.0312, 0.012, torch.tensor([30.0, 3000.0]), torch.ones(2))
    assert {"-2.031 ± 0.012", "30 to 3000"} <= set(Reader(decay._repr_html_()).cells)
    assert {"1.5", "2.5", "9"} <= set(Reader(spectral.decay.LipschitzBounds(1.5, 2.5, 9.0)._repr_html_()).cells)
    basis = spectral.rbf_eigenbasis(torch.linspace(0, 1, 8)[:, None], 0.25)
    assert {several(basis.values), "8", "0.25"} <= set(Reader(basis._repr_html_()).cells)
    hat = spectral.Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, -1.0])
    assert {"2", "0", "1", "3"} <= set(Reader(hat._repr_html_()).cells)
    square = torch.tensor([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]])
    plane = spectral.regions.Polygons((square, square / 2), torch.ones(2, 1, 2), torch.ones(2, 1))
    assert {"2", "5", "4"} <= set(Reader(plane._repr_html_()).cells)
    yes = torch.tensor([True, True, False])
    paths = spectral.paths.Paths(
        torch.zeros(3, 5, 2), torch.tensor([1.5, 2.0, 2.5]), torch.rand(3), torch.rand(3), yes, ~yes
    )
    assert {"3 paths of 5 pivots", "2.00 ± 0.29", "2", "1"} <= set(Reader(paths._repr_html_()).cells)
    left = spectral.perturb.Robustness(
        torch.tensor([0.5]), (1, 30), torch.tensor([[0.25, 0.75]]), torch.tensor([[0.05, 0.02]]), 9, 0
    )
    assert {"0.5", "1", "30", "0.250 ± 0.050", "0.750 ± 0.020"} <= set(Reader(left._repr_html_()).cells)
    volume = spectral.perturb.HighFrequencyVolume(torch.tensor([4]), torch.tensor([0.5]), torch.tensor([0.125]), 64, 0)
    assert {"Volume of 64 samples", "4", "0.50 ± 0.12"} <= set(Reader(volume._repr_html_()).cells)


def charts() -> tuple[Chart, HeatMap]:
    line = Series.of("<run>", [0, 1, 2], [0.125, 3.625, 2.0], [0.1, 0.2, 0.3])
    curve = Chart(
        "c", "A < B & C", "step", "loss", (line, Series.of("other", [0], [1])), alt='it "rises"', caption="<i>"
    )
    cells = HeatMap.of(
        "m", "<map>", x=[0, 1], y=[5], z=[[0.375, None]], x_label="kx", y_label="ky", z_label="z<", alt="two"
    )
    return curve, cells


@pytest.mark.parametrize("chart", charts(), ids=["curve", "map"])
def test_charts_are_drawn_with_their_numbers(chart: Chart | HeatMap, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = chart._repr_html_()
    assert "var(--" not in shown  # a notebook does not have the style of the pages
    assert shown.count("<svg") == 1
    body = Reader(shown[shown.index("<details>") : shown.index("</details>")] + "</details>")
    assert ("3.625" if isinstance(chart, Chart) else "0.375") in body
    assert chart.title in body
    assert "<run>" not in shown
    assert "<map>" not in shown
    assert "<i>" not in shown
    assert 'aria-label="it &quot;rises&quot;"' in shown or isinstance(chart, HeatMap)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    alone = chart._repr_html_()
    assert "<svg" not in alone
    assert ("3.625" if isinstance(chart, Chart) else "0.375") in Reader(alone)


def test_two_charts_in_one_notebook_share_no_ids() -> None:

    one, two = (set(re.findall(r'\bid="([^"]+)"', chart._repr_html_())) for chart in charts())
    assert one
    assert two
    assert not one & two


def test_ledger(tmp_path: Path) -> None:
    rows = ledger(tmp_path)
    shown = rows._repr_html_()
    assert isinstance(rows, tuple)
    assert summary(rows) in shown
    assert "Neural anisotropy directions" in shown


def test_showing_leaves_the_random_state_alone() -> None:
    net: nn.Module = network()
    before = torch.get_rng_state()
    bs.Jacobian(net, X).coverage()._repr_html_()
    bs.sketched_ntk(net, X, dim=8)._repr_html_()
    assert torch.equal(torch.get_rng_state(), before)


ROOMS = (
    "kernels",
    "curvature",
    "geometry",
    "ensembles",
    "linalg",
    "tangent",
    "spectral",
    "editing",
    "fields",
    "reports",
)


@pytest.mark.parametrize("room", ROOMS)
def test_results_with_tensors_print_in_one_line(room: str) -> None:
    """torch prints every entry: a fit of a thousand examples would fill the screen, and its few numbers be lost."""
    rooms = importlib.import_module(f"biascope.{room}")
    results = [c for c in vars(rooms).values() if inspect.isclass(c) and dataclasses.is_dataclass(c)]
    shown = {
        c: [f for f in dataclasses.fields(c) if f.repr and re.search(r"\bTensor|ndarray", str(f.type))] for c in results
    }
    torchs = [c.__name__ for c, tensors in shown.items() if tensors and hasattr(c.__repr__, "__wrapped__")]
    assert torchs == []  # whose repr is the one that dataclasses make


def test_one_line() -> None:
    spectrum = bs.ntk(network(), X, outputs="trace").eigh(3)
    said = repr(spectrum)
    assert "\n" not in said
    assert said.startswith(f"Spectrum(values=[{spectrum.values[0]:.4g}, ")
    assert "vectors=tensor [6, 3]" in said
    assert repr(linalg.trace.SampledEstimate(torch.tensor(2.0), torch.tensor(0.5), 3, 3, 0)) == (
        "SampledEstimate(value=2, standard_error=0.5, n=3, matvecs=3, seed=0)"
    )
    fit = repr(bs.kernel_regression(X @ X.T, X[:, 0], ridge=1.0))
    assert "test=None" in fit
    assert "... 6 in all]" in fit
