"""Table 5.2 (MNIST): reconstructions of ALI, ALICE and ALI with MINE.

Networks and objectives: Tables C.4 to C.7 and Eq. 19, MINE on the encoder's joint, clipped. The error is the Euclidean
distance of an image and its reconstruction (pixels in [-1, 1]); accuracy the share of test images whose reconstruction
has the image's true label by a classifier trained here; MS-SSIM has the two scales that 28 pixels allow. CelebA needs
data that are not there. Published (error, accuracy, MS-SSIM): ALI 14.24, 45.95 %, 0.97; ALICE (l2) 3.20, 99.03 %, 0.97;
ALICE (adv.) 5.20, 98.17 %, 0.98; MINE 9.73, 96.10 %, 0.99.

Verdict rule. "Confirmed" if all hold on the same seeds, each by two standard errors over seeds:
1. The error of ALI with MINE is below that of ALI, and its accuracy above.
2. Its error is above that of ALICE (l2): it lies between them.
3. Its MS-SSIM is above that of ALI.
"Not tested" where the best of the four models has an accuracy below 0.5: nothing reconstructs yet. (This condition was
added after a first short run, in which none did and which would have been "not confirmed".)
"""

from functools import partial
from typing import Annotated, Any

import torch

from biascope.seeds import derive
from biascope.studies.estimates import above, decide
from biascope.studies.mine import stacked_digits as digits
from biascope.studies.mine.ali import ARMS, Arm, by_model
from biascope.studies.mine.digit_ali import Setting, train
from biascope.studies.mine.similarity import ms_ssim
from biascope.studies.pictures import picture
from biascope.studies.registry import study
from biascope.studies.result import Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "On MNIST ALI with MINE reconstructs better than ALI in error, accuracy and MS-SSIM, with an error above that of "
    "ALICE (l2). (The published 9.73, 96.1 % and 0.99, and the MS-SSIM and accuracy of ALICE, are not judged.)"
)
SHOWN = 25
RECOGNISED = 0.5  # accuracy of the best model from which there is something to compare
MEASURES = ("error", "accuracy", "MS-SSIM")
CAPTION = "Test images, their reconstructions and samples by each model (first seed)."
CAPTIONS = {
    "error": "Euclidean distance of a test image and its reconstruction, pixels in [-1, 1].",
    "accuracy": "Share of test images whose reconstruction is classified as what they are.",
    "MS-SSIM": "Structural similarity on two scales: 1 for equal images.",
}


