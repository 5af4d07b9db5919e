"""Fig. 5.5, 5.7, C.2 and C.3: energy of images in the atoms of a network, and how fast it fits them.

Atoms are the eigenfunctions of the tangent kernel on the grid, E(lambda) the share of the images' energy in atoms with
at least lambda times the largest eigenvalue (`fields.dictionary` says what is corrected in Eq. 5.14). One number per
network: the area under E over log10 lambda from 1 to 1e-10. Images are fitted on a random half of their pixels.
"""

from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from biascope.linalg import subspace_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, errors_over, mean_error, mean_of_ranks, over_seeds, spearman, through
from biascope.support import progress
from biascope_papers.fields.atoms import draw, first_atoms
from biascope_papers.fields.setting import (
    LEGEND,
    META,
    SETTING,
    THRESHOLDS,
    Field,
    Meta,
    Setting,
    areas,
    energies,
    psnrs,
    with_meta,
)

W0S = (5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0)
SIGMAS = (0.1, 0.5, 1.0, 5.0, 10.0)
W0s = Annotated[tuple[float, ...], "first frequencies of the SIRENs"]
MetaW0 = Annotated[float, "w0 of the SIREN whose start is meta-learned (MAML)"]
Iterations = Annotated[int, "full-batch steps of the fits"]
Rate = Annotated[float, "of Adam, for drawn weights"]
# a step of Adam moves the function by lr x width: the narrower networks of the small sizes have a larger rate
FEWER = {"n": 20, "lr": 4e-4}


@study("fields/fig5.5", sizes=with_meta({"w0s": (2.0, 15.0, 100.0)}, {}))
def fig5_5(
    run: Run, *, setting: Setting = SETTING, meta: Meta = META, w0s: W0s = W0S, meta_w0: MetaW0 = 30.0
) -> StudyResult:
    """Energy of images in the atoms of a ReLU network, of SIRENs, and of a meta-learned SIREN."""
    learned, sirens = Field("siren", meta_w0, "maml"), [Field("siren", w0) for w0 in sorted(w0s)]
    drawn = [Field("relu"), *sirens]
    shares = {field: energies(run, field, setting, meta) for field in progress([*drawn, learned], "networks")}
    area = {field: areas(each) for field, each in shares.items()}  # [seeds, n]
    numbers = {f"area under E, {field.title}": over_seeds(each) for field, each in area.items()}
    low, peak, high = sirens[0], max(sirens, key=lambda field: float(area[field].mean())), sirens[-1]
    gains = {field: over_seeds(area[learned] - area[field]) for field in drawn}
    best = min(gains, key=lambda field: gains[field].value)
    numbers |= {
        f"area, {two.title} minus {one.title}": over_seeds(area[two] - area[one]) for one, two in pairwise(sirens)
    }
    rise, recede = (over_seeds(area[peak] - area[end]) for end in (low, high))
    numbers |= {"area, best w0 minus the smallest": rise, "area, best w0 minus the largest": recede}
    numbers |= {f"area, meta-learned minus {field.title}": gain for field, gain in gains.items()}
    return StudyResult(
        measured=f"Of the SIRENs, w0 = {peak.scale:g} has the largest area under E, meta-learning {gains[best]} more "
        f"than {best.title}, the best without. {setting} {errors_over(setting.seeds, setting.n, 'images')}.",
        numbers=numbers,
        figures=(_energy(shares), _areas(sirens, numbers, learned)),
    )


