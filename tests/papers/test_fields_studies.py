"""The studies of coordinate networks at smoke size, against closed forms, and their building blocks."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope import data
from biascope.fields import coordinates, fit, recovery_bound, single_frequency
from biascope.fields.fitting import psnr
from biascope.studies import Chart, Run, configure, execute
from biascope.support.errors import InputError
from biascope.support.seeds import derive
from biascope_papers.fields import recovery
from biascope_papers.fields.atoms import mean_frequencies, principal
from biascope_papers.fields.recovery import fine_share, odd_share
from biascope_papers.fields.setting import (
    THRESHOLDS,
    Field,
    Meta,
    Setting,
    areas,
    ellipses,
    energies,
    first_steps,
    grey_images,
    half,
    kept,
    start,
)
from studies.smoke_runs import Results, smoke_runs

NAMES = tuple(f"fields/fig{f}" for f in ("5.2", "5.3", "C.1", "5.4", "5.5", "5.6", "5.7", "5.8", "C.2", "C.3"))
SMALL = Setting("ellipses", side=8, n=5, width=8, seeds=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return smoke_runs(tmp_path_factory, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    assert all(math.isfinite(number.value) for number in result.numbers.values())
    assert result.figures
    for chart in result.figures:
        assert isinstance(chart, Chart)
        assert all(math.isfinite(v) for series in chart.series for v in series.y)
    assert execute(Run.resume(run.path)).to_json() == result.to_json()


@pytest.mark.slow
def test_bessel_curves_are_the_integral(results: Results) -> None:
    _, result = results["fields/fig5.2"]
    tau = (np.arange(4000) + 0.5) * math.pi / 4000
    chart = result.figures[0]
    assert isinstance(chart, Chart)
    for n, series in enumerate(chart.series):
        exact = [np.cos(n * tau - b * np.sin(tau)).mean() for b in series.x]
        np.testing.assert_allclose(series.y, exact, atol=1e-9)
    assert result.numbers["harmonics with 98 % of the energy, b = 8"].value == 9  # Carson: b + 1
    assert result.numbers["largest error of a series"].value < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fields/fig5.3", "fields/figC.1"])
def test_one_frequency_leaves_odd_bins_empty_and_reaches_its_bound(results: Results, name: str) -> None:
    run, result = results[name]
    numbers = result.numbers
    assert numbers["energy at odd bins, f0 = 1"].value < 1e-10
    assert numbers["energy at odd bins, f0 = 0.5"].value > 0.01
    assert -1 < numbers["difference, over the bound, f0 = 1"].value <= 1e-3
    assert numbers["PSNR, f0 = 0.5"].value > numbers["PSNR, f0 = 1"].value + 5
    stored = torch.as_tensor(run.load_arrays("f0 = 1 0")["image"])
    torch.testing.assert_close(stored, stored.roll(8, 0), atol=1e-5, rtol=0)  # half of the side


@pytest.mark.slow
def test_the_alias_appears_with_a_high_first_frequency(results: Results) -> None:
    _, result = results["fields/fig5.4"]
    numbers = result.numbers
    assert numbers["sum of both amplitudes, w0 = 30"].value == pytest.approx(1, abs=0.02)  # folding
    assert numbers["alias ratio, w0 = 300"].value > 10 * numbers["alias ratio, w0 = 30"].value
    assert numbers["error between them, w0 = 300"].value > 100 * numbers["error on the samples, w0 = 300"].value


@pytest.mark.slow
def test_energy_has_a_peak_over_w0_and_meta_learning_is_above_it(results: Results) -> None:
    _, result = results["fields/fig5.5"]
    area = {name: number.value for name, number in result.numbers.items() if name.startswith("area under E")}
    assert area["area under E, SIREN 15"] > max(area["area under E, SIREN 2"], area["area under E, SIREN 100"])
    assert max(area, key=lambda name: area[name]) == "area under E, SIREN 30, MAML"
    chart = result.figures[0]
    assert isinstance(chart, Chart)
    for series in chart.series:
        assert series.x == THRESHOLDS
        assert all(a <= b + 1e-12 for a, b in zip(series.y, series.y[1:]))  # a lower bar lets more atoms in
        assert 0 <= series.y[0] <= series.y[-1] <= 1 + 1e-9


@pytest.mark.slow
def test_larger_w0_gives_finer_atoms(results: Results) -> None:
    _, result = results["fields/fig5.6"]
    found = [result.numbers[f"mean frequency of the first 5 atoms, SIREN {w0}"].value for w0 in (5, 30, 100)]
    assert found == sorted(found)
    assert result.numbers["rank correlation of w0 and mean frequency"].value == 1


@pytest.mark.slow
def test_meta_learned_starts_are_ahead(results: Results) -> None:
    numbers = results["fields/fig5.7"][1].numbers
    test = {name: number.value for name, number in numbers.items() if name.startswith("test PSNR")}
    assert max(test, key=lambda name: test[name]) == "test PSNR, SIREN 30, MAML"
    numbers = results["fields/figC.2"][1].numbers
    assert numbers["test PSNR, FFN 1, MAML"].value > numbers["test PSNR, FFN 1"].value + 3
    numbers = results["fields/figC.3"][1].numbers
    for name in ("MAML", "Reptile"):
        assert numbers[f"area gained, SIREN 30, {name}"].value > 0
        assert numbers[f"test PSNR gained, SIREN 30, {name}"].value > 0


@pytest.mark.slow
def test_first_atoms_after_reptile_are_measured_as_those_after_maml(results: Results) -> None:
    """Spans by their orthonormal bases, and likeness to images by the images' own singular vectors."""
    run, result = results["fields/figC.3"]
    shown = Setting("ellipses", side=12, n=12, width=16, seeds=2, init="haiku")
    likeness: dict[str, list[float]] = {"MAML": [], "Reptile": []}
    spans = []
    for seed in range(2):
        x = shown.signals(derive(run.seed, "images", seed)).flatten(1).double()
        main = torch.linalg.svd(x, full_matrices=False).Vh[:10].T
        bases = []
        for name, rows in likeness.items():
            atoms = run.load_arrays(f"atoms SIREN 30, {name} {seed}")["atoms"]
            bases.append(torch.linalg.qr(atoms.double()).Q)
            rows.append(float((bases[-1].T @ main).square().sum() / 10))
        spans.append(float((bases[0].T @ bases[1]).square().sum() / 10))
    numbers = result.numbers
    for name, rows in likeness.items():
        assert numbers[f"overlap with images, SIREN 30, {name}"].value == pytest.approx(sum(rows) / 2, abs=1e-4)
    apart = [b - a for a, b in zip(*likeness.values())]
    assert numbers["overlap with images, Reptile minus MAML"].value == pytest.approx(sum(apart) / 2, abs=1e-4)
    assert numbers["overlap of the first atoms, Reptile and MAML"].value == pytest.approx(sum(spans) / 2, abs=1e-4)


