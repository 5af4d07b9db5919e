"""Fig. 5.6: the first atoms (eigenfunctions of the tangent kernel) of SIRENs, and of a meta-learned SIREN, as images.

Frequencies are those of cosines, not of the DFT, where an atom whose edges do not meet counts as a high frequency.
Whether atoms look like the images is for the eye: see the picture.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from scipy.fft import dctn
from torch import Tensor

from biascope.linalg import subspace_overlap
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve, mean_of_ranks, spearman, through
from biascope.studies.pictures import picture, signed
from biascope.support import derive, progress
from biascope_papers.fields.setting import (
    LEGEND,
    META,
    SETTING,
    Field,
    Meta,
    Setting,
    atoms_of,
    stacked,
    start,
    with_meta,
)

SHOWN = 6
CAPTION = "The first atoms of each network (first seed), red above zero and blue below."


@study("fields/fig5.6", sizes=with_meta({"atoms": 5}, {}, {"sigmas": (1.0, 10.0)}))
def fig5_6(
    run: Run,
    *,
    setting: Setting = SETTING,
    meta: Meta = META,
    w0s: Annotated[tuple[float, ...], "first frequencies of the SIRENs"] = (5.0, 30.0, 100.0),
    sigmas: Annotated[tuple[float, ...], "of FFNs beside them, and a ReLU network; none: neither"] = (),
    meta_w0: Annotated[float, "w0 of the SIREN whose start is meta-learned (MAML)"] = 30.0,
    atoms: Annotated[int, "how many first atoms are measured"] = 10,
) -> StudyResult:
    """Frequencies of the first atoms against w0, and their likeness to images after meta-learning."""
    w0s = tuple(sorted(w0s))
    plain, learned = Field("siren", meta_w0), Field("siren", meta_w0, "maml")
    others = [Field("relu"), *(Field("ffn", sigma) for sigma in sigmas)] if sigmas else []
    fields = list(dict.fromkeys([*others, *(Field("siren", w0) for w0 in w0s), plain, learned]))

    found = first_atoms(run, fields, setting, meta, atoms)
    frequencies = {field: stacked(each, "frequencies") for field, each in found.items()}  # [seeds, atoms]
    overlaps = {field: torch.tensor([e["overlap"] for e in each], dtype=torch.float64) for field, each in found.items()}
    sweep = torch.stack([frequencies[Field("siren", w0)].mean(1) for w0 in w0s], 1)  # [seeds, w0]
    ranks = mean_of_ranks([spearman(w0s, row) for row in sweep.tolist()], len(w0s))
    rise = Estimate.of(sweep[:, -1] - sweep[:, 0])
    gain = Estimate.of(overlaps[learned] - overlaps[plain])
    over = {field: Estimate.of(overlaps[learned] - each) for field, each in overlaps.items() if not field.meta}
    first = f"mean frequency of the first {atoms} atoms"
    numbers = {f"{first}, {f.title}": Estimate.of(each.mean(1)) for f, each in frequencies.items()}
    overlap = {f.title: Estimate.of(each) for f, each in overlaps.items()}
    numbers |= {f"overlap with images, {title}": each for title, each in overlap.items()}
    numbers |= {"rank correlation of w0 and mean frequency": ranks, "rise of the mean frequency": rise}
    numbers["overlap gained by meta-learning"] = gain
    numbers |= {f"overlap, meta-learned minus {field.title}": each for field, each in over.items()}
    draw(run, found)
    charts = (
        Chart(
            "frequencies", "Mean frequency of the first atoms", "atom", "cycles over the image",
            tuple(curve(f.title, range(1, atoms + 1), each) for f, each in frequencies.items()),
            alt="Mean frequency of the first atoms, one curve for each network.", caption=LEGEND,
        ),
        Chart(
            "overlaps", "Overlap of the first atoms with principal components of images", "network", "overlap",
            (through("first atoms", range(1, len(fields) + 1), overlap.values(), "points"),),
            alt="One point with its error for each network.",
            caption=f"Overlap of the span of the first {atoms} atoms with that of as many principal components of "
            "held-out images: 1 if they are the same. Bars: one standard error over seeds.",
            x_names=tuple(overlap),
        ),
    )  # fmt: skip
    return StudyResult(
        measured=f"The {first} rises by {rise} cycles from w0 = {w0s[0]:g} to {w0s[-1]:g}; their overlap with the "
        f"first principal components of held-out images is {gain} more after MAML. {setting}",
        numbers=numbers,
        figures=charts,
    )


def first_atoms(
    run: Run, fields: Sequence[Field], setting: Setting, meta: Meta, atoms: int
) -> dict[Field, list[dict[str, Any]]]:
    """The first atoms of networks, for every seed: frequencies, likeness to images, the atoms and a few as images."""

    def one(field: Field, seed: int) -> dict[str, Any]:
        made = atoms_of(start(run, field, setting, seed, meta), setting)
        images = setting.signals(derive(run.seed, "images", seed))
        return {
            "frequencies": mean_frequencies(made.images()[:atoms]),
            "overlap": subspace_overlap(made.atoms[:, :atoms], principal(images, atoms)),
            "atoms": made.atoms[:, :atoms].float().contiguous(),
            "first": made.images()[:SHOWN].float().contiguous(),
        }

    return {
        field: run.cached_each(f"atoms {field.title}", range(setting.seeds), partial(one, field))
        for field in progress(fields, "first atoms")
    }


def mean_frequencies(images: Tensor) -> Tensor:
    """Mean frequency [k] of images [k, h, w], weighted by power, in cycles over the image; in cosines (DCT-II)."""
    power = torch.from_numpy(dctn(images.double().numpy(), axes=(1, 2), norm="ortho")).square()
    rows, columns = (torch.arange(n, dtype=torch.float64) / 2 for n in images.shape[1:])
    radius = (rows[:, None].square() + columns.square()).sqrt()
    return (power * radius).sum((1, 2)) / power.sum((1, 2))


def principal(images: Tensor, k: int) -> Tensor:
    """The first k principal components [pixels, k] of images [n, h, w], orthonormal, the mean not taken out."""
    components: Tensor = torch.linalg.svd(images.double().flatten(1), full_matrices=False).Vh[:k].T
    return components


def draw(run: Run, found: Mapping[Field, list[dict[str, Any]]]) -> None:
    """The first atoms of the first seed, one row per network."""

    def paint(axes: Any) -> None:
        for row, (field, each) in zip(axes, found.items()):
            for axis, atom in zip(row, each[0]["first"]):
                signed(axis, atom)
            row[0].set_ylabel(field.title, fontsize=9)
        for i, axis in enumerate(axes[0]):
            axis.set_title(f"{i + 1}", fontsize=10)

    columns = len(next(iter(found.values()))[0]["first"])
    picture(run, "atoms", len(found), columns, paint, (1.05, 1.1), caption=CAPTION)
