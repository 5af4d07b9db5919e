"""Fig. 5.6: the first atoms (eigenfunctions of the tangent kernel) of SIRENs, and of a meta-learned SIREN, as images.

Verdict: confirmed if
1. the mean frequency of the first `atoms` atoms is higher at the largest w0 than at the smallest, and its rank
   correlation with w0 positive;
2. the span of the first `atoms` atoms of the meta-learned SIREN overlaps that of the first principal components of
   held-out images (their mean included) more than the span of the same SIREN's drawn atoms does;
each by two standard errors over seeds. Whether atoms look like the images is for the eye: see the picture.
(Changed after the first laptop run: frequencies had been those of the DFT, where an atom whose edges do not meet counts
as a high frequency, so that w0 = 5 and 30 came out alike against all appearance. Cosines have no such jump.)
"""

from typing import Annotated, Any

import torch
from scipy.fft import dctn
from torch import Tensor

from biascope.linalg import subspace_overlap
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, curve, decide, spearman, through
from biascope.studies.function_space.fields_setting import (
    LAPTOP,
    LEGEND,
    META,
    META_LAPTOP,
    META_SMOKE,
    SETTING,
    SMOKE,
    Field,
    Meta,
    Setting,
    atoms_of,
    start,
)
from biascope.studies.pictures import picture, signed
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "Eigenfunctions of a SIREN carry higher frequencies for larger w0, and look like faces after meta-learning."
SHOWN = 6
CAPTION = "The first atoms of each network (first seed), red above zero and blue below."


@study(
    "fields/fig5.6",
    paper="function-space",
    figure="5.6",
    claim=CLAIM,
    sizes={"smoke": SMOKE | META_SMOKE | {"atoms": 5}, "laptop": LAPTOP | META_LAPTOP, "paper": {}},
)
def fig5_6(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0s: Annotated[tuple[float, ...], "first frequencies of the SIRENs"] = (5.0, 30.0, 100.0),
    meta_w0: Annotated[float, "w0 of the SIREN whose start is meta-learned (MAML)"] = 30.0,
    atoms: Annotated[int, "first atoms that are looked at"] = 10,
) -> StudyResult:
    """Frequencies of the first atoms against w0, and their likeness to images after meta-learning."""
    w0s = tuple(sorted(w0s))
    plain, learned = Field("siren", meta_w0), Field("siren", meta_w0, "maml")
    fields = list(dict.fromkeys([*(Field("siren", w0) for w0 in w0s), plain, learned]))
    found = {field: _atoms(run, field, setting, meta, atoms) for field in progress(fields, "networks")}
    means = {field: each[0].mean(1) for field, each in found.items()}  # [seeds]
    overlaps = {field: each[1] for field, each in found.items()}
    sweep = torch.stack([means[Field("siren", w0)] for w0 in w0s], 1)  # [seeds, w0]
    ranks = Estimate.of([spearman(w0s, row) for row in sweep.tolist()])
    rise = Estimate.of(sweep[:, -1] - sweep[:, 0])
    gain = Estimate.of(overlaps[learned] - overlaps[plain])
    numbers = {f"mean frequency of the first {atoms} atoms, {f.title}": Estimate.of(c)
               for f, c in means.items()}  # fmt: skip
    numbers |= {f"overlap with images, {f.title}": Estimate.of(o) for f, o in overlaps.items()}
    numbers |= {"rank correlation of w0 and mean frequency": ranks, "rise of the mean frequency": rise}
    numbers["overlap gained by meta-learning"] = gain
    _draw(run, {field: each[2] for field, each in found.items()})
    return StudyResult(
        decide(above(ranks) and above(rise) and above(gain), [ranks, rise, gain]),
        CLAIM,
        f"The mean frequency of the first {atoms} atoms rises by {rise} cycles from w0 = {w0s[0]:g} to {w0s[-1]:g} "
        f"(rank correlation {ranks}). Their overlap with the first {atoms} principal components of held-out images is "
        f"{numbers[f'overlap with images, {plain.title}']} with drawn weights and {gain} more after MAML "
        f"({meta.meta_steps} steps). {setting.said}",
        numbers,
        (
            Chart(
                "frequencies",
                "Mean frequency of the first atoms",
                "atom",
                "cycles over the image",
                tuple(curve(f.title, range(1, atoms + 1), each[0]) for f, each in found.items()),
                alt="Mean frequency of the first atoms, one curve for each network.",
                caption=f"{LEGEND}",
            ),
            Chart(
                "overlaps",
                "Overlap of the first atoms with principal components of images",
                "network",
                "overlap",
                (
                    through(
                        "first atoms",
                        range(1, len(fields) + 1),
                        [numbers[f"overlap with images, {field.title}"] for field in fields],
                        "points",
                    ),
                ),
                alt="One point with its error for each network.",
                caption=f"Overlap of the span of the first {atoms} atoms with that of as many principal components of "
                "held-out images: 1 if they are the same. Bars: one standard error over seeds.",
                x_names=tuple(field.title for field in fields),
            ),
        ),
    )