@pytest.mark.slow
def test_pre_training_begins_with_the_drawn_network(results: Results, tmp_path: Path) -> None:
    _, result = results["fields/fig5.8"]
    again = Run.create(tmp_path / "r", configure("fields/fig5.8", "smoke", overrides={"pretraining": (0, 30)}))
    assert execute(again).numbers["area under E after 0"] == result.numbers["area under E after 0"]
    change = result.numbers["area under E after 200"].value - result.numbers["area under E after 0"].value
    assert result.numbers["change of the area under E"].value == pytest.approx(change)


def test_one_seed_has_no_error(tmp_path: Path) -> None:
    few = {"seeds": 1, "width": 8, "side": 6, "n": 3, "meta_steps": 2, "w0s": (5.0, 50.0), "iterations": 2}
    run = Run.create(tmp_path / "r", configure("fields/fig5.7", "smoke", overrides=few))
    assert execute(run).numbers["rank correlation of area and test PSNR"].standard_error is None


def test_no_energy_beyond_the_harmonics_of_theorem_5_1(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure("fields/theorem5.1", "smoke", overrides={"frequencies": (3, 10)}))
    numbers = execute(run).numbers
    assert numbers["largest share of energy outside H"].value < 1e-25
    assert numbers["smallest share of energy outside H of one layer less"].value > 1e-8