@study("fields/fig5.7", sizes=with_meta({"w0s": (2.0, 15.0, 100.0), "lr": 1e-3}, FEWER))
def fig5_7(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0s: W0s = W0S,
    meta_w0: MetaW0 = 30.0,
    iterations: Iterations = 10,
    lr: Rate = 1e-4,
) -> StudyResult:
    """PSNR of the first iterations against the energy in leading atoms."""
    fields = [Field("relu"), *(Field("siren", w0) for w0 in sorted(w0s)), Field("siren", meta_w0, "maml")]
    area, train, test = {}, {}, {}
    for field in progress(fields, "networks"):
        area[field] = areas(energies(run, field, setting, meta))  # [seeds, n]
        train[field], test[field] = psnrs(run, field, setting, iterations, lr, meta)  # [seeds, n, iterations + 1]
    curves = {"test": test, "train": train}
    by_area = torch.stack([area[field].mean(1) for field in fields], 1)  # [seeds, networks]
    ends = {name: torch.stack([p[f][:, :, -1].mean(1) for f in fields], 1) for name, p in curves.items()}
    ranks = {n: mean_of_ranks(map(spearman, by_area.tolist(), e.tolist()), len(fields)) for n, e in ends.items()}
    numbers = {f"rank correlation of area and {name} PSNR": value for name, value in ranks.items()}
    for field in fields:
        numbers[f"area under E, {field.title}"] = over_seeds(area[field])
        numbers[f"test PSNR, {field.title}"] = over_seeds(test[field][:, :, -1])
    for field in fields[:-1]:
        gain = test[fields[-1]][:, :, -1] - test[field][:, :, -1]
        numbers[f"test PSNR, meta-learned minus {field.title}"] = over_seeds(gain)
    points = (Series.of(f.title, by_area[:, i], ends["test"][:, i], style="points") for i, f in enumerate(fields))
    order = Chart(
        "order", "Energy in leading atoms and PSNR", "area under E", f"test PSNR after {iterations} iterations (dB)",
        tuple(points), alt="One point for each network and seed: PSNR against the area under E.",
        caption="One point for each seed. Area under E: 1 if the first atoms have all energy of the images.",
    )  # fmt: skip
    return StudyResult(
        measured=f"Over {len(fields)} networks the area under E and the PSNR after {iterations} iterations have rank "
        f"correlations {ranks['test']} (test pixels) and {ranks['train']} (fitted ones). {setting} Errors over seeds.",
        numbers=numbers,
        figures=(
            _psnr("test-psnr", "PSNR on the other half of the pixels", test, "PSNR (dB)", LEGEND),
            _psnr("train-psnr", "PSNR on the fitted half of the pixels", train, "PSNR (dB)", LEGEND),
            order,
        ),
    )


@study("fields/figC.2", sizes=with_meta({"sigmas": (0.5, 1.0, 5.0), "lr": 1e-3}, FEWER))
def figC_2(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    sigmas: Annotated[tuple[float, ...], "deviations of the frequencies, cycles per image"] = SIGMAS,
    meta_sigma: Annotated[float, "sigma of the network whose start is meta-learned (MAML)"] = 1.0,
    iterations: Iterations = 3,
    lr: Rate = 1e-4,
) -> StudyResult:
    """PSNR after three iterations of Fourier feature networks, of a ReLU network, and of a meta-learned one."""
    learned = Field("ffn", meta_sigma, "maml")
    drawn = [Field("relu"), *(Field("ffn", sigma) for sigma in sorted(sigmas))]
    shares, test = _measured(run, [*drawn, learned], setting, meta, iterations, lr)
    end = {field: each[:, :, -1] for field, each in test.items()}  # [seeds, n]
    numbers = {f"test PSNR, {field.title}": over_seeds(each) for field, each in end.items()}
    for field, curves in test.items():  # a learned mean is ahead before anything is fitted
        numbers[f"test PSNR before the first iteration, {field.title}"] = over_seeds(curves[:, :, 0])
    numbers |= {f"area under E, {field.title}": over_seeds(areas(each)) for field, each in shares.items()}
    numbers |= {f"decibels over {field.title}": over_seeds(end[learned] - end[field]) for field in drawn}
    plain = Field("ffn", meta_sigma)
    if plain in drawn:
        numbers["area gained by meta-learning"] = over_seeds(areas(shares[learned]) - areas(shares[plain]))
    area = {field: areas(each) for field, each in shares.items()}
    rows = [torch.stack([each[field].mean(1) for field in test], 1).tolist() for each in (area, end)]
    numbers["rank correlation of area and test PSNR, all"] = mean_of_ranks(map(spearman, *rows), len(test))
    reached = ", ".join(f"{numbers[f'test PSNR, {field.title}']} ({field.title})" for field in test)
    return StudyResult(
        measured=f"Test PSNR after {iterations} iterations in dB: {reached}. {setting} "
        f"{errors_over(setting.seeds, setting.n, 'images')}.",
        numbers=numbers,
        figures=(_psnr("psnr", "PSNR of Fourier feature networks", test), _energy(shares)),
    )


