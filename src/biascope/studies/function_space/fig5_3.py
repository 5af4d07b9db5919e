"""Fig. 5.3: images recovered by Fourier feature networks with one frequency, f0 = 1 or 0.5, and with many (sigma 10).

Verdict (see `recovering.py`): confirmed if with f0 = 1 the energy at odd DFT bins is below 1e-6 and PSNR under the
closed-form bound (0.01 dB for rounding) on every image; PSNR rises from f0 = 1 to f0 = 0.5 to many frequencies; and
f0 = 0.5 keeps less of the fine detail (frequencies beyond an eighth of the side) than many frequencies do. Differences
are paired over images and hold by two standard errors.
"""

from biascope.fields import single_frequency
from biascope.fields.networks import seeded
from biascope.nets import FFN
from biascope.studies.function_space.recovering import LAPTOP, RECOVERING, SMOKE, Recovering, recover
from biascope.studies.registry import study
from biascope.studies.result import StudyResult
from biascope.studies.runs import Run

CLAIM = "A field with base frequency 1 ghosts, with 0.5 blurs, with random Fourier features of sigma 10 is sharp."


@study(
    "fields/fig5.3",
    paper="function-space",
    figure="5.3",
    claim=CLAIM,
    sizes={"smoke": SMOKE, "laptop": LAPTOP, "paper": {}},
)
def fig5_3(run: Run, *, options: Recovering = RECOVERING) -> StudyResult:
    """Ghosts, blur and a sharp image from Fourier feature networks."""
    hidden = (options.width,) * 3
    builds = {
        "f0 = 1": lambda seed: single_frequency(1.0, hidden=hidden, outputs=1, seed=seed),
        "f0 = 0.5": lambda seed: single_frequency(0.5, hidden=hidden, outputs=1, seed=seed),
        "sigma = 10": lambda seed: seeded(FFN, seed, hidden=hidden, mapping_size=options.features, sigma=10.0),
    }
    return recover(run, options, builds, CLAIM)
