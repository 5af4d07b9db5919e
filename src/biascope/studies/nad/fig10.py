"""Fig. 10: the map of Fig. 1 over the sine-like (Im) Fourier directions, beside the cosine-like ones.

The four bins that are their own conjugates have no Im vector: they stay empty on the map.

Rule for the verdict, set before any run: over the bins that have both, the accuracies on Im and Re vectors correlate by
more than 0.5 even two standard errors down (errors from leaving out one bin at a time).
"""

from biascope.data.fourier import FourierBasis, Part, fourier_vectors
from biascope.studies.estimates import above, correlation
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = "The map over sine-like Fourier directions shows the same pattern as the one over cosine-like directions."


@study(
    "nad/fig10",
    paper="nad",
    figure="10",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "sample": 10},
        "laptop": {**d.LAPTOP, "stride": 4, "sample": 16},
        "paper": {},
    },
)
def fig10(
    run: Run,
    *,
    net: d.Net = "lenet",
    image_size: d.Side = 32,
    width: d.Width = 0,
    stride: f.Stride = 2,
    window: f.Window = 0,
    sample: f.Sample = 0,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy map over the sine-like (Im) Fourier directions, compared with the cosine-like ones."""
    im = f.bins(image_size, "im", stride, window, sample, run.seed)
    parts: list[Part] = ["re"] * len(im)
    re = FourierBasis(fourier_vectors(im.shape, im.bins, "re"), im.bins, tuple(parts), im.shape)
    factory = d.architecture(net, image_size, width=width)
    sine = d.train_directions(run, f"{net} im", factory, im.vectors, protocol)
    cosine = d.train_directions(run, f"{net} re", factory, re.vectors, protocol)
    same = correlation(sine.test, cosine.test)
    gap_in_accuracy = Estimate.of(sine.test - cosine.test)
    run.save_arrays("map", frequencies=im.frequencies, im=sine.test, re=cosine.test)
    return StudyResult(
        "confirmed" if above(same, 0.5) else "not confirmed",
        CLAIM,
        f"{net}, {len(im)} bins ({protocol}): the accuracies of Im and Re vectors correlate by {same}; Im minus Re is "
        f"{gap_in_accuracy} on average.",
        {
            "correlation of the Im and the Re map": same,
            "accuracy on Im minus accuracy on Re": gap_in_accuracy,
            "mean accuracy, Im": Estimate.of(sine.test),
            "mean accuracy, Re": Estimate.of(cosine.test),
        },
        (
            f.heat_map("im", f"{net}, sine-like (Im) directions", sine.test, im, "im", caption=str(protocol)),
            f.heat_map("re", f"{net}, cosine-like (Re) directions", cosine.test, re, "re", caption=str(protocol)),
        ),
    )