@study("fields/figC.3", sizes=with_meta({"lr": 1e-3}, FEWER))
def figC_3(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0: Annotated[float, "first frequency of the SIREN"] = 30.0,
    iterations: Iterations = 10,
    lr: Rate = 1e-4,
    atoms: Annotated[int, "how many first atoms are compared"] = 10,
) -> StudyResult:
    """Energy, PSNR and first atoms from starts learned by Reptile in place of MAML."""
    plain, maml, reptile = Field("siren", w0), Field("siren", w0, "maml"), Field("siren", w0, "reptile")
    shares, test = _measured(run, [plain, maml, reptile], setting, meta, iterations, lr)
    area = {field: areas(each) for field, each in shares.items()}
    end = {field: each[:, :, -1] for field, each in test.items()}
    numbers: dict[str, Estimate] = {}
    for field in (maml, reptile):
        numbers[f"area gained, {field.title}"] = over_seeds(area[field] - area[plain])
        numbers[f"test PSNR gained, {field.title}"] = over_seeds(end[field] - end[plain])
    more, higher, more_reptile, higher_reptile = numbers.values()
    for field in test:
        numbers[f"area under E, {field.title}"] = over_seeds(area[field])
        numbers[f"test PSNR, {field.title}"] = over_seeds(end[field])
    numbers["area, Reptile minus MAML"] = over_seeds(area[reptile] - area[maml])
    numbers["test PSNR, Reptile minus MAML"] = over_seeds(end[reptile] - end[maml])
    found = first_atoms(run, [plain, maml, reptile], setting, meta, atoms)
    draw(run, found)
    like = {field: Estimate.of([row["overlap"] for row in rows]) for field, rows in found.items()}
    numbers |= {f"overlap with images, {field.title}": value for field, value in like.items()}
    for one, two in ((maml, plain), (reptile, plain), (reptile, maml)):
        apart = [a["overlap"] - b["overlap"] for a, b in zip(found[one], found[two])]
        numbers[f"overlap with images, {_short(one)} minus {_short(two)}"] = Estimate.of(apart)
    for field in (reptile, plain):
        spans = [subspace_overlap(a["atoms"], b["atoms"]) for a, b in zip(found[field], found[maml])]
        numbers[f"overlap of the first atoms, {_short(field)} and MAML"] = Estimate.of(spans)
    return StudyResult(
        measured=f"Against drawn weights the area under E grows by {more} (MAML) and {more_reptile} (Reptile), the "
        f"test PSNR by {higher} and {higher_reptile} dB. {setting} {errors_over(setting.seeds, setting.n, 'images')}.",
        numbers=numbers,
        figures=(_energy(shares), _psnr("psnr", "PSNR on the other half of the pixels", test)),
    )


def _short(field: Field) -> str:
    return {"maml": "MAML", "reptile": "Reptile"}.get(field.meta, "drawn weights")


def _measured(
    run: Run, fields: list[Field], setting: Setting, meta: Meta, iterations: int, lr: float
) -> tuple[dict[Field, Tensor], dict[Field, Tensor]]:
    """E [seeds, n, q] and test PSNR [seeds, n, iterations + 1] of every network."""
    shares = {field: energies(run, field, setting, meta) for field in progress(fields, "atoms")}
    return shares, {field: psnrs(run, field, setting, iterations, lr, meta)[1] for field in progress(fields, "fits")}


def _energy(shares: dict[Field, Tensor]) -> Chart:
    """E over lambda: {network: [seeds, n, q]}, mean over both."""
    return Chart(
        "energy", "Energy of images in the atoms of networks", "eigenvalue relative to the largest, at least",
        "share of energy E",
        tuple(Series.of(field.title, THRESHOLDS, *mean_error(each.mean(1))) for field, each in shares.items()),
        alt="E rises from 0 at the largest eigenvalue to 1 at small ones; the sooner, the better the dictionary.",
        caption="E: share of the images' energy in atoms (eigenfunctions of the tangent kernel) with such eigenvalues. "
        f"{LEGEND}",
        log_x=True, falling_x=True,
    )  # fmt: skip


def _areas(sirens: list[Field], numbers: dict[str, Estimate], learned: Field) -> Chart:
    w0s = [field.scale for field in sirens]
    levels = {"ReLU": numbers["area under E, ReLU"], learned.title: numbers[f"area under E, {learned.title}"]}
    return Chart(
        "areas", "Area under the energy against w0", "w0", "area under E",
        (
            through("SIREN", w0s, [numbers[f"area under E, {field.title}"] for field in sirens]),
            *(Series.of(name, (w0s[0], w0s[-1]), [e.value] * 2, style="dashed") for name, e in levels.items()),
        ),
        alt="The area under E against w0; dashed lines for ReLU and for the learned start.",
        caption="Area over log10 of the eigenvalue, as a share of the whole: 1 if the first atoms have all energy. "
        "Mean over seeds; band: one standard error.",
        log_x=True,
    )  # fmt: skip


def _psnr(
    name: str,
    title: str,
    curves: dict[Field, Tensor],
    label: str = "test PSNR (dB)",
    caption: str = f"On the pixels that were not fitted. {LEGEND}",
) -> Chart:
    """PSNR over the first iterations: {network: [seeds, n, iterations + 1]}, mean over the images."""
    series = tuple(curve(field.title, range(each.shape[-1]), each.mean(1)) for field, each in curves.items())
    alt = "PSNR over the first iterations, one curve for each network."
    return Chart(name, title, "iteration", label, series, alt=alt, caption=caption)