# ------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(("optimiser", "lr"), [("adam", 1e-3), ("gd", 1e-2)])
@pytest.mark.parametrize("field", [Field("siren", 20.0), Field("ffn", 1.0), Field("relu")])
def test_first_steps_are_those_of_single_fits(field: Field, optimiser: str, lr: float) -> None:
    model = field.build(16, seed=3).double()
    before = [p.detach().clone() for p in model.parameters()]
    r, images, mask = coordinates((6, 6), 0.0, 1.0), ellipses(3, 6, seed=1), half(6, seed=2)
    train, test = first_steps(model, r, images, mask, steps=4, lr=lr, optimiser=optimiser)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
    for i, image in enumerate(images):
        alone = fit(model, r, image, steps=4, lr=lr, optimiser=optimiser, fitted=mask, every=1)
        torch.testing.assert_close(train[i], alone.train_psnr, atol=1e-6, rtol=0)
        torch.testing.assert_close(test[i], alone.test_psnr, atol=1e-6, rtol=0)


def test_what_a_seed_gives_is_shared_by_runs_of_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", str(tmp_path / "data"))
    made = list[Setting]()

    def of(folder: str, setting: Setting) -> float:
        run = Run.create(tmp_path / folder, {"study": "x", "seed": 0})

        def compute() -> dict[str, float]:
            made.append(setting)
            return {"x": float(len(made))}

        return float(kept(run, setting, "key 0", compute)["x"])

    assert [of("a", SMALL), of("b", SMALL), of("c", replace(SMALL, seeds=7))] == [1, 1, 1]
    assert of("d", replace(SMALL, init="haiku")) == 2
    assert made == [SMALL, replace(SMALL, init="haiku")]


def test_area_of_a_step() -> None:
    lam = torch.tensor(THRESHOLDS, dtype=torch.float64)
    assert len(lam) == 41
    assert lam[0] == 1
    assert lam[-1] == pytest.approx(1e-10)
    step = (torch.arange(41) >= 20).double()  # all energy at 1e-5 of the largest eigenvalue
    assert float(areas(step)) == pytest.approx(0.5 + 0.5 / 40)  # half a cell of the trapezoid


