"""The Kernel object itself: layouts, normalisation, PCA, files, pictures, refusals."""

from pathlib import Path

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.kernels import Kernel
from biascope.support.errors import CorruptError, InputError, UnsupportedError


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(7, 4)


def test_layouts_agree(net: nn.Module, x: torch.Tensor) -> None:
    full = bs.ntk(net, x, precision="float64")
    assert full.n == (7, 7)
    assert torch.equal(full.matrix(), full.tensor.reshape(21, 21))
    assert full.numpy().shape == (7, 3, 7, 3)
    assert full.trace() == pytest.approx(float(full.matrix().trace()))
    assert full.frobenius_norm() == pytest.approx(float(full.matrix().norm()))
    diagonal = bs.ntk(net, x, outputs="diagonal", precision="float64")
    assert diagonal.trace() == pytest.approx(full.trace())
    with pytest.raises(UnsupportedError, match=r"K\.tensor\[i\]"):
        diagonal.matrix()


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal"])
def test_normalised_kernels_have_unit_diagonal(net: nn.Module, x: torch.Tensor, outputs: str) -> None:
    K = bs.ntk(net, x, outputs=outputs, precision="float64").normalized()
    matrices = K.tensor if outputs == "diagonal" else K.matrix()[None]
    for M in matrices:
        torch.testing.assert_close(M.diagonal(), torch.ones(len(M), dtype=torch.float64))
        assert float(M.abs().max()) <= 1 + 1e-12


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal"])
def test_cosines_do_not_depend_on_the_scale(net: nn.Module, x: torch.Tensor, outputs: str, scale: float) -> None:
    """In float32 the product of two diagonal entries leaves the range long before its root does."""
    exact = bs.ntk(net, x, outputs=outputs, precision="float64")
    K = Kernel((exact.values * scale).float(), exact.outputs, exact.mode, True).normalized()
    torch.testing.assert_close(K.tensor.double(), exact.normalized().tensor, rtol=1e-5, atol=1e-6)


def test_pca_reproduces_the_centred_kernel(net: nn.Module, x: torch.Tensor) -> None:
    K = bs.ntk(net, x, outputs="trace", precision="float64")
    coordinates = K.pca(7)
    torch.testing.assert_close(coordinates @ coordinates.T, K.centered().tensor, rtol=1e-9, atol=1e-9)
    assert float(coordinates.mean(0).abs().max()) < 1e-9


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", 1])
def test_files(net: nn.Module, x: torch.Tensor, outputs: str | int, tmp_path: Path) -> None:
    K = bs.ntk(net, x, outputs=outputs, check=True)
    K.save(tmp_path / "k.safetensors")
    again = Kernel.load(tmp_path / "k.safetensors")
    assert torch.equal(again.tensor, K.tensor)
    assert (again.outputs, again.mode, again.symmetric, again.error) == (K.outputs, K.mode, K.symmetric, K.error)
    with pytest.raises(UnsupportedError, match="take by_layer"):
        again.by_layer()


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(CorruptError, match="not a kernel saved by biascope"):
        Kernel.load(tmp_path / "other.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(CorruptError, match="torn"):
        Kernel.load(tmp_path / "torn.safetensors")


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal"])
def test_pictures(net: nn.Module, x: torch.Tensor, outputs: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    K = bs.ntk(net, x, outputs=outputs)
    figure = K.plot()
    assert figure.axes[0].get_xlabel().startswith("example")
    assert figure.axes[0].get_xlim() == (-0.5, len(x) - 0.5)  # examples, not rows
    if outputs != "diagonal":
        assert any("eigenvalue" in ax.get_ylabel() for ax in figure.axes)
        assert "index" in K.eigh(3).plot().axes[0].get_xlabel()
    own, ax = plt.subplots()
    assert bs.ntk(net, x, x[:2], outputs=outputs).plot(ax) is own
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 1.5), (len(x) - 0.5, -0.5))
    plt.close("all")


def test_a_partial_spectrum_says_nothing_of_the_whole(net: nn.Module, x: torch.Tensor) -> None:
    K = bs.ntk(net, x, outputs="trace", precision="float64")
    part, whole = K.eigh(3), K.eigh()
    assert (part.whole, whole.whole, K.eigh(7).whole) == (False, True, True)
    with pytest.raises(UnsupportedError, match="effective_rank needs all 7 eigenvalues"):
        part.effective_rank()
    assert "effective rank" not in part._repr_html_()
    assert "3 of 7" in part._repr_html_()
    assert f"{whole.effective_rank():.4g}" in whole._repr_html_()
    assert part.plot().axes[0].get_title() == "the first 3 of 7"
    assert whole.plot().axes[0].get_title().startswith("effective rank")


def test_pictures_leave_out_what_rounding_made_of_zeros() -> None:
    K = bs.ntk(nn.Linear(2, 1), torch.randn(20, 2, generator=torch.Generator().manual_seed(0)))
    axes = K.eigh().plot().axes[0]
    assert axes.get_title().endswith(", 17 zeros")  # two weights and a bias
    assert len(axes.lines[0].get_ydata()) == 3


def test_cross_kernels_have_no_spectrum(net: nn.Module, x: torch.Tensor) -> None:
    K = bs.ntk(net, x, x[:3])
    assert "7 x 3 examples" in repr(K)
    for ask in (K.eigh, K.trace, K.centered, K.normalized, lambda: K.alignment(torch.zeros(7))):
        with pytest.raises(UnsupportedError, match=r"symmetric kernel K\(x, x\)"):
            ask()


def test_spectrum_arguments(net: nn.Module, x: torch.Tensor) -> None:
    K = bs.ntk(net, x, outputs="trace", precision="float64")
    for k in (0, 8):
        with pytest.raises(InputError, match="k must be between 1 and 7"):
            K.eigh(k)
    with pytest.raises(InputError, match="there is entropy, participation"):
        K.effective_rank("trace")  # type: ignore[arg-type]
    functions = K.eigh(normalize=True)
    torch.testing.assert_close(functions.vectors.square().mean(0), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(functions.values * 7, K.eigh().values)
    assert K.trace_ratios((7,))[7] == pytest.approx(1.0)


def test_layers_are_those_of_the_kernel_whatever_happens_to_the_model_later(net: nn.Module, x: torch.Tensor) -> None:
    K = bs.ntk(net, x, by_layer=True, precision="float64")
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2.0)
    total = torch.stack([k.tensor for k in K.by_layer().values()]).sum(0)
    torch.testing.assert_close(total, K.tensor, rtol=1e-12, atol=1e-12)
    with pytest.raises(UnsupportedError, match="by_layer=True"):
        bs.ntk(net, x).by_layer()
