"""Small against large finite differences (Appendix D.1)."""

from pathlib import Path

import pytest
import torch

from biascope.geometry import nads
from biascope.linalg import subspace_overlap
from biascope.studies import Run, StudyResult, configure, execute
from biascope.support.errors import InputError
from biascope_papers.nad import methods as s
from biascope_papers.nad.directional import architecture


def start(folder: Path, **overrides: object) -> StudyResult:
    return execute(Run.create(folder, configure("nad/steps", "smoke", seed=1, overrides=overrides)))


def test_smallest_step_is_back_propagation() -> None:
    """The stand-in of the study: with sampled heads, where both can be had, h = 1e-4 gives autograd's moment."""
    factory, shape = architecture("lenet", 16, outputs=1), (1, 16, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = nads(factory, shape, 4, method="autograd", x=x, dtype=torch.float64)
    small = nads(factory, shape, 4, step=1e-4, x=x, dtype=torch.float64)
    assert torch.allclose(small.eigenvalues[:4], exact.eigenvalues[:4], rtol=1e-3)
    wide = nads(factory, shape, 4, step=100.0, x=x, dtype=torch.float64)
    assert not torch.allclose(wide.eigenvalues[:4], exact.eigenvalues[:4], rtol=0.05)


def test_overlaps_and_sharpness() -> None:
    U = torch.eye(256, dtype=torch.float64)[:20].view(2, 10, 256)
    assert s.across_points(U) < 1e-15
    assert s.across_points(torch.stack([U[0], U[0]])) == pytest.approx(subspace_overlap(U[0].T, U[0].T)) == 1.0
    wave = torch.cos(2 * torch.pi * torch.arange(16) / 4).repeat(16, 1).flatten()[None, None].double()
    assert s.sharpness(wave, 16) == pytest.approx(1.0)
    assert s.sharpness(U[:, :3], 16) == pytest.approx(13 / 256)  # a pixel has the same energy everywhere
    assert s.leading(torch.diag(torch.arange(12.0).double()))[0].abs().argmax() == 11


@pytest.mark.slow
def test_smoke_and_resume(tmp_path: Path) -> None:
    result = start(tmp_path / "run", groups=3, networks=12)
    wide, near = (result.numbers[f"h = {h}: overlap of the first 10 at two points"].value for h in ("100", "0.0001"))
    assert wide > near  # the widest differences hardly see the point
    assert result.numbers["energy, largest step minus smallest"].n == 3
    (tmp_path / "run" / "arrays" / "step 100 1.safetensors").unlink()
    again = execute(Run.resume(tmp_path / "run"))
    for name, number in result.numbers.items():
        assert again.numbers[name].value == pytest.approx(number.value, rel=1e-4), name


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 steps"):
        start(tmp_path / "run", steps=(1.0,))
