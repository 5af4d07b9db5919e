"""The kept runs of the NAD paper: their verdicts follow from their arrays, and checks at the size of the paper.

What a check asks for and the arrays do not show is asserted as it is, with the number of the check beside it.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.studies import load_result
from biascope.studies.rejudge import rejudge
from biascope.studies.runs import Run
from biascope.support.errors import InputError
from biascope_papers.nad import frequencies as f
from biascope_papers.nad.anisotropy import energy
from biascope_papers.nad.directional import Array
from biascope_papers.nad.directions import PLACES
from claim_outcome import outcome

KEPT = Path(__file__).parents[2] / "reproductions"
JUDGED = (
    *(
        f"nad-fig1-paper-{name}h200"
        for name in ("", "lenet-half-gap-", "resnet18-", "vgg11-", "densenet121-", "densenet121-44-bins-")
    ),
    *(f"nad-fig6-paper-{name}h200" for name in ("", "resnet18-", "vgg11-", "densenet121-")),
    "nad-fig7-paper-h200",
    "nad-fig8-paper-lenet-h200",
    "nad-fig8-paper-lenet-vgg11-resnet18-h200",
    "nad-fig6-laptop-cpu",
    "nad-fig22-laptop-cpu",
    "nad-underspecification-laptop-cpu",
)


def arrays(run: str, name: str) -> dict[str, torch.Tensor]:
    return Run.open(KEPT / run).load_arrays(name)


def accuracy_map(net: str) -> tuple[Array, Array]:
    """Frequencies [k, 2] and accuracies [k] of Fig. 1."""
    found = arrays(f"nad-fig1-paper-{net}h200", "map")
    return found["frequencies"].numpy(), found["test"].numpy()


def first_energies(net: str) -> torch.Tensor:
    """|FFT|^2 [64, 32, 32] of the first directions of Fig. 5."""
    return energy(arrays(f"nad-fig5-paper-{net}h200", "nads")["directions"][:, 0])


@pytest.mark.parametrize("name", JUDGED)
def test_kept_numbers_follow_from_kept_arrays(name: str, tmp_path: Path) -> None:
    """Computed once more in a copy: every number is kept, with that value (older runs have kept more of them)."""
    shutil.copytree(KEPT / name, tmp_path / "run")
    _, kept, _ = load_result(KEPT / name)
    result = rejudge(tmp_path / "run")
    assert result.numbers.keys() <= kept.numbers.keys()
    for key, number in result.numbers.items():
        assert number.value == pytest.approx(kept.numbers[key].value, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("name", ["nad-fig5-paper-h200", "nad-fig20-laptop-cpu"])
def test_runs_whose_large_arrays_were_not_kept_cannot_be_judged_again(name: str, tmp_path: Path) -> None:
    """Their second moments or directions are larger than what is kept; they say so instead of computing."""
    shutil.copytree(KEPT / name, tmp_path / "run")
    with pytest.raises(InputError, match="cannot be judged without computing"):
        rejudge(tmp_path / "run")


def test_the_mlp_has_no_preference_but_4000_samples_are_too_few() -> None:
    """Spec 01 check 15 wants about 100 % at every index. The kept laptop run has 0.70 to 0.73, everywhere alike: an
    error of 0.010 from 2000 test samples explains the spread."""
    test = torch.cat([arrays("nad-fig20-laptop-cpu", f"mlp {start}")["test"] for start in (0, 8)])
    assert len(test) == 10
    assert float(test.min()) > 0.68
    assert float(test.std()) < 2 * (0.7 * 0.3 / 2000) ** 0.5


def test_the_mlp_has_no_preference_at_the_size_of_the_paper() -> None:
    """Spec 01 check 15, 10,000 samples: 0.94 to 0.96 at every index and not the published 1, everywhere alike."""
    _, result, _ = load_result(KEPT / "nad-fig20-paper-h200")
    assert outcome("nad/20", result.numbers) == "fails"
    assert outcome("nad/20, flat in the limit", result.numbers) == "holds"
    assert 0.93 < result.numbers["lowest accuracy, mlp"].value < 0.95
    for part in ("0 to 15", "512 to 1022"):
        assert result.numbers[f"accuracy, index {part}, mlp"].value == pytest.approx(0.947, abs=0.005)
    fall = result.numbers["Spearman(index, accuracy), chosen indices, vgg11"]
    assert fall.standard_error is not None
    assert fall.value + 2 * fall.standard_error < -0.5


def test_combs_of_resnet18() -> None:
    """Spec 01 check 16: >= 94 % where a frequency is a multiple of 4, 50 to 53 % elsewhere.

    Here 90 of 98 such bins reach 94 %, the lowest 83 %; those with both frequencies multiples of 4 reach 99.6 %.
    """
    k, test = accuracy_map("resnet18-")
    one, both = (k % 4 == 0).any(1), (k % 4 == 0).all(1)
    assert (one.sum(), (~one).sum()) == (98, 32)
    assert (test[one] >= 0.94).mean() > 0.9
    assert test[one].min() > 0.8
    assert test[both].min() > 0.99
    assert test[~one].min() > 0.48
    assert test[~one].max() < 0.53


def test_maps_of_different_networks_differ() -> None:
    """Fig. 1, "a pattern of its own": maps of two networks correlate less than the transposed halves of one.

    LeNet and VGG-11 are alike (0.82); ResNet-18's has nothing to do with either (0.01). Halves of LeNet's map correlate
    by 0.953 here and by 0.975 in an earlier run of the same seeds: at the edge of what it learns, rounding decides (one
    bin of 130 went from 0.50 to 0.64), so how far they agree is compared with how far networks do, not with a number.
    """
    maps = [accuracy_map(net)[1] for net in ("", "vgg11-", "resnet18-")]
    partner = f.partners(f.GRID.basis(0))
    within = min(f.reliability(test, partner) for test in maps)
    between = np.corrcoef(maps)
    assert 0.7 < between[0, 1] < within - 0.05
    assert np.abs(between[:2, 2]).max() < 0.1


def test_the_sweep_of_lenet_at_the_size_of_the_paper() -> None:
    """Spec 01 check 17: first 16 about 100 %, last half about 51 %, a strongly negative rank correlation.

    Here 95 to 99.9 % and 50.1 %. Over all indices the correlation is -0.83, and not the published -0.99: between them
    this curve falls earlier (0.51 from index 256 to 511, published 0.58), and what is at chance is in no order.
    """
    found, (_, result, _) = arrays("nad-fig6-paper-h200", "sweep"), load_result(KEPT / "nad-fig6-paper-h200")
    indices, test = found["indices"], found["test"]
    assert int((indices < 16).sum()) == 10
    assert float(test[indices < 16].min()) > 0.95
    assert float(test[indices < 16].mean()) > 0.98
    assert float(test[indices >= 512].mean()) == pytest.approx(0.51, abs=0.012)
    assert float(test[(indices >= 256) & (indices < 512)].mean()) < 0.52
    assert result.numbers["Spearman(index, accuracy), chosen indices, lenet"].value < -0.9
    assert result.numbers["Spearman(index, accuracy), all indices, lenet"].value == pytest.approx(-0.834, abs=1e-3)


def test_how_early_the_accuracy_falls_follows_the_spectrum_at_its_ends_only() -> None:
    """Fig. 6, "the sooner the faster the eigenvalues decay": LeNet is last and DenseNet-121 first in both, ResNet-18
    falls later than VGG-11 although its eigenvalues decay faster; so it is in the published numbers."""
    decay, left = {}, {}
    for net in ("", "vgg11-", "resnet18-", "densenet121-"):
        found = arrays(f"nad-fig6-paper-{net}h200", "sweep")
        decay[net] = float((found["eigenvalues"][100] / found["eigenvalues"][0]).sqrt())
        left[net] = float(np.interp(31, found["indices"].numpy(), found["test"].numpy()))  # accuracy at index 31
    assert sorted(decay, key=decay.__getitem__) == ["densenet121-", "resnet18-", "vgg11-", ""]
    assert left["densenet121-"] < left["vgg11-"] < min(left[""], left["resnet18-"])


def test_where_the_first_directions_live() -> None:
    """Spec 01 check 20: u_1 at DC (57, 90 and 98.5 %); ResNet-18's first 64 on the comb of multiples of 4; section 6:
    DenseNet-121's u_2 and u_3 at the highest frequencies of the axes (86 % published).

    Of ResNet-18's 64 the comb has 0.83 of the energy (a random direction: 0.06), all but one of them above a half.
    """
    at_dc = {net: float(first_energies(net)[0, 0, 0]) for net in ("", "vgg11-", "densenet121-")}
    assert list(at_dc.values()) == pytest.approx([0.57, 0.90, 0.985], abs=0.02)
    comb = first_energies("resnet18-")[:, ::4, ::4].sum((1, 2))
    assert float(comb[:4].min()) > 0.995
    assert float(comb.mean()) > 0.8
    assert int((comb > 0.5).sum()) == 63
    for net in ("resnet18", "densenet121"):  # what was added to the rule of Fig. 5 after these runs
        shares = {name: share(first_energies(f"{net}-")) for name, share in PLACES[net].items()}
        assert min(shares.values()) > 0.9, shares


@pytest.mark.parametrize("net", ["", "vgg11-", "resnet18-"])
def test_first_directions_lie_where_the_accuracy_is_high(net: str) -> None:
    """Fig. 5, "support in the high-accuracy bins of Fig. 1": the accuracy that the energy of u_1 to u_3 sees is in the
    best tenth of the map, or 0.99.

    Only even frequencies were mapped, which have 0.7 % of the energy of VGG-11's u_2 and u_3: for VGG-11 this is u_1.
    DenseNet-121's maps have 12 and 44 bins and none of those of its u_2 and u_3, so it is not tested.
    """
    k, test = accuracy_map(net)
    weight = first_energies(net)[:3, k[:, 0] % 32, k[:, 1] % 32].numpy()  # [3, bins]; a conjugate bin has the same
    seen = (weight @ test).sum() / weight.sum()
    assert seen > min(np.quantile(test, 0.9), 0.99)
    assert seen > test.mean() + 0.1


def test_bins_of_the_first_directions_are_learnt_and_others_are_not() -> None:
    """The same with fresh trainings, at odd frequencies too: LeNet at laptop size."""
    found = arrays("nad-fig5-support-laptop-cpu", "support")
    _, result, _ = load_result(KEPT / "nad-fig5-support-laptop-cpu")
    energies, test = found["energy"], found["test"]
    assert float(energies[:16].min()) > float(energies[16:].max())
    assert float(test[:16].min()) > float(test[16:].max()) + 0.1
    assert result.numbers["difference"].value == pytest.approx(float(test[:16].mean() - test[16:].mean()), rel=1e-6)


def test_densenet_learns_the_lowest_frequencies_of_the_axes_alone() -> None:
    """Published: 5 % of the bins at 95 % or more, 92 % below 60 %. Of the 44 trained here these are the axes' four."""
    k, test = accuracy_map("densenet121-44-bins-")
    axes = (k == 0).any(1)
    assert axes.sum() == 4
    assert test[axes].min() > 0.99
    assert np.abs(test[~axes] - 0.5).max() < 0.02


