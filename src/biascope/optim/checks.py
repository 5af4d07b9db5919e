"""What a step is checked for: gradients that are no numbers, and calls that may not be what the loss means."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.curvature.contract import summed_rows
from biascope.optim.hooks import Call
from biascope.optim.units import LayerUnit
from biascope.support.errors import InputError

FITTED = 1e-4  # an example's gradient, of the largest of its batch, below which the example counts as fitted
Batches = list[list[Call]]  # the calls of a unit, those of the same examples together


class Finite:
    """Are all tensors finite? Asked here, answered by `bad`: in between a GPU is sent more work."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        devices: dict[torch.device, list[Tensor]] = {}
        for t in tensors.values():
            if t.numel():
                devices.setdefault(t.device, []).append(t)
        self.largest = [_later(_largest(found)) for found in devices.values()]

    def bad(self) -> str | None:
        """The name of the first tensor with NaN or infinity; one wait per device where all are finite."""
        if all(math.isfinite(read()) for read in self.largest):
            return None
        return next(name for name, t in self.tensors.items() if not bool(t.isfinite().all()))

    def refused(self, skip: bool) -> bool:
        """Is one not finite? An error, unless such a step is to be skipped."""
        bad = self.bad()
        if bad and not skip:
            raise InputError(f"the gradient of {bad} holds NaN or infinity; nothing was changed")
        return bad is not None


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute value; infinite or NaN if one is."""
    if tensors[0].device.type in contract.CACHED:  # there, infinity norms are slow
        extremes = [value for t in tensors for value in t.aminmax()]
        return torch.stack(extremes).abs().max()
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max()


def _later(t: Tensor) -> Callable[[], float]:
    """A number to be read later, which waits for it and not for what was sent to the GPU after it."""
    if not t.is_cuda:
        return lambda: float(t)
    copy, done = t.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(t.device))

    def read() -> float:
        done.synchronize()
        return float(copy)

    return read


def warn_of_other_uses(unit: LayerUnit, batches: Batches) -> None:
    """Warn where the module's calls do not account for its gradient (up to its length: it may be clipped)."""
    G = unit.gradient()
    total = torch.zeros_like(G)
    for batch in batches:
        rows = summed_rows(unit.chunk(batch)[1].factors[unit.names], unit.names)
        total += torch.cat([rows[name] for name in unit.names], -1).T
    cosine = (total * G).sum() / (total.norm() * G.norm()).clamp_min(torch.finfo(G.dtype).tiny)
    if float(G.norm()) > 0 and float(cosine) < 0.95:
        warnings.warn(
            f"the calls of its module explain the gradient of {unit.name} only in part (cosine {float(cosine):.2f})"
            ": the weight is also used elsewhere, or the loss has a penalty; the metric covers the calls alone",
            stacklevel=4,
        )


def warn_of_pairs(batches: Batches) -> bool:
    """Warn where one backward pass went through several calls of the model with equally many examples."""
    paired = next((batch for batch in batches if len({call.turn for call in batch}) > 1), None)
    if paired is not None:
        warnings.warn(
            f"the model was called several times with {paired[0].examples} examples before one backward(): row i of "
            "all is taken as one example (a pair, two views); if they are different examples, call the model on all of "
            "them at once, or backward() for each",
            stacklevel=5,
        )
    return paired is not None


def warn_of_silent_examples(seen: Iterable[Batches]) -> bool:
    """Warn where whole examples have no gradient in any layer: a mean loss that ignores them is of the others.

    An example that is fitted beyond rounding looks the same; but where some are, others of the batch are nearly so.
    Nothing is said there. The scale is left to the user.
    """
    sizes: dict[tuple[object, ...], Tensor] = {}  # by backward pass, number of examples and device
    for batches in seen:
        for i, batch in enumerate(batches):
            for call in batch:
                if call.grad is not None:
                    each = call.layout.example_major(call.grad, call.examples).flatten(1).abs().amax(1).float()
                    each = each / each.max().clamp_min(torch.finfo(each.dtype).tiny)
                    key = i, call.examples, each.device
                    sizes[key] = torch.maximum(sizes[key], each) if key in sizes else each
    count, total = sum(int((m == 0).sum()) for m in sizes.values()), sum(len(m) for m in sizes.values())
    fitted = any(bool(((m > 0) & (m < FITTED)).any()) for m in sizes.values())
    if 0 < count < total and not fitted:
        warnings.warn(
            f"{count} of {total} examples have no gradient: if the loss ignores them (ignore_index, a mask), its "
            "mean is over the others, but the metric takes it as one over all, which makes it too large by "
            f"{total / (total - count):.3g}; leave such examples out of the batch",
            stacklevel=5,
        )
    return 0 < count < total and not fitted


def warn_of_silent_positions(seen: Mapping[str, Batches]) -> bool:
    """Warn where positions (tokens) of the last linear layer called have no gradient, whose inputs KFAC's A counts."""
    kept = [(call.order, name, call) for name, batches in seen.items() for batch in batches for call in batch]
    _, name, call = max(kept, key=lambda found: found[0], default=(0, "", Call(0, None)))
    if call.grad is None or call.grad[..., 0].numel() <= call.examples:
        return False
    silent = (call.grad == 0).all(-1)
    count, total = int(silent.sum()), silent.numel()
    if 0 < count < total:
        warnings.warn(
            f"{count} of {total} positions at the output of {name} have no gradient: if the loss ignores them "
            "(ignore_index, a mask), KFAC's factors A, of this layer and of those below, still count their inputs; "
            "hand only the positions with labels to this layer, or use EKFAC, whose scalings see only what has a "
            "gradient",
            stacklevel=5,
        )
    return 0 < count < total
