"""Fig. 3: the map of Fig. 1 once more, without pooling.

"Without pooling" does not say whether strided convolutions also go: `strides` does one, the other, or both (ResNet-18;
LeNet, VGG-11 and DenseNet-121 have no strided convolutions, and only one variant).

Rule for the verdict, set before any run, for every variant without pooling: the spread of the accuracy over the bins is
smaller than with pooling, and the bins that are bad with pooling (the worse half, called so by their transposed twin)
become better on average; both by two standard errors.
"""

from typing import Annotated, Literal

from biascope.studies.estimates import above, difference, spread
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "Without pooling the accuracy on D(v) is more equal over the frequencies of v, and higher at the bad ones."
STRIDED = ("resnet18",)


@study(
    "nad/fig3",
    paper="nad",
    figure="3",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "sample": 12, "n_test": 128, "epochs": 12},
        "laptop": {**d.LAPTOP, "stride": 4, "sample": 12, "n": 3000},
        "paper": {},
    },
)
def fig3(
    run: Run,
    *,
    net: d.Net = "lenet",
    strides: Annotated[Literal["keep", "remove", "both"], "what becomes of strided convolutions"] = "both",
    image_size: d.Side = 32,
    width: d.Width = 0,
    stride: f.Stride = 2,
    window: f.Window = 0,
    sample: f.Sample = 0,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy maps with and without pooling."""
    basis = f.bins(image_size, "re", stride, window, sample, run.seed)
    partner = f.partners(basis)
    pooled = d.train_directions(run, net, d.architecture(net, image_size, width=width), basis.vectors, protocol)
    numbers = {
        "spread over bins, with pooling": spread(pooled.test),
        "mean, with pooling": Estimate.of(pooled.test),
    }
    maps = [f.heat_map("with-pooling", f"{net}, as it is", pooled.test, basis, caption=str(protocol))]
    bad, holds, said = f.worst_by_partner(pooled.test, partner), [], []
    for label, options in variants(net, strides).items():
        factory = d.architecture(f"{net}-nopool", image_size, width=width, **options)
        found = d.train_directions(run, label, factory, basis.vectors, protocol)
        numbers[f"spread over bins, {label}"] = spread(found.test)
        numbers[f"mean, {label}"] = Estimate.of(found.test)
        flatter = difference(numbers["spread over bins, with pooling"], numbers[f"spread over bins, {label}"])
        numbers[f"spread lost, {label}"] = flatter
        maps.append(f.heat_map(label.replace(" ", "-"), f"{net}, {label}", found.test, basis, caption=str(protocol)))
        if len(bad) < 4:
            continue
        better = Estimate.of((found.test - pooled.test)[bad])
        numbers[f"gain at the bad bins, {label}"] = better
        holds.append(above(flatter) and above(better))
        said.append(f"{label}: spread smaller by {flatter}, bad bins better by {better}")
    return StudyResult(
        "not tested" if not holds else "confirmed" if all(holds) else "not confirmed",
        CLAIM,
        f"{net}, {len(basis)} bins ({protocol}): spread of the accuracy over bins "
        f"{numbers['spread over bins, with pooling']} with pooling. {'; '.join(said) or 'Too few bins to compare'}.",
        numbers,
        tuple(maps),
    )


def variants(net: str, strides: Literal["keep", "remove", "both"]) -> dict[str, dict[str, int]]:
    """The networks without pooling, by name, and the options that make them.

    Example:
        >>> variants("lenet", "both"), list(variants("resnet18", "both"))
        ({'no pooling': {}}, ['no pooling', 'no pooling, no strides'])
    """
    if net not in STRIDED:
        return {"no pooling": {}}
    found: dict[str, dict[str, int]] = {}
    if strides != "remove":
        found["no pooling"] = {}
    if strides != "keep":
        found["no pooling, no strides"] = {"stride": 1}
    return found