def test_poisoning_and_flip_at_the_size_of_the_paper() -> None:
    """Spec 01 check 21: clean accuracy at i = 1 far below that at large i; flip: training error near 0, test accuracy
    lower for all networks.

    The training error is near 0 for ResNet-18 alone: VGG-11 has 4 % in 15 epochs, LeNet 41 % in 50 (and 6 % on the
    original images). DenseNet-121 was not trained.
    """
    sweep = arrays("nad-fig7-paper-h200", "sweep")
    assert float(sweep["test"][0]) < 0.25
    assert float(sweep["test"][-1]) > 0.85
    assert float(sweep["train"].min()) > 0.999
    numbers = load_result(KEPT / "nad-fig8-paper-lenet-vgg11-resnet18-h200")[1].numbers
    for net in ("lenet", "vgg11", "resnet18"):
        assert numbers[f"test accuracy lost by the flip, {net}"].value > 0.2
    trained = [numbers[f"train accuracy, {net}, flipped"].value for net in ("resnet18", "vgg11")]
    assert trained == pytest.approx([1.0, 0.9575], abs=1e-3)
    lenet = load_result(KEPT / "nad-fig8-paper-lenet-h200")[1].numbers
    assert lenet["train accuracy, lenet, flipped"].value == pytest.approx(0.586, abs=1e-3)
    assert lenet["test accuracy lost by the flip, lenet"].value == pytest.approx(0.202, abs=1e-3)