def test_energies_are_those_of_the_dictionary(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", {"study": "x", "seed": 4})
    field = Field("siren", 20.0)
    found = energies(run, field, SMALL)
    assert found.shape == (2, 5, 41)
    model = start(run, field, SMALL, 1).double()
    x = SMALL.grid.reshape(-1, 2).double()
    rows = []
    for point in x:  # the slow way: one gradient a pixel
        gradients = torch.autograd.grad(model(point[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    J = torch.stack(rows)
    values, vectors = torch.linalg.eigh(J @ J.T)
    signals = SMALL.signals(derive(4, "images", 1)).double().flatten(1)
    signals = signals - signals.mean(1, keepdim=True)
    power = (signals @ vectors).square() / signals.square().sum(1, keepdim=True)
    bars = (0, 4, 8, 16)  # beyond, eigenvalues of 64 pixels may be rounding
    for q in bars:
        exact = power[:, values >= THRESHOLDS[q] * values[-1]].sum(1)
        torch.testing.assert_close(found[1, :, q], exact, atol=1e-6, rtol=0)


def test_a_learned_start_is_learned_once_from_the_drawn_weights(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", {"study": "x", "seed": 0})
    few = Meta(meta_images=4, meta_steps=1, meta_lr=1e-3)
    drawn = start(run, Field("siren", 20.0), SMALL, 0)
    learned = start(run, Field("siren", 20.0, "reptile"), SMALL, 0, few)
    moved = [float((p - q).detach().abs().max()) for p, q in zip(drawn.parameters(), learned.parameters())]
    assert max(moved) == pytest.approx(1e-3, rel=1e-3)  # one step of Adam
    again = start(run, Field("siren", 20.0, "reptile"), SMALL, 0, replace(few, meta_steps=50))
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), learned.parameters()))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_odd_bins_are_empty_for_any_weights(activation: str) -> None:
    net = single_frequency(1.0, hidden=(16, 16), outputs=1, activation=activation, seed=5).double()
    r = coordinates((16, 16), dtype=torch.float64)
    with torch.no_grad():
        assert float(odd_share(net(r)[None, ..., 0])) < 1e-25
    image = ellipses(1, 16, 0).double()
    best = torch.stack([image.roll((8 * i, 8 * j), (1, 2)) for i in (0, 1) for j in (0, 1)]).mean(0)
    assert float(odd_share(best)) < 1e-25
    assert psnr(best, image) == pytest.approx(recovery_bound(image[0], 1.0).psnr)
    assert float(odd_share(image)) > 1e-3


def test_colour_images_are_recovered_in_all_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(recovery, "colour_images", lambda *_: photograph)
    few = {"images": "astronaut", "n": 1, "starts": 2, "steps": 20}
    run = Run.create(tmp_path / "r", configure("fields/fig5.3", "smoke", overrides=few))
    numbers = execute(run).numbers
    assert numbers["PSNR, f0 = 1"].n == 2
    assert numbers["largest energy at odd bins, f0 = 1"].value < 1e-10
    assert run.load_arrays("f0 = 1 0")["image"].shape == (16, 16, 3)
    assert "image" not in run.load_arrays("f0 = 1 1")
    exact = recovery_bound(photograph[0].movedim(0, -1), 1.0).psnr
    assert numbers["bound of PSNR, f0 = 1"].value == pytest.approx(exact)


def test_fine_share_of_a_low_pass() -> None:
    r = torch.arange(32) / 32
    coarse, fine = torch.sin(2 * torch.pi * 2 * r), torch.sin(2 * torch.pi * 9 * r)  # below and beyond 32 / 8
    target = (coarse + fine).expand(1, 32, 32).double()
    low = coarse.expand(1, 32, 32).double()
    half_way = (coarse + 0.5 * fine).expand(1, 32, 32).double()
    assert float(fine_share(low, target)) == pytest.approx(0, abs=1e-6)
    assert float(fine_share(half_way, target)) == pytest.approx(0.75, abs=1e-6)


def test_images() -> None:
    found = grey_images("digits", "test", 20, 8, seed=0)
    every = data.load("digits", "test").x[:, 0]
    assert all(bool((every == image).flatten(1).all(1).any()) for image in found)  # untouched at their own size
    assert torch.equal(found, grey_images("digits", "test", 20, 8, seed=0))
    with pytest.raises(InputError, match="'ellipse'"):
        grey_images("ellipse", "test", 2, 16, seed=0)
    with pytest.raises(InputError, match="repeat pixels"):
        grey_images("digits", "test", 2, 16, seed=0)
    with pytest.raises(InputError, match="were asked for"):
        grey_images("digits", "test", 10_000, 8, seed=0)
    drawn = ellipses(50, 16, seed=0)
    assert 0 <= float(drawn.min()) < float(drawn.max()) <= 1
    assert float(drawn[:, 6:10, 6:10].mean()) > float(drawn[:, 0].mean()) + 0.1  # a head in the middle


def test_half_of_the_pixels() -> None:
    for side in (4, 7):
        assert int(half(side, 0).sum()) == side * side // 2
    assert not torch.equal(half(8, 0), half(8, 1))


def test_principal_components_span_a_planted_space() -> None:
    basis = torch.linalg.qr(torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    weights = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = principal((weights @ basis.T).reshape(20, 4, 4), 3)
    torch.testing.assert_close(found @ found.T, basis @ basis.T)


def test_mean_frequency_does_not_see_edges_that_do_not_meet() -> None:
    side = 32
    slope = torch.linspace(-1, 1, side, dtype=torch.float64).expand(1, side, side)  # half a cycle, a jump at the edge
    assert 0.5 <= float(mean_frequencies(slope)) < 0.55
    m, n = 6, 8
    i = torch.arange(side, dtype=torch.float64) + 0.5
    wave = torch.cos(torch.pi * i * m / side)[:, None] * torch.cos(torch.pi * i * n / side)
    assert float(mean_frequencies(wave[None])) == pytest.approx(math.hypot(m, n) / 2)


def test_a_largest_weight_that_is_small_is_refused(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure("fields/fig5.2", "smoke", overrides={"largest": 0.5}))
    with pytest.raises(InputError, match=r"largest=0\.5 is no large weight"):
        execute(run)