@study(
    "mine/table5.2",
    paper="alignment",
    figure="Table 5.2 (MNIST)",
    claim=CLAIM,
    sizes={
        "smoke": {"dataset": "digits", "n_test": 60, "steps": 2, "batch": 10, "width": 2, "classifier_steps": 40,
                  "seeds": 2},
        "laptop": {"n_test": 1000, "steps": 400, "batch": 50, "width": 8, "lr": 5e-4, "classifier_steps": 600,
                   "seeds": 3},
        "paper": {},
    },
)  # fmt: skip
def table5_2(
    run: Run,
    *,
    dataset: Annotated[str, "mnist, or digits (8 x 8, enlarged; ships with the library)"] = "mnist",
    n_test: Annotated[int, "test images that are reconstructed"] = 10_000,
    steps: Annotated[int, "iterations"] = 50_000,
    batch: Annotated[int, "images in an iteration"] = 100,
    lr: Annotated[float, "of Adam, all networks"] = 1e-4,
    weight: Annotated[float, "of the reconstruction loss (ALICE) and of the information (not given)"] = 1.0,
    width: Annotated[int, "channels at 14 x 14 of all networks"] = 64,
    classifier_steps: Annotated[int, "Adam steps of the classifier, batches of 100"] = 3000,
    seeds: Annotated[int, "models of each kind"] = 3,
) -> StudyResult:
    """Reconstructions of digits by four bi-directional models."""
    setting = Setting(steps, batch, lr, width, weight)
    x, y = digits.digit_images(dataset, "train", run.device)
    classifier = digits.train_classifier(x, y, classifier_steps, derive(run.seed, "classifier"))
    x_test, y_test = (part[:n_test] for part in digits.digit_images(dataset, "test", run.device))
    known = float((digits.classify(classifier, x_test[:, None])[:, 0] == y_test).float().mean())

    def compute(arm: Arm, i: int) -> dict[str, Any]:
        seed, truth = derive(run.seed, "model", i), x_test[:, None]
        back, samples = train(x[:, None], truth, arm, setting, seed)
        right = torch.cat([digits.classify(classifier, part)[:, 0] for part in torch.split(back, 1000)]) == y_test
        found = {
            "error": float((back - truth).flatten(1).norm(dim=1).mean()),
            "accuracy": float(right.float().mean()),
            "MS-SSIM": float(ms_ssim((back + 1) / 2, (truth + 1) / 2).mean()),
        }
        run.log(arm=arm, seed=seed, **found)
        return {**found, "back": back[:SHOWN].cpu(), "samples": samples.cpu()}

    found: dict[str, list[dict[str, Any]]] = {
        arm: run.cached_each(arm, range(seeds), partial(compute, arm)) for arm in ARMS
    }

    def gap(more: str, less: str, name: str) -> Estimate:
        return Estimate.of([a[name] - b[name] for a, b in zip(found[more], found[less])])

    asked = {
        "error, ALI - ALI + MINE": gap("ALI", "ALI + MINE", "error"),
        "accuracy, ALI + MINE - ALI": gap("ALI + MINE", "ALI", "accuracy"),
        "error, ALI + MINE - ALICE (l2)": gap("ALI + MINE", "ALICE (l2)", "error"),
        "MS-SSIM, ALI + MINE - ALI": gap("ALI + MINE", "ALI", "MS-SSIM"),
    }
    numbers = {
        f"{name}, {arm}": Estimate.of([made[name] for made in rows]) for arm, rows in found.items() for name in MEASURES
    }
    numbers |= asked | {"accuracy on the images themselves": Estimate(known)}
    _picture(run, x_test.cpu(), found)
    table = "; ".join(f"{arm} {', '.join(str(numbers[f'{name}, {arm}']) for name in MEASURES)}" for arm in ARMS)
    trained = max(numbers[f"accuracy, {arm}"].value for arm in ARMS) >= RECOGNISED
    holds = all(above(value) for value in asked.values())
    return StudyResult(
        verdict=decide(holds, asked.values()) if trained else "not tested",
        claim=CLAIM,
        measured=f"Error, accuracy and MS-SSIM of reconstructions: {table}. "
        f"{'; '.join(f'{name}: {value}' for name, value in asked.items())}."
        f"{'' if trained else ' No model reconstructs digits yet.'} {steps} iterations of {batch}, "
        f"width {width} (paper: 50000 of 100, 64); errors over {seeds} seeds."
        f"{'' if dataset == 'mnist' else f' {dataset} stands in for MNIST.'}",
        numbers=numbers,
        figures=tuple(
            by_model(
                name.lower(),
                f"Reconstructions of digits: {name}",
                name,
                {arm: numbers[f"{name}, {arm}"] for arm in ARMS},
                CAPTIONS[name],
            )
            for name in MEASURES
        ),
    )


def _picture(run: Run, x: torch.Tensor, found: dict[str, list[dict[str, Any]]]) -> None:
    """Test images, their reconstructions and samples, first seed."""
    panels = {"data": x[:SHOWN, None]}
    for arm, rows in found.items():
        panels |= {f"{arm}: reconstructions": rows[0]["back"], f"{arm}: samples": rows[0]["samples"]}

    def draw(axes: Any) -> None:
        for axis in axes.flat:
            axis.axis("off")
        for axis, (title, made) in zip(axes.flat, panels.items()):
            axis.imshow(digits.sheet(made)[..., 0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(title, fontsize=10)

    picture(run, "reconstructions", 3, 3, draw, (2.2, 2.2), caption=CAPTION)