def _atoms(run: Run, field: Field, setting: Setting, meta: Meta, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean frequencies [seeds, k], overlaps with images [seeds], the first seed's atoms to show [6, h, w]."""

    def one(seed: int) -> dict[str, Value]:
        made = atoms_of(start(run, field, setting, seed, meta), setting)
        images = setting.signals(derive(run.seed, "images", seed))
        return {
            "frequencies": mean_frequencies(made.images()[:k]),
            "overlap": subspace_overlap(made.atoms[:, :k], principal(images, k)),
            "first": made.images()[:SHOWN].float().contiguous(),
        }

    made = run.cached_each(f"atoms {field.title}", range(setting.seeds), one)
    frequencies = torch.stack([torch.as_tensor(each["frequencies"]) for each in made])
    overlaps = torch.tensor([float(each["overlap"]) for each in made], dtype=torch.float64)  # type: ignore[arg-type]
    return frequencies, overlaps, torch.as_tensor(made[0]["first"])


def mean_frequencies(images: Tensor) -> Tensor:
    """Mean frequency [k] of images [k, h, w], weighted by power, in cycles over the image; in cosines (DCT-II).

    Example:
        >>> line = torch.cos(torch.pi * (torch.arange(8) + 0.5) * 3 / 8)  # one and a half cycles
        >>> round(float(mean_frequencies(line.expand(1, 8, 8))), 6)
        1.5
    """
    power = torch.from_numpy(dctn(images.double().numpy(), axes=(1, 2), norm="ortho")).square()
    rows, columns = (torch.arange(n, dtype=torch.float64) / 2 for n in images.shape[1:])
    radius = (rows[:, None].square() + columns.square()).sqrt()
    means: Tensor = (power * radius).sum((1, 2)) / power.sum((1, 2))
    return means


def principal(images: Tensor, k: int) -> Tensor:
    """The first k principal components [pixels, k] of images [n, h, w], orthonormal, the mean not taken out.

    Example:
        >>> principal(torch.eye(4).reshape(4, 2, 2)[:3], 3).shape
        torch.Size([4, 3])
    """
    components: Tensor = torch.linalg.svd(images.double().flatten(1), full_matrices=False).Vh[:k].T
    return components


def _draw(run: Run, first: dict[Field, Tensor]) -> None:
    """The first atoms, one row per network."""

    def draw(axes: Any) -> None:
        for row, (field, atoms) in zip(axes, first.items()):
            for axis, atom in zip(row, atoms):
                signed(axis, atom)
            row[0].set_ylabel(field.title, fontsize=9)
        for i, axis in enumerate(axes[0]):
            axis.set_title(f"{i + 1}", fontsize=10)

    picture(run, "atoms", len(first), len(next(iter(first.values()))), draw, (1.05, 1.1), caption=CAPTION)
