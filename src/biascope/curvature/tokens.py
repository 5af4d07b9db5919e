"""Labels of tokens by the conventions of Hugging Face: where the classes are, which label is whose, what is padding.

A model with a language head gives logits [n, T, V], and labels [n, T] come with the inputs, as the keyword `labels`,
with -100 where a position has none. A causal model compares the logits at position t with the label at t + 1, others
compare t with t. Which one a model does is not read off its name: it is asked for its own loss at random labels, and
that is compared with both. Labels that are given as (inputs, labels) belong to the positions at which they stand.

Without labels, an expectation over labels counts the positions that `attention_mask` marks.
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.curvature.families import IGNORE, ClassDim, Family, OutputShape
from biascope.network.functional import Functional
from biascope.network.stream import MANY, Part, Stream
from biascope.support.errors import InputError
from biascope.support.inputs import Inputs, take, tensors_of

ALIGNED = "give (inputs, labels), with the label of every position at its place and -100 where there is none"


def output_shape(stream: Stream, class_dim: ClassDim | None, shape: tuple[int, ...] | None = None) -> OutputShape:
    """The classes and positions of one example's output, and whether labels among the keywords are shifted.

    Args:
        stream: the data, of which the first example is looked at.
        class_dim: axis of the classes; None: the last where the model returns `.logits` [n, T, V] or where the labels
            say so, else 1.
        shape: of one example's output, where it is known.
    """
    f, (inputs, y) = stream.f, stream.first
    one = f.prepare(take(inputs, slice(0, 1)))
    if shape is None:
        with torch.no_grad():
            shape = tuple(f.outputs(f.params, one).shape[1:])
    if len(shape) < 2:
        return OutputShape.of(shape, 1)
    language = len(shape) == 2 and (shape == _known(f, one, _shape_of_logits))
    if class_dim is None:
        by_label = isinstance(y, Tensor) and y.shape[1:] == shape[:-1] != shape[1:]
        class_dim = -1 if language or by_label else 1
    found = OutputShape.of(shape, class_dim)
    if not language or class_dim != -1 or not _are_tokens(y, shape[0]):
        return found
    assert isinstance(y, Tensor)
    if stream.keywords:
        return replace(found, shifted=_known(f, one, is_shifted, found))
    words = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not isinstance(words, Tensor) or words.shape != y.shape or shape[0] == 1:
        return found
    copied = torch.all((words.to(y.device) == y) | (y == IGNORE))
    if bool(copied) and _known(f, one, is_shifted, found):
        raise InputError(
            "the labels are the input tokens, and this model's loss compares a token with the one after it: pass them "
            "as {'input_ids': ..., 'labels': ...}, or shift them, with -100 for the last one"
        )
    return found


def _known(f: Functional, one: Inputs, ask: Callable[..., Any], *about: OutputShape) -> Any:
    """What a network answers for inputs of this shape, asked once: it takes a forward pass."""
    named = tuple(one) if isinstance(one, dict) else ()
    key = (ask, f.output, f.dtype, named, *(t.shape for t in tensors_of(one)), *about)
    known = f.certificate.outputs
    if key not in known:
        if len(known) > MANY:
            known.clear()
        known[key] = ask(f, one, *about)
    return known[key]


def _are_tokens(y: Any, positions: int) -> bool:
    """Is this one label per position? Whole numbers in floating point are labels too."""
    return isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == positions and bool((y == y.round()).all())


def _shape_of_logits(f: Functional, one: Inputs) -> tuple[int, ...]:
    """The shape of one example's `.logits` in what the module returns, () if it returns no such thing."""
    shape: tuple[int, ...] = ()

    def look(out: Any) -> Tensor:
        nonlocal shape
        logits = getattr(out, "logits", None)
        shape = tuple(logits.shape[1:]) if isinstance(logits, Tensor) and logits is not out else ()
        return getattr(out, "logits", out) if f.output is None else f.output(out)

    with torch.no_grad():
        replace(f, output=look).outputs(f.params, one)
    return shape


def is_shifted(f: Functional, one: Inputs, shape: OutputShape) -> bool:
    """Does the model's own loss compare the logits at t with the label at t + 1? Asked of it at random labels."""
    takes = signature(f.module.forward).parameters
    if "labels" not in takes and not any(p.kind is Parameter.VAR_KEYWORD for p in takes.values()):
        return False
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, shape.classes, (1, shape.positions), generator=generator, device="cpu").to(f.device)
    found: list[Any] = []

    def look(out: Any) -> Tensor:
        found.append(getattr(out, "loss", None))
        return out.logits  # type: ignore[no-any-return]

    given = one if isinstance(one, dict) else {"input_ids": one}
    with torch.no_grad():
        z = replace(f, output=look).outputs(f.params, {**given, "labels": y})[0].double()
    if not isinstance(found[0], Tensor):
        return False  # it takes no labels
    if shape.positions == 1:
        return not bool(torch.isfinite(found[0]))  # no token comes after the first
    loss = float(found[0])
    off = {shift: abs(float(F.cross_entropy(z[: len(z) - shift], y[0, shift:])) - loss) for shift in (0, 1)}
    near = min(off, key=lambda shift: off[shift])
    if not (off[near] <= 1e-3 * abs(loss) and off[near] < 0.1 * off[1 - near]):
        raise InputError(
            f"the loss that {type(f.module).__name__} makes of its labels ({loss:.6g}) is neither the cross entropy of "
            f"a position and its label nor that of the next one: {ALIGNED}"
        )
    return near == 1


def token_labels(batch: Part, family: Family) -> Tensor | None:
    """Labels [n, positions] of a batch, each at the position whose output it belongs to; -100 where there is none."""
    shape, y = family.shape, batch.labels
    if not family.softmax:
        return y
    if y is None:
        return None if family.given else _not_padding(batch.inputs, shape)
    if not batch.keywords or not shape.classes_last or y.dim() != 2:
        return y
    if y.shape[1] != shape.positions:
        raise InputError(
            f"labels of {y.shape[1]} tokens do not fit outputs of {shape.positions} positions (of {shape.classes} "
            f"classes): give one label per token, or {ALIGNED}"
        )
    return torch.cat([y[:, 1:], torch.full_like(y[:, :1], IGNORE)], 1) if shape.shifted else y


def _not_padding(inputs: Inputs, shape: OutputShape) -> Tensor | None:
    """-100 [n, positions] at padding tokens and 0 at others; None where there is no padding."""
    if not isinstance(inputs, dict) or not shape.classes_last:
        return None
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if mask is None or mask.dim() != 2 or mask.shape[1] != shape.positions:
        return None
    padding = mask == 0
    if not bool(padding.any()) or not bool((padding | (mask == 1)).all()):
        return None
    return torch.zeros_like(mask, dtype=torch.long).masked_fill_(padding, IGNORE)
