"""Gradients of parameters that are used through derived tensors: `x + table[positions]`, `xhat * (1 + weight)`.

A derived tensor is the same for all examples, so that the rules give its per-example gradients as they give those of a
parameter. Autograd then carries them back to the parameters behind it, all examples and cotangents in one pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from biascope.network.layers.record import Derived, Scope, Tape


def is_label(name: str) -> bool:
    """Does a use's role name a derived tensor?"""
    return name.startswith("@")


def labelled(tape: Tape) -> dict[str, Derived]:
    """The derived tensors that are used, by label."""
    return {made.label: made for made in tape.derived if made.label}


def root_rows(
    tape: Tape, rows: dict[str, Tensor], wanted: Callable[[str], bool], add: Callable[[str, Tensor], None]
) -> None:
    """Per-example gradients {label: [k, n, numel]} of derived tensors carried back: `add(name, [k, n, p])` for each."""
    for label, made in labelled(tape).items():
        names = [name for name in made.roots if wanted(name)]
        g = rows.get(label)
        if g is None or not names:
            continue
        k, n = g.shape[:2]
        flat = g.to(made.value.dtype).reshape(k * n, *made.value.shape)
        leaves = [tape.params[name] for name in names]
        back = torch.autograd.grad(
            made.value, leaves, flat, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        for name, t in zip(names, back):
            if t is not None:
                add(name, t.reshape(k, n, -1))


def next_scope(three: Tape, two: Tape, scope: Scope, raw: Iterable[str]) -> Scope:
    """What to look for next, after passes over three and two examples; the same scope where nothing is to be changed.

    Args:
        three: the tape of three examples.
        two: that of two.
        scope: what was looked for.
        raw: names that no rule covers, some of them perhaps only because they were taken to meet examples.
    """
    never = {*three.raw, *two.raw, *_unlike(three, two)}
    alone: set[str] = set()
    if len(three.uses) == len(two.uses):
        for meets_examples in (False, True):
            for a, b in zip(three.uses, two.uses):
                if (a.out_shape != b.out_shape) == meets_examples:
                    alone = alone - {*a.roles.values()} if meets_examples else alone | {*a.roles.values()}
    new = {name for name in alone - never - scope.constant if not is_label(name)}
    return replace(scope, ignored=scope.ignored | never | (frozenset(raw) - new), constant=scope.constant | new)


def _unlike(three: Tape, two: Tape) -> set[str]:
    """Roots of derived tensors that depend on the examples, and names used a number of times that does."""
    counts: dict[str, int] = {}
    for tape, sign in ((three, 1), (two, -1)):
        for name in [n for made in tape.derived for n in made.roots] + [n for u in tape.uses for n in u.roles.values()]:
            counts[name] = counts.get(name, 0) + sign
    unlike = {name for name, count in counts.items() if count and not is_label(name)}
    if len(three.derived) != len(two.derived) or unlike:
        return unlike
    bad: set[int] = set()
    for i, (a, b) in enumerate(zip(three.derived, two.derived)):
        if a.value.shape != b.value.shape and not bad.intersection(a.parents):
            unlike |= set(a.roots)
        if a.value.shape != b.value.shape or bad.intersection(a.parents):
            bad.add(i)
    return unlike
