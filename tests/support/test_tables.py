"""Tables for notebooks: well formed, escaped, short, and with the numbers that matter."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.ensembles import train_ensemble
from biascope.geometry import AverageGeometry, NADs
from biascope.kernels import Kernel
from biascope.linalg import FromFunction
from biascope.probes import Record
from biascope.support.estimate import mean
from biascope.support.tables import MAX_ROWS, facts, grid, number
from tables_reader import Reader, network


def test_the_reader_refuses_bad_markup() -> None:
    for bad in ("<table><tr></table>", "<td>", "a", "</td>"):
        with pytest.raises(AssertionError):
            Reader(bad)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.91234, 0.0123, "0.912 ± 0.012"),
        (1234.6, 321.0, "1235 ± 321"),
        (3e9, 2e8, "3e+09 ± 2e+08"),
        (12.5, 3.2, "12.5 ± 3.2"),
        (1.0, 0.0, "1 ± 0"),
        (2.5, None, "2.5"),
        (2.5, float("nan"), "2.5"),
        (3e-9, 2e-10, "3e-09 ± 2e-10"),
        (float("inf"), 1.0, "inf ± 1.0"),
    ],
)
def test_numbers_are_rounded_to_their_error(value: float, error: float | None, text: str) -> None:
    assert number(value, error) == text


def test_a_mean_has_the_standard_error() -> None:
    samples = torch.tensor([0.2, 0.5, 0.9, 0.4], dtype=torch.float64)
    assert mean(samples.tolist()) == number(float(samples.mean()), float(samples.std() / 2))
    assert mean([0.25]) == "0.25"


def test_texts_are_escaped() -> None:
    for made in (facts("<b>&", {"<i>": "a<td>\"'"}), grid("<b>&", ["<i>"], [["a<td>\"'"]])):
        read = Reader(made)
        assert {"<b>&", "<i>", "a<td>\"'"} <= set(read.cells)


def test_a_long_grid_keeps_first_and_last() -> None:
    read = Reader(grid("t", ["step"], [[i] for i in range(1000)]))
    assert "0" in read
    assert "999" in read
    assert "t (12 of 1000 rows)" in read
    assert sum(cell.isdigit() for cell in read.cells) == MAX_ROWS
    assert len(Reader(grid("t", ["step"], [[i] for i in range(MAX_ROWS)])).cells) == 6 + 2 * MAX_ROWS


def test_kernel() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    K = bs.ntk(network(), x)
    read = Reader(K._repr_html_())
    values = torch.linalg.eigvalsh(K.matrix()).flip(0)
    p = values / values.sum()
    assert number(float(values.sum())) in read
    assert ", ".join(number(float(v)) for v in values[:5]) in read
    assert number(float(torch.exp(-(p * p.clamp_min(1e-300).log()).sum()))) in read
    assert "per-output" in Reader(K.centered()._repr_html_())
    rectangle = Reader(bs.ntk(network(), x, x[:2])._repr_html_())
    assert "6 x 2" in rectangle
    assert "trace" not in rectangle


def test_a_long_kernel_prints_no_matrix_and_no_spectrum() -> None:
    short, long = (Kernel(torch.eye(n), "trace", "trace", True)._repr_html_() for n in (512, 2000))
    assert "2000" in Reader(long)  # the trace
    assert "512" in Reader(short)
    assert "effective rank" in Reader(short)
    assert "effective rank" not in Reader(long)
    assert max(len(short), len(long)) < 1000
    broken = torch.eye(3).index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan))
    assert "effective rank" not in Reader(Kernel(broken, "trace", "trace", True)._repr_html_())
    assert "trace" in Reader(Kernel(torch.eye(3).expand(2, 3, 3), "diagonal", "diagonal", True)._repr_html_())


def test_nads() -> None:
    directions = torch.eye(8).reshape(8, 2, 2, 2)
    values, errors = torch.tensor([4.0, 2.0, *[0.5] * 6]), torch.full((8,), 0.25)
    found = NADs(directions, values, errors, 10.0, 300, 0, "autograd", 0.0, stability=((150, 0.5), (300, 0.875)))
    read = Reader(found._repr_html_())
    assert {"300", "10", "0.875", "4.00 ± 0.25", "40.00%", "2.00 ± 0.25", "20.00%"} <= set(read.cells)
    assert sum("±" in cell for cell in read.cells) == 5
    assert repr(found) == (
        "NADs(8 directions of inputs [2, 2, 2] by autograd, 300 networks, head sampled, seed 0: eigenvalues "
        "4.00 ± 0.25, 2.00 ± 0.25, 0.50 ± 0.25, ..., trace 10, overlap of the first 10 between halves of the "
        "networks at the same input: 0.875)"
    )


def test_average_geometry() -> None:
    G = bs.average_geometry(lambda: nn.Linear(3, 1), (3,), n_networks=50)
    read = Reader(G._repr_html_())
    assert number(float(G.matrix.trace())) in read
    assert f"{G.relative_error:.2g}" in read
    assert ", ".join(number(float(v)) for v in torch.linalg.eigvalsh(G.matrix).flip(0)) in read
    free = FromFunction(lambda X: X, (9000, 9000), torch.float32, torch.device("cpu"), symmetric=True)
    assert "not formed" in AverageGeometry(free, None, (9000,), 5, 1, 0, float("nan"))._repr_html_()
    assert "nan" not in AverageGeometry(free, None, (9000,), 5, 1, 0, float("nan"))._repr_html_()


@pytest.mark.parametrize("representation", ["dense", "ekfac", "diagonal", "lowrank", "implicit", "mixed"])
def test_metrics(representation: str) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    F = bs.fisher(network(), x, representation)
    read = Reader(F._repr_html_())
    assert "50 x 50" in read
    if representation == "implicit":
        assert "trace" not in read
    elif representation in ("dense", "ekfac", "diagonal", "mixed"):
        assert number(float(bs.fisher(network(), x, "dense").to_dense().trace())) in read
    assert "n" in read
    assert "6" in read


def test_trained_ensemble() -> None:
    g = torch.Generator().manual_seed(0)
    tasks = [(torch.randn(20, 3, generator=g), torch.randint(2, (20,), generator=g)) for _ in range(3)]
    done = train_ensemble(lambda: nn.Linear(3, 2), tasks, test=tasks, epochs=2, batch_size=10, engine="loop")
    read = Reader(done._repr_html_())
    losses = done.losses[:, -1]
    assert number(float(losses.mean()), float(losses.std() / 3**0.5)) in read
    assert number(float(done.test_accuracy.mean()), float(done.test_accuracy.std() / 3**0.5)) in read
    assert {"3", "4", "kept"} <= set(read.cells)


def test_records_and_probe() -> None:
    read = Reader(
        Record(7, 0.25, values={"effective_rank": 3.5, "cka<": 0.125}, failed={"x": "no labels"})._repr_html_()
    )
    assert {"Step 7", "0.25", "3.5", "cka<", "0.125", "no value: no labels"} <= set(read.cells)
    assert "to keep the overhead cap" in Reader(Record(3, skipped=True)._repr_html_())

    net, x = network(), torch.randn(5, 3, dtype=torch.float64)
    probe = bs.Probe(net, x, metrics=["effective_rank", "parameter_distance"], schedule=1, max_overhead=None)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
        probe.step(loss)
    seen = Reader(probe._repr_html_())
    first, last = probe.records[0], probe.finish()[-1]
    assert {"step", "loss", *first.values} <= set(seen.cells)
    assert all(number(value) in seen for value in last.values.values())
    assert number(float(loss.detach())) in seen
    assert "nan" not in seen  # there is no loss at step 0
    assert len(seen.cells) < 100


def test_printed_tables_cut_no_name() -> None:
    """Names of transformers are longer than the columns once were, and two of them could read the same."""
    name = "encoder_of_the_first_half_attention_block_with_a_long_name"
    net = nn.Sequential()
    net.add_module(name, nn.Linear(3, 4))
    net.add_module("recurrent", Last(4))
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    told = [
        str(bs.ntk(net, x, outputs="trace").plan),
        str(bs.Jacobian(net, x).coverage()),
        str(bs.fisher(net, x, representation="diagonal", likelihood="gaussian").plan),
    ]
    for table in told:
        assert name + ".weight" in table
    assert "which has no layer rule" in told[0]


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.GRU(size, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0][:, -1]
        return out
