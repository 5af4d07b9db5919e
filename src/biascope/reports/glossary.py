"""One line on every quantity of a card: as a hint on its name, and as a list at the end of the page."""

from collections.abc import Iterable

from biascope.reports.html import Html, join, tag

MEANINGS = {
    "Networks sampled": "random initialisations whose input gradients are averaged",
    "Derivative": "how input gradients are taken: central differences of step 100, or exactly by autograd",
    "Above the band": "directions whose eigenvalue is larger than an isotropic network would show by chance",
    "Effective rank": "exp of the entropy of the normalised eigenvalues: how many directions matter",
    "G against the identity": "cosine between the average geometry G and the identity matrix; an isotropic network "
    "would show the value in brackets",
    "First direction found again": "share of the first direction that other networks show at other inputs, 0 to 1",
    "Average geometry G": "mean of g gᵀ over initialisations, with g the gradient of the first output by the input",
    "Trainings": "small training runs: directions times seeds",
    "First direction": "test accuracy when the classes differ along the most preferred direction only",
    "Last direction": "test accuracy when the classes differ along the least preferred direction only",
    "Task": "what the steps are taken on; D(v) is a data set whose two classes differ along the direction v only",
    "Residual": "error of the tangent model, relative to how far the outputs have moved: 0 is linear",
    "Signs kept": "share of activations, over examples, with the sign they had at initialisation",
    "Complexity": "sum over steps of ‖Δw‖ times the norm of the tangent features: the length of the path in function "
    "space",
    "First eigenvalue": "share of the kernel's trace that the function learned first holds",
    "Trace / n": "mean squared norm of an example's gradient by the weights",
    "Kernel": "the tangent kernel J Jᵀ, with J the derivative of the outputs by the weights",
    "Alignment": "centred cosine between the kernel and the kernel of the labels",
    "Chance": "the alignment with randomly permuted labels",
    "Full kernel": "alignment of the kernel over all pairs of outputs; bounded while the kernel treats all "
    "outputs alike, until training couples them",
    "Loss": "training loss, at the first and at the last step",
}
TERMS = {"cycles per pixel": "frequency: 0 is constant, 0.5 alternates from pixel to pixel",
         "cycles per sample": "frequency: 0 is constant, 0.5 alternates from sample to sample",
         "Marchenko-Pastur": "range of the eigenvalues of a sample covariance when no direction is preferred",
         "Average geometry G": MEANINGS["Average geometry G"]}  # fmt: skip


def meaning(name: str) -> str | None:
    """The definition of a quantity on a card; its name may say when it was measured.

    Example:
        >>> meaning("Trace / n, initialisation")
        "mean squared norm of an example's gradient by the weights"
    """
    return MEANINGS.get(name) or MEANINGS.get(name.partition(",")[0])


def glossary(blocks: Iterable[str]) -> Html:
    """A section with the quantities that occur in some blocks of a page."""
    text = "".join(blocks)
    found = {name: told for name, told in MEANINGS.items() if f">{name}</dt>" in text or f">{name}, " in text}
    found |= {name: told for name, told in TERMS.items() if name in text}
    if not found:
        return Html("")
    rows = join(tag("div", tag("dt", name), tag("dd", told)) for name, told in found.items())
    return tag("section", tag("h2", "What the quantities are"), tag("dl", rows, class_="symbols"), id="quantities")
