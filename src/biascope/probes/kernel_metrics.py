"""Metrics of the tangent kernel: its alignment with its start and with the labels, its spectrum, its velocity.

Spec: linearity measures are uncentred; alignment with labels, effective rank and trace ratios use centred features.
Eigenvalues below the rounding of the kernel, before centring, count as 0 (see `View.eigenvalues`).
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from biascope.kernels.spectrum import Centring
from biascope.linalg import effective_rank as effective_rank_of
from biascope.probes.metrics import register, velocity
from biascope.probes.view import View
from biascope.support.arguments import check_count
from biascope.support.errors import InputError


@register()
def ntk_alignment(view: View, centered: Centring | bool = False) -> float:
    """Alignment <K, K0> / (||K|| ||K0||) of the tangent kernel with that at initialisation; 1 = lazy.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> round(ntk_alignment(View.of(net, torch.eye(2))), 6)
        1.0
    """
    return view.kernel.alignment(view.init.kernel, centered)


@register(needs=["labels"])
def label_alignment(view: View, centered: Centring | bool = "per-output") -> float:
    """CKA of the tangent kernel with the labels, y^T K y / (||K|| ||y||^2), both centred per output.

    Example:
        >>> view = View.of(nn.Linear(2, 1), torch.randn(8, 2), torch.randn(8))
        >>> 0 <= label_alignment(view) <= 1
        True
    """
    return view.kernel.alignment(view.y, centered)


@register(needs=["layers"])
def layer_alignment(
    view: View, to: Literal["labels", "init"] = "labels", centered: str | bool | None = None
) -> dict[str, float]:
    """Alignment of every layer's tangent kernel with the labels (centred), or with that at initialisation ("init").

    A layer whose kernel is zero (after centring) has no alignment: NaN.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> list(layer_alignment(View.of(net, torch.randn(8, 2), torch.randn(8))))
        ['0', '2']
    """
    kind = (to == "labels") if centered is None else centered
    found = {}
    for name, K in view.layer_kernels.items():
        other: Tensor | object = view.y if to == "labels" else view.init.layer_kernels[name]
        try:
            found[name] = K.alignment(other, kind)  # type: ignore[arg-type]
        except InputError as error:
            if "zero" not in str(error):
                raise
            found[name] = math.nan
    return found


@register(needs=["group labels"])
def group_alignment(view: View, centered: Centring | bool = "per-output") -> dict[str, float]:
    """CKA with the labels inside every group (easy against difficult examples), each centred by itself.

    Groups of equal size can be compared; the alignment of a random kernel depends on the number of examples.

    Example:
        >>> groups = {"easy": torch.arange(4), "hard": torch.arange(4, 8)}
        >>> view = View.of(nn.Linear(2, 1), torch.randn(8, 2), torch.randn(8), groups=groups)
        >>> list(group_alignment(view))
        ['easy', 'hard']
    """
    return {name: view.group_kernel(name).alignment(view.group_labels(name), centered) for name in view.setup.groups}


@register(keeps=["kernel"])
def kernel_velocity(view: View) -> dict[str, float]:
    """How far the kernel turned since the last measurement: 1 - <K, K'> / (||K|| ||K'||), and that per step.

    Nothing at the first measurement.

    Example:
        >>> before = View.of(nn.Linear(2, 1), torch.eye(2))
        >>> after = View.of(nn.Linear(2, 1), torch.eye(2), previous=before, step=5)
        >>> abs(kernel_velocity(after)["distance"]) < 1e-6  # a linear network: its kernel is constant
        True
    """
    K = view.kernel  # also at the first measurement: the next one needs it
    if view.previous is None:
        return {}
    return velocity(view, 1 - K.alignment(view.previous.kernel, centered=False))


@register()
def effective_rank(view: View, centered: bool = True) -> float:
    """exp(entropy of the kernel's normalised eigenvalues), between 1 and the rank; of centred features by default.

    Example:
        >>> round(effective_rank(View.of(nn.Linear(2, 1, bias=False), torch.eye(2)), centered=False), 6)
        2.0
    """
    return effective_rank_of(_values(view, centered))


@register()
def trace_ratio(view: View, ks: Sequence[int] = (40, 80, 160), centered: bool = True) -> dict[str, float]:
    """T_k, the share of the k largest eigenvalues in the trace. (The papers print a sum over j < k; top k is meant.)

    Example:
        >>> trace_ratio(View.of(nn.Linear(2, 1, bias=False), torch.eye(2)), ks=(1,), centered=False)
        {'1': 0.5}
    """
    check_count(min(ks), "ks")
    values = _values(view, centered)
    return {str(k): float(values[:k].sum() / values.sum()) for k in ks}


@register(decades=True)
def spectrum(view: View, k: int = 10, centered: bool = True) -> dict[str, float]:
    """The k largest eigenvalues ("1" is the largest), and the mean and median of all (0: below rounding).

    Example:
        >>> found = spectrum(View.of(nn.Linear(2, 1, bias=False), torch.eye(2)), k=1, centered=False)
        >>> {name: round(value, 6) for name, value in found.items()}
        {'1': 1.0, 'mean': 1.0, 'median': 1.0}
    """
    check_count(k, "k")
    values = _values(view, centered)
    top = {str(j + 1): float(value) for j, value in enumerate(values[:k])}
    middle = float(values.quantile(0.5))  # the mean of the middle two, as numpy does
    return {**top, "mean": float(values.mean()), "median": middle}


def _values(view: View, centered: bool) -> Tensor:
    values = view.eigenvalues if centered else view.uncentred_eigenvalues
    if not values.sum() > 0:
        what = "the tangent kernel is zero" + (" (or rounding) after centring" if centered else "")
        raise InputError(f'{what}: it has no spectrum; precision="float64" resolves smaller differences')
    return values
