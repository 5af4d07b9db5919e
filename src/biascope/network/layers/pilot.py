"""The pilot: which rule handles which parameter, found on a few examples and proved against autograd.

It runs on three examples and on two. Where a dimension's size follows the number of examples, the batch lives there.
Then the rules' per-example gradients are compared with autograd's in float64: a rule that misread the layer (a batch
folded into another axis, a gradient scaled by hand) is found out and its parameters fall back.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from biascope.network.door import random_state, refuse_mixing, refuse_random
from biascope.network.functional import Functional, explained
from biascope.network.layers import composed as composed  # its handlers are registered
from biascope.network.layers.blocks import Anatomy, Block, Layout, Slot, all_gradients, leaves, rows_of_tape
from biascope.network.layers.derived import labelled, next_scope
from biascope.network.layers.picked import Watcher
from biascope.network.layers.record import EVERYTHING, FOLDED, Recorder, Scope, Tape, Use, record
from biascope.network.layers.rules import Linear, MatrixRule, Sizes
from biascope.support.inputs import Inputs, batch_size, take

PERIOD = 1_048_573  # numbers after which a cotangent begins again: a prime, so that it meets every dimension elsewhere
MORE = 2  # times the activations of fused attention that attention may take when it is written out
SCOPES = 6  # times that a network is looked at; then derived tensors are left to autograd


def pilot(f: Functional, inputs: Inputs) -> Anatomy:
    """Find the blocks of a network on its first examples, and prove them (`stream.anatomy` keeps what is found)."""
    n = batch_size(inputs)
    three = f.prepare(take(inputs, torch.arange(3, device="cpu") % n))
    two = take(three, slice(0, 2))
    saved = 0
    known = () if f.shards is not None else (*f.params.values(), *f.frozen.values())
    held = {t.untyped_storage().data_ptr() for t in known if t.layout == torch.strided}  # no activations

    def weigh(t: Tensor) -> Tensor:
        nonlocal saved
        if t.layout != torch.strided or t.untyped_storage().data_ptr() not in held:
            saved += t.numel() * t.element_size()
        return t

    before = random_state(f.device)
    with explained(f.module, three), torch.autograd.graph.saved_tensors_hooks(weigh, lambda t: t):
        tape3 = taped(f, three, kind=Watcher)
    if not torch.equal(random_state(f.device), before):
        refuse_random(f.module, lambda: f(f.params, three), tape3.rows.detach())
    tape2 = taped(f, two)
    refuse_mixing(f.module, lambda: f(f.params, three), tape3.rows.detach(), tape2.rows.detach())
    if f.shards is not None:  # autograd keeps what is not seen from here: about the inputs and outputs of the layers
        seen = [(use.out_shape.numel(), 0 if use.input is None else use.input.numel()) for use in tape3.uses]
        saved = 2 * f.dtype.itemsize * sum(map(sum, seen))
    scope, raw = EVERYTHING, dict[str, str]()
    per_example = max(1, saved // 3)
    for attempt in count(1):
        raw = tape3.raw | raw
        slots = _slots(tape3, tape2, raw)
        _name_roots(tape3, raw)
        wanted = next_scope(tape3, tape2, scope, raw)
        if attempt == SCOPES or f.shards is not None:
            wanted = replace(wanted, ignored=wanted.ignored.union(*(made.roots for made in tape3.derived)))
        if wanted == scope:
            found = _anatomy(f, tape3, slots, raw, per_example, scope)
            wrong = _certify(f, found, two)
            if not wrong:
                break
            raw |= dict.fromkeys(wrong, "the layer rule disagrees with autograd here")
            wanted = replace(scope, ignored=scope.ignored | frozenset(wrong))
        for name in wanted.ignored - set(raw):
            makers = [made.maker for made in tape3.derived if name in made.roots]
            raw[name] = f"used by {makers[-1]}, which has no layer rule" if makers else "used for some examples only"
        raw = {name: why for name, why in raw.items() if name in wanted.ignored}
        scope = wanted
        tape3, tape2 = (taped(f, x, scope) for x in (three, two))
    if f.device.type in FOLDED and f.shards is None and _fuses_attention(tape2):
        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda t: t):
            found = _written_out(f, found, two, lambda: saved)
    return found


def taped(f: Functional, inputs: Inputs, scope: Scope = EVERYTHING, kind: type[Recorder] = Recorder) -> Tape:
    """The tape of f at its parameters over prepared inputs."""
    with nullcontext() if f.shards is None else f.shards.gathering():
        return record(f.outputs, leaves(f), inputs, None, scope, kind)


def _anatomy(
    f: Functional, tape: Tape, slots: list[Slot | None], raw: dict[str, str], per_example: int, scope: Scope
) -> Anatomy:
    u = _cotangent(tape.rows)
    flow = tape.gradients(u)
    unreached = frozenset(i for i, g in enumerate(flow) if g is None)
    slots = [slot and replace(slot, live=_live(use, slot, g)) for use, slot, g in zip(tape.uses, slots, flow)]
    blocks, outputs = _blocks(f, tape, slots, raw), tape.rows.shape[1]
    batched = f.shards is None and _can_batch(tape, u, flow)
    return Anatomy(tuple(blocks), tuple(slots), outputs, per_example, batched, raw, tape.shape, unreached, scope)


def _live(use: Use, slot: Slot, g: Tensor | None) -> tuple[int, int] | None:
    """First and last position of a linear layer at which a gradient arrived on three examples; None if all are in."""
    if g is None or not isinstance(use.rule, Linear):
        return None
    at = slot.output.example_major(g, 3)
    there = at.reshape(3, -1, at.shape[-1]).any(-1).any(0).nonzero().flatten().tolist()
    whole = at.numel() // (3 * at.shape[-1])
    return (there[0], there[-1] + 1) if there and there[-1] + 1 - there[0] < whole else None


def _written_out(f: Functional, found: Anatomy, two: Inputs, weighed: Callable[[], int]) -> Anatomy:
    """Attention in one piece has no batching rule; written out it has: where launches count, and memory allows it."""
    scope = replace(found.scope, written_out=True)
    before = weighed()
    tape = taped(f, two, scope)
    per_example = (weighed() - before) // 2
    if not found.matches(tape) or per_example > MORE * found.activation_bytes:
        return found
    u = _cotangent(tape.rows)
    if not _can_batch(tape, u, tape.gradients(u)):
        return found
    return replace(found, together=(scope, per_example))


def _fuses_attention(tape: Tape) -> bool:
    """Does it use torch's attention in one piece? Under vmap that is a loop over the cotangents."""
    seen, todo = set[Any](), [tape.rows.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if "ScaledDotProduct" in node.name():
            return True
        seen.add(node)
        todo += [parent for parent, _ in node.next_functions]
    return False


def _name_roots(tape: Tape, raw: dict[str, str]) -> None:
    """Put the parameters behind raw derived tensors in their place."""
    for label, made in labelled(tape).items():
        why = raw.pop(label, None)
        if why is not None:
            for name in made.roots:
                raw.setdefault(name, why)


def _can_batch(tape: Tape, u: Tensor, flow: list[Tensor | None]) -> bool:
    """Does a vmapped backward pass run without slow fallbacks, and agree with `flow`, the gradients at cotangent u?"""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            together = tape.batched_gradients(torch.stack([u, -2 * u]))  # twice the same would hide a mix-up
    except (RuntimeError, NotImplementedError):
        return False
    # torch would loop, slowly; over attention alone a loop is no loss
    if any("batching rule" in str(w.message) and "scaled_dot_product" not in str(w.message) for w in caught):
        return False
    for fast, slow in zip(together, flow):
        if fast is None or slow is None:
            if fast is not slow:
                return False
        else:
            bound = 1e-3 * float(slow.abs().max())
            if not all(torch.allclose(fast[j], c * slow, rtol=1e-2, atol=bound) for j, c in enumerate((1, -2))):
                return False
    return True


def _layout(use: Use, shape3: torch.Size, shape2: torch.Size) -> Layout | None:
    changed = [d for d, (a, b) in enumerate(zip(shape3, shape2)) if a != b]
    if len(shape3) != len(shape2) or len(changed) != 1:
        return None
    d = changed[0]
    if shape3[d] * 2 != shape2[d] * 3:
        return None
    return Layout(d, m := shape3[d] // 3, plain=d == 0 and m == 1 and isinstance(use.rule, Linear))


def _slots(tape3: Tape, tape2: Tape, raw: dict[str, str]) -> list[Slot | None]:
    slots: list[Slot | None] = []
    same = len(tape3.uses) == len(tape2.uses)
    for i, use in enumerate(tape3.uses):
        other = tape2.uses[i] if same else None
        slot = None
        if other is not None and use.roles == other.roles:
            out = _layout(use, use.out_shape, other.out_shape)
            saved, other_saved = use.input, other.input
            inp = None if saved is None or other_saved is None else _layout(use, saved.shape, other_saved.shape)
            if out is not None and (saved is None or inp is not None) and _sensible(use, inp, out):
                slot = Slot(type(use.rule).__name__, tuple(use.roles.items()), inp, out)
        if slot is None:
            for name in use.roles.values():
                raw.setdefault(name, f"{use.rule.kind} use whose batch dimension could not be found")
        slots.append(slot)
    return slots


def _sensible(use: Use, inp: Layout | None, out: Layout) -> bool:
    """The batch must lie where the rule expects examples, not features."""
    return use.rule.batch_fits(None if inp is None else inp.dim, out.dim, len(use.out_shape))


def _blocks(f: Functional, tape: Tape, slots: list[Slot | None], raw: dict[str, str]) -> list[Block]:
    where: dict[str, list[tuple[int, str]]] = {name: [] for name in f.params}
    made = labelled(tape)
    for i, use in enumerate(tape.uses):
        for role, name in use.roles.items():
            for owner in made[name].roots if name in made else (name,):
                where[owner].append((i, "derived" if name in made else role))
    blocks: list[Block] = []
    folded: set[str] = set()
    for name, places in where.items():
        numel = f.params[name].numel()
        if name in folded:
            continue
        if name in raw:
            blocks.append(Block("fallback", (name,), (), raw[name], numel=numel))
            continue
        if not places:
            blocks.append(Block("rows", (name,), (), "not used: its derivative is zero", numel=numel))
            continue
        indices = tuple(dict.fromkeys(i for i, _ in places))
        uses = [tape.uses[i] for i in indices]
        times = f", used {len(uses)} times" if len(uses) > 1 else ""
        rules = [u.rule for u in uses]
        first = rules[0]
        joined = (
            isinstance(first, MatrixRule)
            and all(role == "weight" for _, role in places)
            and all(isinstance(r, MatrixRule) and r.signature() == first.signature() for r in rules)
        )
        if not joined:
            kinds = "+".join(sorted({u.rule.kind for u in uses}))
            through = ", derived first" if any(role == "derived" for _, role in places) else ""
            blocks.append(Block("rows", (name,), indices, f"{kinds} rule{times}{through}", numel=numel))
            continue
        assert isinstance(first, MatrixRule)
        sizes = [_sizes(u, slots[i], 3) for u, i in zip(uses, indices)]
        total = Sizes(sizes[0].groups, sizes[0].d_in, sizes[0].d_out, sum(s.positions for s in sizes))
        names: tuple[str, ...] = (name,)
        bias = uses[0].roles.get("bias")
        if (
            bias is not None
            and bias not in made
            and bias not in raw
            and first.bias_shares_positions
            and where[bias] == [(i, "bias") for i in indices]
        ):
            names += (bias,)
            folded.add(bias)
            numel += f.params[bias].numel()
        kept = sum(u.input.numel() for u in uses if u.input is not None) // 3
        flow = sum(u.out_shape.numel() for u in uses) // 3
        blocks.append(Block("matrix", names, indices, f"{first.kind} rule{times}", total, numel, kept, flow, first))
    order = {name: i for i, name in enumerate(f.params)}
    return sorted(blocks, key=lambda b: order[b.names[0]])


def _sizes(use: Use, slot: Slot | None, n: int) -> Sizes:
    assert slot is not None
    assert slot.input is not None
    assert use.input is not None
    assert isinstance(use.rule, MatrixRule)
    a = slot.input.example_major(use.input, n).shape
    g = slot.output.example_major(torch.empty(use.out_shape, device="meta"), n).shape
    return use.rule.sizes(a, g)


def _certify(f: Functional, found: Anatomy, two: Inputs) -> list[str]:
    """Names whose per-example gradients by rule differ from autograd's, checked in float64 where the model allows."""
    names = [n for b in found.blocks if b.kind != "fallback" for n in b.names]
    if not names:
        return []
    try:
        return _disagreements(f.to(torch.float64), found, two, names, 1e-8)
    except (RuntimeError, TypeError, NotImplementedError):  # a model that insists on float32 somewhere
        return _disagreements(f, found, two, names, 2e-3)


def _disagreements(f: Functional, found: Anatomy, two: Inputs, names: list[str], tol: float) -> list[str]:
    two = f.prepare(two)
    tape, params = taped(f, two, found.scope), leaves(f)
    if not found.matches(tape):
        return names
    u = _cotangent(tape.rows).to(f.device, f.dtype)
    pieces = all_gradients(tape, found, u[None])
    zero = torch.zeros((), dtype=torch.float64, device=f.device)
    error, size = dict.fromkeys(names, zero), dict.fromkeys(names, zero)  # squares, summed over both examples

    def compare(name: str, exact: Tensor | None, at: slice) -> None:
        by_rule = rows_of_tape(f, found, tape, pieces, 1, [name], at)[name][0, 0]
        if exact is not None:
            exact = exact if f.shards is None else f.shards.whole(f.params[name], exact)
            size[name] = size[name] + exact.norm().double() ** 2
            by_rule = by_rule.sub_(exact.flatten())
        error[name] = error[name] + by_rule.norm().double() ** 2

    with torch.enable_grad():
        rows = f(params, two)  # unrecorded: a tape's convolutions keep no way back to their weights
    for i in range(2):
        at, left = slice(i, i + 1), set(names)

        def seen(p: Tensor, name: str, at: slice = at, left: set[str] = left) -> None:
            exact, p.grad = p.grad, None  # gradients of all parameters would take the memory of the model again
            left.remove(name)
            compare(name, exact, at)

        hooks = [
            params[n].register_post_accumulate_grad_hook(partial(seen, name=n))  # type: ignore[no-untyped-call]
            for n in names
        ]
        v = torch.zeros_like(u)
        v[i] = u[i]
        if rows.requires_grad:
            torch.autograd.backward(rows, v, retain_graph=i == 0, inputs=[params[n] for n in names])
        for hook in hooks:
            hook.remove()
        for name in sorted(left):  # no gradient arrived
            compare(name, None, at)
    errors, sizes = (torch.stack(list(part.values())).sqrt().tolist() for part in (error, size))
    scale, tol = max(sizes), max(tol, 8 * tape.rounding)
    return [n for n, e, s in zip(names, errors, sizes, strict=True) if not e <= tol * s + tol * 1e-3 * scale]


def _cotangent(rows: Tensor) -> Tensor:
    """Numbers in the shape of `rows`, the same on every device."""
    numbers = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    numbers = numbers[: rows.numel()].to(rows)
    return numbers.repeat(-(-rows.numel() // len(numbers)))[: rows.numel()].view(rows.shape)
