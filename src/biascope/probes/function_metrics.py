"""Metrics of the function and its inside: activation signs, representations, groups of examples, frequencies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from biascope.kernels.alignment import targets
from biascope.probes.groups import example_losses
from biascope.probes.metrics import cosine, register
from biascope.probes.view import View
from biascope.support.errors import InputError


@register()
def sign_similarity(view: View) -> float:
    """Share of (unit, example) pairs that are active (pre-activation > 0) or inactive as they were at initialisation.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> sign_similarity(View.of(net, torch.eye(2)))
        1.0
    """
    now, then = view.signs, view.init.signs
    if [s.shape for s in now] != [s.shape for s in then]:
        raise InputError("the network called other activations than at initialisation: signs cannot be compared")
    same = sum(int((a == b).sum()) for a, b in zip(now, then))
    return same / sum(s.numel() for s in now)


@register()
def representation_alignment(
    view: View, layer: str | None = None, centered: bool | None = None, features: bool = False
) -> dict[str, float]:
    """Alignment of the Gram matrix r r^T of the last hidden representation with that at initialisation and the labels.

    As in the papers, "init" is uncentred and "labels" centred over examples, unless `centered` says otherwise. Integer
    labels are classes (one-hot) where the network has several outputs, values where it has one, as for `bs.ntk`.

    Args:
        view: what is measured.
        layer: the layer whose input is the representation; None for the last linear one.
        centered: for both.
        features: compare the feature Gram matrices r^T r instead (as some published code does), with "init" only.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> found = representation_alignment(View.of(net, torch.randn(8, 2), torch.randn(8)))
        >>> list(found), round(found["init"], 6)
        (['init', 'labels'], 1.0)
    """
    r, r0 = view.hidden(layer).double(), view.init.hidden(layer).double()
    start = [_centred(t) for t in (r, r0)] if centered else [r, r0]
    if features:
        return {"init": cosine(start[0].mT @ start[0], start[1].mT @ start[1])}
    found = {"init": cosine(start[0] @ start[0].mT, start[1] @ start[1].mT)}
    if view.setup.y is not None:
        Y = targets(view.y, view.n, 1 if view.outputs.shape[1] == 1 else None).to(r.device)
        r, Y = (r, Y) if centered is False else (_centred(r), _centred(Y))
        found["labels"] = cosine(r @ r.mT, Y @ Y.mT)
    return found


def _centred(t: Tensor) -> Tensor:
    return t - t.mean(0)


@register(needs=["group labels"])
def group_losses(view: View) -> dict[str, float]:
    """Mean loss and, for classes, accuracy of every group: easy and hard, clean and noisy, majority and minority.

    With one output, integer labels are classes if they are -1, +1 or 0, 1 in the whole batch: right is the side of 0,
    or of 1/2 for 0, 1 with loss_fn="squared". Other integers are values and have no accuracy.

    Example:
        >>> view = View.of(nn.Linear(2, 3), torch.eye(2), torch.tensor([0, 2]), groups={"hard": [1]})
        >>> list(group_losses(view))
        ['hard/loss', 'hard/accuracy']
    """
    found = {}
    for name in view.setup.groups:
        out = view.group_outputs(name)
        y = view.group_labels(name).to(out.device)
        found[f"{name}/loss"] = float(example_losses(out, y, view.setup.loss_fn).mean())
        right = _correct(view, out, y)
        if right is not None:
            found[f"{name}/accuracy"] = float(right.double().mean())
    return found


def _correct(view: View, out: Tensor, y: Tensor) -> Tensor | None:
    """Which examples are classified right [n]; None where labels are values."""
    if y.is_floating_point() or y.dim() != 1:
        return None
    if out.shape[1] > 1:
        return out.argmax(1) == y
    batch = view.setup.y  # a group may hold one of two classes only: the batch says which kind of labels these are
    whole = batch is not None and not batch.is_floating_point() and batch.dim() == 1
    known = torch.cat([y.long(), view.y.to(y.device).long()]) if whole else y.long()
    signs = bool((known.abs() == 1).all()) and bool((known == -1).any())
    bits = bool(((known == 0) | (known == 1)).all())
    middle = 0.5 if bits and view.setup.loss_fn == "squared" else 0.0
    return (out[:, 0] > middle) == (y > 0) if signs or bits else None


@register()
def fourier(
    view: View,
    frequencies: Sequence[int],
    grid: Tensor | None = None,
    amplitudes: Sequence[float] | None = None,
    output: int = 0,
) -> dict[str, float]:
    """Amplitudes 2 |rfft(f)| / N of the learned function at integer frequencies, on N points z_j = j / N of a period.

    An amplitude of 1 (relative to `amplitudes`) means learned. Frequencies 0 and N / 2 have no mirror image, so their
    factor is 1. Leave the end point of the period out of the grid, or integer frequencies leak into each other.

    Args:
        view: what is measured.
        frequencies: integers from 0 to N / 2.
        grid: inputs [N, ...] in the order of z; None if the probe batch is the grid.
        amplitudes: of the target, to divide by.
        output: which output of the network.

    Example:
        >>> class Wave(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = nn.Parameter(torch.tensor(3.0))
        ...     def forward(self, z):
        ...         return self.a * (2 * torch.pi * 2 * z).sin()
        >>> found = fourier(View.of(Wave(), torch.arange(8)[:, None] / 8), [1, 2])
        >>> {k: round(v, 4) for k, v in found.items()}
        {'1': 0.0, '2': 3.0}
    """
    out = view.outputs if grid is None else view.evaluate(grid)
    N = len(out)
    wrong = [k for k in frequencies if not 0 <= k <= N // 2]
    if wrong:
        raise InputError(f"fourier: frequencies must be integers from 0 to {N // 2} on {N} points, got {wrong}")
    size = torch.fft.rfft(out[:, output].double()).abs() / N
    scale = [1.0] * len(frequencies) if amplitudes is None else amplitudes
    pairs = zip(frequencies, scale, strict=True)
    return {str(k): float(size[k]) * (1 if k == 0 or 2 * k == N else 2) / a for k, a in pairs}
