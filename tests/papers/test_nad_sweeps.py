"""The NAD studies on synthetic data, each run once at less than smoke size."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from biascope.data.fourier import dft_basis
from biascope.studies import Estimate, Run, StudyResult, configure, execute
from biascope.studies.claims import Claim, claims
from biascope.studies.estimates import rank_correlation, spearman
from biascope.support.errors import InputError
from biascope_papers.nad.anisotropy import mean_frequency, radial, spread_indices
from biascope_papers.nad.fourier_maps import noise_numbers, variants
from biascope_papers.nad.methods import spectral_correlation
from biascope_papers.nad.support import energy_of_bins, strongest_and_others
from biascope_papers.nad.sweeps import RANGES, samples_needed, weighted_spearman, whole_range
from claim_outcome import outcome

Start = Callable[..., tuple[Run, StudyResult]]


def claim(name: str) -> Claim:
    return next(each for each in claims() if each.id == name)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def go(name: str, **overrides: object) -> tuple[Run, StudyResult]:
        folder = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        run = Run.create(folder, configure(name, "smoke", seed=1, overrides=overrides))
        return run, execute(run)

    return go


@pytest.fixture
def start_with(tmp_path: Path) -> Callable[..., StudyResult]:
    def go(name: str, key: str, arrays: dict[str, np.ndarray], **overrides: object) -> StudyResult:
        """A run whose training is done already: these are its arrays."""
        folder = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        run = Run.create(folder, configure(name, "smoke", seed=1, overrides=overrides))
        run.save_arrays(key, **arrays)
        return execute(run)

    return go


def test_maps_of_logistic_regression_are_perfect(start: Start) -> None:
    run, result = start("nad/fig1", net="logreg", window=0)
    assert not claim("nad/1").tested_by("nad/fig1", {"net": "logreg"}, result.numbers)
    assert "As a control, which needs 0.99 on every bin, it holds: 1.0000" in result.measured
    assert "not tested by logreg" in result.measured
    assert len(run.load_arrays("map")["test"]) == 34
    assert result.numbers["mean test accuracy, logreg"].value > 0.99
    (chart,) = result.figures
    assert len(chart.z) == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("net", "worst", "fate"), [("mlp", 1.0, "holds"), ("mlp", 0.9, "fails"), ("logreg", 0.9, "fails")]
)
def test_a_control_tests_nothing_of_convolutional_networks(tmp_path: Path, net: str, worst: float, fate: str) -> None:
    options = {"net": net, "window": 0, "control": False}
    run = Run.create(tmp_path / "run", configure("nad/fig1", "smoke", overrides=options))
    test = torch.cat([torch.ones(33), torch.tensor([worst])])
    run.cached(f"{net} 0", lambda: {"test": test, "train": test, "engine": "loop"})
    result = execute(run)
    assert not claim("nad/1").tested_by("nad/fig1", options, result.numbers)
    assert f"it {fate}: {worst:.4f} on its worst one" in result.measured


@pytest.mark.parametrize("alike", [True, False])
def test_a_correlation_that_is_no_number_is_not_told(tmp_path: Path, alike: bool) -> None:
    """Where all bins are learnt alike, transposed ones correlate by nothing."""
    run = Run.create(tmp_path / "run", configure("nad/fig1", "smoke", overrides={"window": 0, "control": False}))
    test = torch.ones(34) if alike else torch.linspace(0.5, 1.0, 34)
    run.cached("lenet 0", lambda: {"test": test, "train": test, "engine": "loop"})
    measured = execute(run).measured
    assert "nan" not in measured
    assert ("Transposed bins correlate" in measured) == (not alike)


def test_a_map_cut_short_is_the_beginning_of_the_whole_one(start: Start) -> None:
    """A sweep that time stopped after a piece can be judged as a run of its own, which anyone can repeat."""
    options = {"net": "logreg", "window": 0, "chunk": 8, "epochs": 1}
    whole, _ = start("nad/fig1", **options)
    part, result = start("nad/fig1", first=8, **options)
    for key in ("frequencies", "test", "train"):
        assert torch.equal(part.load_arrays("map")[key], whole.load_arrays("map")[key][:8])
    assert "8 bins" in result.measured


@pytest.mark.slow
def test_lenet_prefers_low_frequencies(start: Start) -> None:
    """DC and the frequencies where two poolings of two have their zeros; logistic regression does not care."""
    run, result = start("nad/fig1", window=0, stride=4, epochs=24)
    found = run.load_arrays("map")
    k, test = found["frequencies"].abs(), found["test"]
    dc, nyquist = test[(k == 0).all(1)], test[(k == 8).all(1)]
    assert float(dc) > 0.9
    assert float(nyquist) < 0.7
    assert result.numbers["worst bin of logistic regression"].value > 0.99
    assert not claim("nad/1").tested_by("nad/fig1", {"net": "lenet"}, result.numbers)  # three transposed pairs


@pytest.mark.slow
def test_speed_and_pooling(start: Start) -> None:
    _, speed = start("nad/fig2")
    steps = {name: value.value for name, value in speed.numbers.items()}
    assert steps["steps to loss 0.5, fastest bin"] < steps["steps to loss 0.5, slowest bin"]
    run, pooling = start("nad/fig3", sample=8)
    assert pooling.numbers["mean, no pooling"].value > pooling.numbers["mean, with pooling"].value + 0.2
    with_, without = (_pieces(run, name) for name in ("lenet", "no pooling"))  # spec 01 check 19: the worst bin
    assert without.min() > with_.min() + 0.1
    assert {chart.name for chart in pooling.figures} == {"with-pooling", "no-pooling"}
    assert execute(Run.resume(run.path)).numbers == pooling.numbers  # everything was on disk


@pytest.mark.slow
def test_both_parts_agree(start: Start) -> None:
    _, result = start("nad/fig10", sample=8)
    assert result.numbers["correlation of the Im and the Re map"].value > 0.5
    gap = result.numbers["accuracy on Im minus accuracy on Re"]
    assert abs(gap.value) < 5 * (gap.standard_error or 0) + 0.05


@pytest.mark.slow
def test_noise_and_random_directions(start: Start) -> None:
    _, noise = start("nad/fig11", sample=5)
    assert noise.numbers["worst bin, logreg, sigma 0"].value == 1.0
    with pytest.raises(InputError, match="rising"):
        start("nad/fig11", sigmas="3,1")
    _, random = start("nad/fig12", count=8, nets="logreg")
    assert random.numbers["mean accuracy on random directions, logreg"].value > 0.99
    assert random.numbers["spread over random directions, logreg"].value < 0.01


@pytest.mark.slow
def test_random_directions_are_alike_where_fourier_directions_are_not(start: Start) -> None:
    """Spec 01 check 18 with a network that has a preference: LeNet on 16 x 16 pixels."""
    _, result = start("nad/fig12", count=12, epochs=24)
    random, fourier = (result.numbers[f"spread over {kind} directions, lenet"].value for kind in ("random", "Fourier"))
    assert fourier > 0.1
    assert random < 0.5 * fourier
    assert outcome("nad/12", result.numbers, "lenet") == "holds", result.measured


@pytest.mark.slow
def test_first_directions_are_where_the_network_is_accurate(start: Start) -> None:
    """LeNet on 16 x 16 pixels; logistic regression, accurate everywhere, has no such frequencies."""
    run, lenet = start("nad/fig5-support", count=8)
    assert lenet.numbers["difference"].value > 0.1, lenet.measured
    assert len(run.load_arrays("support")["test"]) == 16
    _, logreg = start("nad/fig5-support", count=8, net="logreg")
    assert outcome("nad/5, support", logreg.numbers) == "fails"
    assert logreg.numbers["difference"].value == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(("strong", "verdict"), [(0.9, "holds"), (0.62, "open"), (0.4, "fails")])
def test_support_is_judged_by_the_difference(tmp_path: Path, strong: float, verdict: str) -> None:
    """Directions and accuracies are given: two strong bins against two others."""
    basis = dft_basis((16, 16)).part("re")
    run = Run.create(tmp_path / "run", configure("nad/fig5-support", "smoke", overrides={"count": 2, "first": 2}))
    run.save_arrays("directions lenet", directions=basis.vectors[[5, 9]].float(), eigenvalues=torch.ones(2))
    test = torch.tensor([strong, strong + 0.002, 0.5, 0.504])
    run.cached("lenet 0", lambda: {"test": test, "train": test, "engine": "loop"})
    result = execute(run)
    assert outcome("nad/5, support", result.numbers) == verdict, result.measured
    assert result.numbers["difference"].value == pytest.approx(strong - 0.501)
    assert result.numbers["share of the energy in the strongest bins"].value == pytest.approx(1)
    kept = run.load_arrays("support")
    assert sorted(kept["frequencies"][:2].tolist()) == sorted(basis.frequencies[[5, 9]].tolist())


def test_energy_of_bins_is_that_of_both_parts() -> None:
    """The oracle: squared products with the cosine and the sine vector of the bin."""
    whole = dft_basis((6, 6))
    re, im = whole.part("re"), whole.part("im")
    u = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u /= u.flatten(1).norm(dim=1).view(-1, 1, 1)
    shares = energy_of_bins(u, re)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    for i, pair in enumerate(re.bins.tolist()):
        vectors = [re.vectors[i], *(v for v, other in zip(im.vectors, im.bins.tolist()) if other == pair)]
        expected = sum(float((u * v).sum((1, 2)).square().mean()) for v in vectors)
        assert float(shares[i]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("options", [{"count": 1}, {"count": 66}, {"first": 0}, {"first": 257}])
def test_support_needs_bins_and_directions(start: Start, options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="bins and from 1 to 256 directions"):
        start("nad/fig5-support", **options)


@pytest.mark.parametrize("total", [40, 41])
def test_weights_of_chosen_indices_are_repetitions(total: int) -> None:
    """The oracle: every pair repeated as often as its range is long (in halves), and the plain rank correlation."""
    rng, at = np.random.default_rng(0), np.array([0, 1, 2, 5, 9, 20, 21, 39])
    accuracy = np.array([1.0, 0.9, 0.9, 0.6, 0.7, 0.5, 0.5, 0.52])
    edges = np.array([-0.5, *(at[1:] + at[:-1]) / 2, total - 0.5])
    times = (2 * np.diff(edges)).astype(int)
    assert times.sum() == 2 * total
    found = whole_range(at.astype(float), accuracy, total)
    assert found.value == pytest.approx(
        spearmanr(np.repeat(at, times), np.repeat(accuracy, times)).statistic, abs=1e-10
    )
    everything = rng.random(total)
    plain = rank_correlation(np.arange(total), everything)
    assert whole_range(np.arange(float(total)), everything, total).value == pytest.approx(plain.value, abs=1e-10)
    assert whole_range(np.arange(5.0), np.ones(5), 5).value == 0.0


@pytest.mark.parametrize(("net", "noise"), [("vgg11", 0.0054), ("densenet121", 0.0046)])
def test_the_correlation_over_all_indices_is_estimated_without_bias(net: str, noise: float) -> None:
    """Curves with the published means, and so much noise that their correlation over all indices is the published one:
    18 chosen indices have a far stronger one (0.94 and 0.84), the weighted one is right on average."""
    told = claim("nad/20, VGG-11" if net == "vgg11" else "nad/6")
    means = [told.printed(f"accuracy, index {low} to {high - 1}, {net}") for low, high in RANGES]
    published = told.printed(f"Spearman(index, accuracy), all indices, {net}")
    middle = [np.log((low + high + 1) / 2) for low, high in RANGES]
    curve, rng = np.interp(np.log(np.arange(1024) + 1), middle, means), np.random.default_rng(0)
    at, rows = np.array(spread_indices(20, 1024)), []
    for _ in range(200):
        accuracy = curve + noise * rng.normal(size=1024)
        chosen = accuracy[at]
        both = spearman(np.arange(1024), accuracy), spearman(at, chosen)
        rows.append((*both, weighted_spearman(at.astype(float), chosen, 1024)))
    everything, chosen_only, weighted = np.mean(rows, axis=0)
    assert everything == pytest.approx(published, abs=0.02)
    assert chosen_only < everything - 0.15
    assert weighted == pytest.approx(everything, abs=3 * np.std(rows, axis=0)[2] / np.sqrt(200))


def test_fig6_and_fig22_are_judged_by_what_they_store(start_with: Callable[..., StudyResult]) -> None:
    at = np.array(spread_indices(40, 1024))
    falling = {"indices": at, "test": 1 - at / 2400, "train": np.ones(len(at)), "eigenvalues": 1.0 / (1 + at)}
    rising, stepping, nothing = 0.7 + at / 4800, np.where(at > 600, 0.9, 0.7), 0.5 + at / 2e5
    for test, wanted in ((1 - at / 2400, "holds"), (rising, "fails"), (stepping, "fails"), (nothing, "gate")):
        found = start_with("nad/fig6", "sweep", {**falling, "test": test}, image_size=32)
        assert outcome("nad/6", found.numbers, "lenet") == wanted

    at = np.array(spread_indices(8, 256))
    accuracy = np.stack([1 - at / 600, 1 - at / 6e5])  # with many samples at least 0.9995
    samples = {"indices": at, "ns": np.array([64, 256]), "accuracy": accuracy}
    options, perfect = {"net": "resnet18", "width": 2}, claim("nad/22, ResNet-18")
    found = start_with("nad/fig22", "accuracy", samples, **options).numbers
    assert outcome("nad/22, ResNet-18", found) == "holds"
    assert outcome("nad/22", found, "resnet18") == "gate"  # the fewest samples are enough everywhere
    samples["accuracy"] = np.stack([1 - at / 600, 1 - at / 6e3])  # 0.96 at the last: helps, but is not perfect
    resnet = start_with("nad/fig22", "accuracy", samples, **options)
    assert outcome("nad/22, ResNet-18", resnet.numbers) == "fails"
    samples["accuracy"] = np.stack([np.where(at < 9, 0.9, 0.5), np.where(at < 200, 1 - at / 1000, 0.5)])
    needs_more = start_with("nad/fig22", "accuracy", samples, **options).numbers
    assert outcome("nad/22", needs_more, "resnet18") == "holds"
    assert perfect.tested_by("nad/fig22", options, resnet.numbers)
    assert not perfect.tested_by("nad/fig22", {"net": "lenet"}, resnet.numbers)


@pytest.mark.slow
def test_first_directions_are_learnt_and_the_last_half_is_at_chance(start: Start) -> None:
    """Spec 01 check 17 on 16 x 16 pixels, at the paper's noise: 1.00 at each of the first eight, 0.52 in the last half.

    The classes are at +-8 v instead of +-v, for 256 examples instead of 10,000.
    """
    run, result = start("nad/fig6", count=24, networks=64, sigma=3.0)
    indices, test = (run.load_arrays("sweep")[key] for key in ("indices", "test"))
    assert float(test[indices < 8].min()) > 0.97
    assert abs(float(test[indices >= 128].mean()) - 0.5) < 0.06
    assert result.numbers["Spearman(index, accuracy), chosen indices, lenet"].value < -0.8


@pytest.mark.slow
def test_accuracy_falls_with_the_index(start: Start) -> None:
    run, result = start("nad/fig6", count=10)
    fall = result.numbers["Spearman(index, accuracy), chosen indices, lenet"]
    assert fall.value + 2 * (fall.standard_error or 1.0) < -0.5, result.measured
    U = run.load_arrays("directions lenet")["directions"].flatten(1).double()
    assert torch.allclose(U @ U.T, torch.eye(256, dtype=torch.float64), atol=1e-4)
    values = run.load_arrays("directions lenet")["eigenvalues"]
    assert (values[1:] <= values[:-1] + 1e-12).all()

    _, samples = start("nad/fig22", count=6, reuse=str(run.path))  # takes the directions from the first run
    assert samples.numbers["Spearman(index, accuracy averaged over numbers of samples)"].value < -0.5
    _, speed = start("nad/fig21", count=6, reuse=str(run.path))
    assert speed.numbers["Spearman(index, steps to loss), lenet"].value > 0.3
    with pytest.raises(InputError, match="shape"):
        start("nad/fig13", image_size=8, net="mlp", reuse=str(_renamed(run)))


@pytest.mark.slow
def test_three_indices_test_nothing(start: Start) -> None:
    """A rank correlation of three points has no error bar: neither for the claim nor against it."""
    _, result = start("nad/fig6", count=5)
    assert result.numbers["Spearman(index, accuracy), chosen indices, lenet"].n == 3
    assert result.numbers["Spearman(index, accuracy), all indices, lenet"].standard_error is None
    assert result.numbers["Spearman(index, accuracy), chosen indices, lenet"].standard_error is None


def _pieces(run: Run, name: str) -> torch.Tensor:
    """The accuracies of all directions trained under a name."""
    found = sorted((key for key in run.arrays() if key.startswith(f"{name} ")), key=lambda key: int(key.split()[-1]))
    return torch.cat([run.load_arrays(key)["test"] for key in found])


def _renamed(run: Run) -> Path:
    """The same directions under the name of another network."""
    folder = run.path / "arrays"
    (folder / "directions mlp.safetensors").write_bytes((folder / "directions lenet.safetensors").read_bytes())
    return run.path


@pytest.mark.slow
def test_the_mlp_has_no_preference(start: Start) -> None:
    _, result = start("nad/fig20", nets="mlp", networks=300, count=6)
    assert outcome("nad/20", result.numbers) == "holds", result.measured
    measured = result.numbers["largest over smallest eigenvalue, mlp"].value
    alone = result.numbers["the same by sampling alone (Marchenko-Pastur), mlp"].value
    assert measured == pytest.approx(alone, rel=0.8)


@pytest.mark.slow
def test_more_directions_and_algorithm_two(start: Start) -> None:
    run, result = start("nad/fig13", networks=16)
    assert (run.path / "figures" / "directions.png").exists()
    assert result.numbers["energy of the first 20 in their strongest 5 % of frequencies"].value > 0.4
    assert result.numbers["lowest energy of a direction in its strongest 5 % of frequencies"].value < 0.5
    _, second = start("nad/fig17", networks=4, mixed=4, k=2)
    assert second.numbers["overlap of the spans of the first 2"].value > 1 / 256
    assert "overlap between groups of 1 networks, Algorithm 1, last layer averaged out" in second.numbers


def test_variants_without_pooling() -> None:
    assert variants("lenet", "both") == {"no pooling": {}}
    assert list(variants("resnet18", "both")) == ["no pooling", "no pooling, no strides"]
    assert variants("vgg11", "remove") == {"no pooling": {}}
    assert variants("resnet18", "keep") == {"no pooling": {}}
    assert variants("resnet18", "remove") == {"no pooling, no strides": {"stride": 1}}


def test_parts_of_the_noise_claim() -> None:
    bins = np.linspace(0, 0.01, 10)
    accuracy = {
        ("logreg", 0.0): 1 - 0 * bins,
        ("logreg", 3.0): 1 - 0 * bins,
        ("lenet", 0.0): 0.8 - bins,
        ("lenet", 3.0): 0.6 - bins**2,
    }

    def holds() -> list[str]:
        numbers = noise_numbers(accuracy, ("logreg", "lenet"), (0.0, 3.0))
        for (net, sigma), values in accuracy.items():
            numbers[f"worst bin, {net}, sigma {sigma:g}"] = Estimate(float(values.min()))
            numbers[f"mean accuracy, {net}, sigma {sigma:g}"] = Estimate.of(values)
        return [
            outcome("nad/11, logistic regression", numbers),
            outcome("nad/11, LeNet without noise", numbers),
            outcome("nad/11, noise", numbers, "lenet"),
        ]

    assert holds() == ["holds", "holds", "holds"]
    accuracy["logreg", 3.0] = 0.9 - bins
    accuracy["lenet", 0.0] = 1 - bins
    assert holds() == ["fails", "fails", "holds"]
    resnet = {("resnet18", sigma): 1 - level - bins for sigma, level in ((0.0, 0.0), (1.0, 0.1), (3.0, 0.4))}
    weaker = {("lenet", sigma): values - 0.1 + bins**2 for (_, sigma), values in resnet.items()}
    found = noise_numbers(resnet | weaker, ("resnet18", "lenet"), (0.0, 1.0, 3.0))
    assert list(found) == [
        "accuracy lost from the lowest to the highest noise, resnet18",
        "accuracy lost from the lowest to the highest noise, lenet",
        "accuracy of resnet18 minus lenet at the middle noise level",
    ]
    assert [number.value for number in found.values()] == pytest.approx([0.4, 0.4, 0.1], abs=1e-4)
    found["worst bin, lenet, sigma 0"], found["worst bin, resnet18, sigma 0"] = Estimate(0.1), Estimate(0.96)
    assert outcome("nad/11, others without noise", found, "resnet18") == "holds"
    assert outcome("nad/11, ResNet-18", found) == "holds"


def test_fourier_measures() -> None:
    wave = torch.cos(2 * torch.pi * 3 * torch.arange(16) / 16).expand(16, 16)
    assert mean_frequency(wave[None])[0] == pytest.approx(3.0)
    assert radial(wave[None]).argmax() == 3
    assert radial(wave[None]).sum() == pytest.approx(1.0)
    noise = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert spectral_correlation(noise, noise.roll(3, -1)) == pytest.approx(1)  # a shift does not change the energy
    assert strongest_and_others(torch.tensor([0.1, 0.5, 0.0, 0.4]), 2, seed=0)[:2].tolist() == [1, 3]
    assert spectral_correlation(wave[None], wave.T[None]) == pytest.approx(-2 / 254, abs=1e-6)  # disjoint pairs of bins


def test_samples_needed_are_those_from_which_on_the_accuracy_stays() -> None:
    ns = np.array([100, 1000, 10_000])
    accuracy = np.array([[0.8, 0.5, 0.8, 0.5], [0.9, 0.75, 0.7, 0.6], [1.0, 1.0, 0.8, 0.7]])
    assert samples_needed(ns, accuracy) == pytest.approx([100, 1000, 10**3.5, 10**5], rel=1e-9)
