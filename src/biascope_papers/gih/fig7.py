"""Fig. 7: the evolution of G at initialisation points along S (ReLU MLP, Thm 3.1) or GSG (linear CNN, Thm 3.2).

The exact Delta is known for both, with the constants of the proofs corrected. With unit variances the MLP needs widths
comparable to the dimension, with torch's |Corr(Delta, S)| is above 0.98 at every width at CIFAR's D = 3072. Delta is
minus a positive matrix: G moves away from S and GSG (the paper looks at the modulus).
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import InputError, geometry_evolution
from biascope.ensembles import record
from biascope.geometry import correlation, data_second_moment
from biascope.geometry.linear_cnn import patch_overlap, tap_matrices
from biascope.geometry.mlp_theory import mlp_evolution
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, progress
from biascope_papers.gih.networks import at_least, scope
from biascope_papers.gih.sets import Source, describe, two_classes

CASES = {
    "MLP, unit variances": "Corr(Delta, S)",
    "MLP, torch variances": "Corr(Delta, S)",
    "linear CNN": "Corr(Delta, GSG)",
}


@study(
    "gih/fig7",
    sizes={
        "smoke": {"source": "synthetic", "side": 8, "per_class": 20, "widths": (4, 32), "networks": 400,
                  "exact_widths": (2, 8, 32, 128, 512, 2048, 8192)},
        "laptop": {"side": 16, "per_class": 50, "widths": (4, 32, 128), "networks": 800},
        "paper": {},
    },
)  # fmt: skip
def fig7(
    run: Run,
    *,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    per_class: Annotated[int, "training images per class"] = 5000,
    widths: Annotated[tuple[int, ...], "widths at which networks are sampled"] = (10, 100, 1000, 10_000),
    exact_widths: Annotated[tuple[int, ...], "widths of the exact curves"] = (
        1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    networks: Annotated[int, "networks sampled per width"] = 1000,
    kernel: Annotated[int, "side of the CNN's filters (not stated in the paper)"] = 3,
) -> StudyResult:  # fmt: skip
    """Direction of the evolution of G at initialisation against width, sampled and exact."""
    if len(exact_widths) < 2 or list(exact_widths) != sorted(set(exact_widths)):
        raise InputError(f"exact_widths={exact_widths}: two or more increasing widths are needed")
    at_least(1, widths=min(widths, default=0))
    at_least(2, networks=networks)  # one has no sampling error to compare with
    images, _ = two_classes(run, source, side, per_class)
    x, D = images.x, images.x[0].numel()
    S = data_second_moment(x.to(run.device)).cpu()
    K, patches = channel_overlap(side, kernel, x.shape[1])
    root = square_root(S)  # Delta depends on the data through S = X^T X only, so any such X will do
    targets = {name: (K @ S @ K if name == "linear CNN" else S) for name in CASES}

    def exact(name: str, n: int) -> Tensor:
        sw, sp = scales(name, n, D)
        return overlap_evolution(K, patches, S, n, sw, sp) if name == "linear CNN" else mlp_evolution(root, n, sw, sp)

    curves = {name: [abs(correlation(exact(name, n), targets[name])) for n in exact_widths] for name in CASES}
    numbers: dict[str, Estimate] = {}
    points: dict[str, list[float]] = {name: [] for name in CASES}
    y = torch.where(images.y > 0, 1.0, -1.0)
    room = None if torch.device(run.device).type == "cuda" else "1GB"  # more is slower on a CPU
    for name, what in CASES.items():
        for n in progress(widths, name, leave=False):
            truth = exact(name, n)

            def sample(name: str = name, n: int = n, truth: Tensor = truth) -> dict[str, float]:
                made, seed = record(lambda: network(name, n, x.shape[1:], kernel)), derive(run.seed, name, n)
                found = geometry_evolution(made, x, y, networks, seed=seed, device=run.device, max_memory=room)
                off = float((found.matrix - truth).norm() / found.matrix.norm())
                signed = correlation(found.matrix, targets[name])
                return {"correlation": signed, "error": found.relative_error, "off": off}

            found = run.cached(f"delta {name} {n}", sample)
            value, error, off = (float(found[key]) for key in ("correlation", "error", "off"))  # type: ignore[arg-type]
            # noise lengthens the sampled Delta and so shrinks its correlation; the length is known
            points[name].append(min(abs(value) / math.sqrt(max(1 - error**2, 1e-3)), 1.0))
            label, ratio = f"{name}, width {n}", Estimate(off / error, None, networks)
            numbers[f"{label}: signed {what}, sampled"] = Estimate(value, None, networks)
            numbers[f"{label}: signed {what}, exact"] = Estimate(correlation(truth, targets[name]))
            numbers[f"{label}: distance to the exact Delta over the sampling error"] = ratio
        first, before, last = (curves[name][i] for i in (0, -2, -1))
        numbers[f"{name}: exact |Corr| at the largest width"] = Estimate(last)
        numbers[f"{name}: exact |Corr| at the largest width minus the smallest"] = Estimate(last - first)
        if last <= 0.99:
            numbers[f"{name}: growth from the width before, |Corr| up to 0.99"] = Estimate(last - before)
    text = "; ".join(f"{name} {values[-1]:.4f}" for name, values in curves.items())
    chart = Chart(
        "width", "Direction of the evolution of G against width", "width (hidden units, or channels)",
        "|Corr(Delta, S)| or |Corr(Delta, GSG)|",
        (
            *(Series.of(f"{name}, exact", exact_widths, curve) for name, curve in curves.items()),
            *(Series.of(f"{name}, sampled", widths, points[name], style="points") for name in CASES),
        ),
        "All curves tend to 1 with width; the MLP with unit variances is the slowest.",
        "Sampled values are corrected for the length that sampling noise adds to Delta.", log_x=True,
    )  # fmt: skip
    return StudyResult(
        measured=f"Exact |Corr| at width {exact_widths[-1]}: {text}. Signed correlations are negative. "
        f"{describe(source, side)}. The constants of Thms 3.1 and 3.2 are corrected."
        f"{scope(images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=(chart,),
    )


def scales(name: str, n: int, D: int) -> tuple[float, float]:
    """Standard deviations of the last and of the first layer's weights."""
    return (1.0, 1.0) if name != "MLP, torch variances" else ((3 * n) ** -0.5, (3 * D) ** -0.5)


