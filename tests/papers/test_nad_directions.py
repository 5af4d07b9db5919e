"""The study nad/fig5 at smoke size: verdict, error bars, resuming, and the comparison with given directions."""

from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.studies import Run, configure, execute
from biascope.support.errors import InputError
from biascope_papers.nad.anisotropy import concentration, energy, published_directions
from biascope_papers.nad.directions import PLACES
from claim_outcome import outcome


def start(tmp_path: Path, **overrides: object) -> Run:
    options = {"reference": str(tmp_path), "networks": 32, "sampled": 128, **overrides}
    return Run.create(tmp_path / "run", configure("nad/fig5", "smoke", seed=1, overrides=options))


@pytest.mark.slow
def test_smoke_confirms_and_resumes(tmp_path: Path) -> None:
    run = start(tmp_path)
    result = execute(run)
    assert outcome("nad/5, concentrated", result.numbers) == "holds", result.measured
    first = result.numbers["energy of u_1 to u_3 in their strongest 5 % of frequencies"]
    assert first.n == 32
    assert 0 < (first.standard_error or 0) < 0.3
    assert (run.path / "figures" / "directions.png").exists()
    directions = run.load_arrays("nads")["directions"].flatten(1)
    assert torch.allclose(directions @ directions.T, torch.eye(64), atol=1e-4)
    (run.path / "arrays" / "marginal 2.safetensors").unlink()
    resumed = execute(Run.resume(run.path))
    for name, number in result.numbers.items():  # vmap or loop is chosen by a measured pilot: rounding may differ
        assert resumed.numbers[name].value == pytest.approx(number.value, rel=1e-4), name

    np.savez(tmp_path / "nads_LeNet.npz", directions=directions.numpy())  # as if these had been published
    again = execute(Run.resume(run.path))
    assert again.numbers["overlap with the published first 10"].value == pytest.approx(1.0, abs=1e-6)
    assert again.numbers["largest principal angle of the first 10, degrees"].value < 0.1


def test_networks_without_an_image_size_and_small_images(tmp_path: Path) -> None:
    result = execute(start(tmp_path, net="mlp", image_size=8, networks=8, sampled=8))
    assert result.numbers["lambda_64 / lambda_1"].value > 0
    assert outcome("nad/5, concentrated", result.numbers) == "fails"  # isotropic


def test_two_groups_give_no_error(tmp_path: Path) -> None:
    """None can be left out."""
    result = execute(start(tmp_path, image_size=16, networks=8, sampled=32, groups=2))
    found = result.numbers["energy of u_1 to u_3 in their strongest 5 % of frequencies"]
    assert found.value > 0.5
    assert found.standard_error is None


def test_where_the_energy_of_two_networks_must_lie() -> None:
    """Planted waves: a comb for ResNet-18; DC and the two highest frequencies for DenseNet-121, in no other order."""
    n = 16
    x, y = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")

    def wave(a: int, b: int) -> torch.Tensor:
        return torch.cos(2 * torch.pi * (a * x + b * y) / n)

    (comb,) = PLACES["resnet18"].values()
    assert comb(energy(torch.stack([wave(4, 8), wave(0, 4), wave(0, 0)]))) == pytest.approx(1.0)
    assert comb(energy(torch.stack([wave(4, 8), wave(2, 4), wave(0, 0)]))) == pytest.approx(2 / 3)
    first, others = PLACES["densenet121"].values()
    right, wrong = (energy(torch.stack(waves)) for waves in (
        [wave(0, 0), wave(8, 0), wave(0, 8)], [wave(1, 0), wave(0, 0), wave(0, 8)]
    ))  # fmt: skip
    assert (first(right), others(right)) == pytest.approx((1.0, 1.0))
    assert (first(wrong), others(wrong)) == pytest.approx((0.0, 0.5), abs=1e-12)


@pytest.mark.slow
def test_the_comb_of_resnet18_is_measured_with_an_error(tmp_path: Path) -> None:
    result = execute(start(tmp_path, net="resnet18", image_size=8, networks=8, sampled=8, groups=4))
    share = result.numbers["energy of u_1 to u_3 on multiples of 4"]
    assert share.standard_error is not None
    assert 0 <= share.value <= 1
    assert f"on multiples of 4: {share}" in result.measured


def test_concentration() -> None:
    side = 16
    wave = torch.cos(2 * torch.pi * 3 * torch.arange(side) / side).expand(side, side)
    assert concentration(wave[None]) == pytest.approx(1.0)
    noise = torch.randn(200, side, side, generator=torch.Generator().manual_seed(0))
    assert concentration(noise) == pytest.approx(0.05 * (1 + np.log(20)), abs=0.05)
    assert energy(noise).sum((1, 2)).allclose(torch.ones(200, dtype=torch.float64))


def test_published_directions_are_read_from_the_folder_that_is_given_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("nads_LeNet.npz", directions=np.eye(4)[:2])
    assert configure("nad/fig5")["options"]["reference"] == configure("nad/fig13")["options"]["reference"] == ""
    assert published_directions("lenet", "", 4) is None
    found = published_directions("lenet", str(tmp_path), 4)
    assert found is not None
    assert found.shape == (2, 4)
    assert published_directions("lenet", str(tmp_path), 9) is None


def test_a_folder_that_is_not_there_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere"):
        published_directions("lenet", str(tmp_path / "nowhere"), 1024)
    assert published_directions("lenet", str(tmp_path), 1024) is None
    assert published_directions("lenet", "", 1024) is None