def network(name: str, n: int, shape: Any, kernel: int) -> nn.Module:
    """A freshly drawn network of the two theorems, without biases."""
    D = math.prod(shape)
    sw, sp = scales(name, n, D)
    if name == "linear CNN":
        first: nn.Module = nn.Conv2d(shape[0], n, kernel, bias=False)
        layers = [first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 1, bias=False)]
    else:
        first = nn.Linear(D, n, bias=False)
        layers = [nn.Flatten(), first, nn.ReLU(), nn.Linear(n, 1, bias=False)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=sp if layer is first else sw)
    return nn.Sequential(*layers)


def channel_overlap(side: int, kernel: int, channels: int) -> tuple[Tensor, int]:
    """K = C C^T [channels side^2, ...] of all patches of an image with channels, and the number of patches."""
    taps = tap_matrices((side, side), kernel)
    return torch.kron(torch.eye(channels, dtype=torch.float64), patch_overlap(taps)), taps.shape[2]


def overlap_evolution(K: Tensor, patches: int, S: Tensor, n: int, sw: float = 1.0, sp: float = 1.0) -> Tensor:
    """Delta of the linear CNN from K, exact for every n: `pooled_cnn_evolution` for images with channels."""
    first = (n * (n + 1) * sw**2 * sp**4 + n * (n + 2) * sw**4 * sp**2) * K @ S @ K
    return -2 / patches**4 * (first + n * sw**2 * sp**4 * (K * S).sum() * K)


def square_root(S: Tensor) -> Tensor:
    """Some X [D, D] with X^T X = S."""
    values, V = torch.linalg.eigh(S)
    root: Tensor = (V * values.clamp_min(0).sqrt()).T.contiguous()
    return root
