"""The step of KFAC, EKFAC and SuperNat without a damping: natural directions, Adam's lengths, and a trust region.

Everything happens in the Kronecker eigenbasis of a layer, where G is the gradient, M its running mean (the momentum), v
the running mean of G^2 and s the metric (EKFAC: v; KFAC: products of the factors' eigenvalues). The step is

    D = -lr * stretch * a / |d| * d,   d = M / (s + damping mean(s)),   a^2 = p |M|^2 / (the running mean of |G|^2)

for a layer with p parameters: a is how long Adam's step is where all entries have the same ratio of signal to noise, so
that a learning rate means what it means for Adam, whatever the scale of the loss and of the metric. How far a direction
can be trusted is measured by the next gradient, which is of other examples: where it still points down along the last
step, cos = -<G, D> / (|G| |D|) > 0, the step was too short. With c the running mean of cos,

    stretch *= exp(0.1 clip(20 c, -1, 1)),    three times as fast downwards, from 0.03 to 30, at first 0.3,

but it goes below 1 only where c < -0.1: where the noise of batches outweighs what is left of the gradient, c varies
about 0 whatever the length, and the faster way down ended the training of a transformer long before Adam's.

The other quantity that adapts is the damping, which follows the curvature: it is `damping` (1) times the mean of s in
the layer, and three times that at the start, where v is known least. All were chosen by measurement
(docs/howto/natural-gradient.md). Levenberg-Marquardt's ratio needs the loss at the new parameters on the same examples,
which costs another forward pass, and torch optimisers do not see the loss.

A learning rate above `LARGEST` at the start counts as `LARGEST`; from there on the stretch decides, and a schedule is
relative to it. So 1.0 works: as far as can be trusted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature.kronecker import EigenPiece
from biascope.network.layers.rules import Embedding, Linear
from biascope.optim.checks import Finite
from biascope.optim.layers import Kind, Layer, Leading, Whole, renewed
from biascope.optim.preconditioner import Preconditioner, Step
from biascope.optim.stacks import Curvature, read
from biascope.optim.units import LayerUnit
from biascope.support.errors import CorruptError, InputError

FIRST, SHORTEST, LONGEST = 0.3, 0.03, 30.0  # stretches
LARGEST = 3e-3  # learning rate that is taken as it is
GAIN, DOWN, EARLY = 0.1, 3.0, 2.0  # of the stretch: its rate, how much faster it shrinks, and how much more at first
SLOPE, TRUST = 20.0, 0.5  # from cos to -1 .. 1, and the memory of the running mean
BACK = 0.1  # -cos from which on a step was too long, and not only lost in the noise of batches
START = 2.0  # how much more damping at first
SECOND, ENERGY = 0.95, 0.99  # memories of the running means of G^2 and |G|^2
DECAY = 0.8  # of the factors, at every refresh
WHOLE, ROOM = 0.5, 0.25  # of a batch's rows: sides (together) that a layer has whole, else how many eigenvectors
LEAST, MOST = 8, 1024  # of them on one side
ADAPTS = {"refresh_every", "factor_decay", "sharing", "sua", "widest", "loss_reduction", "grad_scaler", "group"}
SHARES = {"cpu": (0.2, 100), "cuda": (0.1, 2000)}  # of the work, for refreshes; steps that are counted in advance
# Work is counted, as results shall not depend on the machine: the calls of torch for a layer in a step and a refresh,
# a multiplication, and a d^3 of eigenvectors. Roughly in picoseconds, of one core and of an H200.
WORK = {"cpu": (5e7, 2.5e8, 25.0, 300.0), "cuda": (5e7, 1.5e9, 0.005, 1.0)}


class Adaptive(Preconditioner):
    """Steps of the layers of a model. `layers` maps names of units to what is known of them, once they were seen."""

    def __init__(self, model: nn.Module, kind: Kind, refresh_every: int | None = None, **options: Any) -> None:
        self.way: Kind = kind
        self.growing, self.kind, self.layers = refresh_every is None, kind, dict[str, Layer]()
        self.refreshes, self.last, self.work, self.cost = 0, 0, [0.0, 0.0], 0.0
        options = {"factor_decay": DECAY, "widest": MOST, **options}
        every = 50 if refresh_every is None else refresh_every
        super().__init__(model, damping_mode="relative", refresh_every=every, factors_every=every, **options)
        if self.team.size == 1:
            self.units = [replace(u, diagonal=False) if isinstance(u.rule, Linear) else u for u in self.units]
        self.doubts.discard("examples")  # the scale of the losses does not matter
        self.graphs: dict[Any, Any] = {}

    @property
    def place(self) -> str:
        """Where work is counted: "cpu", or "cuda" for all else."""
        return "cpu" if self.units[0].space.device.type == "cpu" else "cuda"

    # when ----------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        """Do the factors and the eigenbases follow in this step?

        Not before refreshes have taken less than their share of the work so far, counted by `WORK`.
        """
        if not self.growing:
            return self.steps % self.refresh_every == 0
        share, ahead = SHARES[self.place]
        gap = 5 if self.steps < 10 else 10 if self.steps < 50 else self.refresh_every
        return self.steps == 0 or (
            self.steps - self.last >= gap and self.refreshes * self.cost <= share * (self.steps + ahead)
        )

    def _needs_factors(self) -> bool:
        return self._due() or len(self.layers) < len(self.units)

    def _watch(self) -> None:
        """What the hooks shall do until the next step: keep all, or nothing."""
        self.watcher.clear()
        self.watcher.capture = self._needs_factors()
        self.watcher.idle = not self.watcher.capture

    # a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(
        self, groups: Sequence[dict[str, Any]], scale: float, skip_overflow: bool, plain: Mapping[str, Tensor]
    ) -> set[Tensor] | None:
        """Step the covered parameters; those that were, or None where gradients overflowed and nothing was done."""
        with self.team:
            try:
                return self._advance(groups, scale, skip_overflow, plain)
            finally:
                self._watch()

    def _advance(
        self, groups: Sequence[dict[str, Any]], scale: float, skip_overflow: bool, plain: Mapping[str, Tensor]
    ) -> set[Tensor] | None:
        units = [u for u in self.units if all(p.grad is not None for p in u.parameters)]
        if not units:
            raise InputError("no covered parameter has a gradient: call loss.backward() before the step")
        all_due = self._due()
        due = [u for u in units if all_due or u.name not in self.layers] if self.watcher.capture else []
        if self.dealt.any(self._refused(units, bool(due), skip_overflow, plain)):
            return None
        if due:
            self._follow(due, scale)
        if all_due:
            self.refreshes, self.last = self.refreshes + 1, self.steps
        stepped = [u for u in units if u.name in self.layers]
        if not stepped:
            raise InputError(
                "there are gradients, but no covered layer was seen: did the forward pass run before this object "
                "was made, or through a copy of the model?"
            )
        self.notes = {u.name: "its module was not called so far" for u in units if u.name not in self.layers}
        for group in groups:
            mine = {id(p) for p in group["params"]}
            layers = [self.layers[u.name] for u in stepped if id(u.parameters[0]) in mine]
            if layers:
                self._take(layers, group)
        self.steps += 1
        return {p for u in stepped for p in u.parameters}

    def _refused(self, units: Sequence[LayerUnit], due: bool, skip: bool, plain: Mapping[str, Tensor]) -> bool:
        """Is a gradient not finite? Lengths say so; where they do, or outputs' gradients are used, each is asked."""
        own = {name: p.grad for u in units for name, p in zip(u.names, u.parameters) if p.grad is not None}
        self.slopes = dict(zip(own, torch._foreach_norm(list(own.values()))))
        lengths = [*self.slopes.values(), *(t.norm() for t in plain.values())]
        if not due and all(
            map(math.isfinite, torch.stack([x.float().to(lengths[0].device) for x in lengths]).tolist())
        ):
            return False
        return Finite({**plain, **(self._gradients(list(units)) if due else own)}).refused(skip)

    def _take(self, layers: list[Layer], group: dict[str, Any]) -> None:
        """One step of the layers of a group."""
        device = layers[0].G.device
        if any(p.device != layer.G.device for layer in layers for p in layer.unit.parameters):
            name = layers[0].unit.name
            raise InputError(f"{name}: the model was moved after the first step; load_state_dict(state_dict())")
        began(group, device)
        beta, lr, t = float(group["momentum"]), float(group["lr"]) * group["unit"], self.steps
        numbers = [
            GAIN * (1 + EARLY * math.exp(-t / 20)),
            lr / (1 - beta ** (t + 1)),
            float(group["damping"]) * (1 + START * math.exp(-t / 20)),
            max(1 - SECOND, 1 / (t + 2)),
            max(1 - ENERGY, 1 / (t + 1)),
            1 - lr * group["weight_decay"],
        ]
        told = torch.tensor(numbers, dtype=layers[0].G.dtype, device="cpu").to(device, non_blocking=True)
        parameters: list[Tensor] = [p for layer in layers for p in layer.unit.parameters]
        torch._foreach_copy_(
            [g for layer in layers for g in layer.grads], [p.grad for p in parameters if p.grad is not None]
        )
        work = Work(layers, parameters, group, beta, bool(group["weight_decay"]), t > 0)
        if device.type != "cuda":
            work(told)
            return
        key = (tuple(p.data_ptr() for p in parameters), beta, work.decays, work.measures, id(group["stretch"]))
        replayed(self.graphs, key, work, told)

    # factors -------------------------------------------------------------------------------------------------------

    def _follow(self, due: list[LayerUnit], scale: float) -> None:
        """Factors and eigenbases of the units that were seen."""
        seen = {u.name: self._look(u, scale) for u in due}
        due = [u for u in due if seen[u.name].batches]
        self._warn(seen)
        made = {u.name: self.layers.get(u.name) or self._made(u, seen[u.name]) for u in due}
        totals = {u.name: u.gradient().square().sum() for u in due}
        whole = [u for u in due if isinstance(made[u.name], Whole)]
        self._average(whole, seen)
        self._refresh(whole, seen)
        leading = [(u.name, layer) for u in due if isinstance(layer := made[u.name], Leading)]
        factors = renewed([e for _, e in leading], [seen[name].batches for name, _ in leading], self.factor_decay)
        for (name, layer), found in zip(leading, factors):
            layer.refresh(found, totals[name])
        for u in whole:
            layer, basis = made[u.name], seen[u.name].curvature.basis
            assert isinstance(layer, Whole)
            assert basis is not None
            layer.refresh(basis, totals[u.name])
            self.curvatures[u.name] = replace(seen[u.name].curvature, basis=None)
        self.layers |= made
        self.doubts.discard("uses")

    def _lacks_basis(self, name: str) -> bool:
        return True

    def _made(self, unit: LayerUnit, step: Step) -> Layer:
        """A layer as it is seen for the first time, and the work that its steps and refreshes take."""
        L = unit.layout
        g, o, i = L.groups, L.d_out, L.columns
        step_calls, calls, one, eigh = WORK[self.place]
        sizes = [unit.chunk(batch)[0].blocks[0].sizes for batch in step.batches]
        rows = sum(batch[0].examples * z.positions for batch, z in zip(step.batches, sizes) if z is not None)
        single = unit.sharing == "expand" or rows == step.examples
        room = max(int(ROOM * rows), 2 * LEAST)
        dense = isinstance(unit.rule, Linear) and self.team.size == 1 and single
        r = (o, i)
        if dense and (o + i > max(WHOLE * rows, room) or max(o, i) > MOST):
            r_B = min(o, max(room // 2, room - i), MOST)
            r = r_B, min(i, max(room - r_B, LEAST), MOST)
        turned = 2 * g * L.offsets * o * i * (r[0] + (0 if unit.diagonal else r[1]))
        if r == (o, i):
            sides = [o] if unit.diagonal else [o, i]
            found = sum(g * (eigh * d**3 + one * rows * d * d) for d in sides)
        else:
            found = sum(
                (n := min(rows, 2 * k) + k) * n * (one * d + eigh * n) + 3 * one * d * k * k for d, k in zip((o, i), r)
            )
        table = isinstance(unit.rule, Embedding)
        self.work[0] += step_calls + (0 if table else 3 * one * rows * g * L.offsets * o * i)
        self.work[1] += calls + found + 2 * one * turned
        self.cost = self.work[1] / self.work[0]
        return Whole(unit, self.way) if r == (o, i) else Leading(unit, self.way, r)

    def pieces(self) -> dict[str, EigenPiece]:
        """The running metric of every layer that has all of its eigenbasis."""
        return {name: layer.basis for name, layer in self.layers.items() if isinstance(layer, Whole) and layer.ready}

    def detail(self, unit: LayerUnit) -> str:  # noqa: D102
        layer = self.layers.get(unit.name)
        return f", {layer.ranks[0]} + {layer.ranks[1]} eigenvectors" if isinstance(layer, Leading) else ""

    # state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        units = {
            name: {"ranks": getattr(layer, "ranks", None), **layer.state(), **self._factors(name)}
            for name, layer in self.layers.items()
        }
        own = {"refreshes": self.refreshes, "last": self.last, "work": list(self.work)}
        return {"kind": self.kind, "steps": self.steps, "units": units, **own}

    def _factors(self, name: str) -> dict[str, Any]:
        c = self.curvatures[name]
        return {"updates": c.updates, **{k: t for k, t in (("A", c.A), ("B", c.B)) if t is not None}}

    def read_state(self, state: Mapping[str, Any]) -> Any:  # noqa: D102
        known = {unit.name: unit for unit in self.units}
        if not isinstance(state, Mapping) or not {"kind", "steps", "units", "work"} <= set(state):
            raise CorruptError(f"not the state of {self.kind} without a damping: it needs kind, steps, units and work")
        if state["kind"] != self.kind or not set(state["units"]) <= set(known):
            other = sorted(set(state["units"]) - set(known))[:3]
            raise InputError(f"the state is of kind {state['kind']!r}, this is {self.kind!r}, or {other} differ")
        layers, curvatures = dict[str, Layer](), {name: Curvature() for name in known}
        for name, entry in state["units"].items():
            unit, own = known[name], dict(entry)
            ranks = own.pop("ranks")
            layers[name] = Whole(unit, self.way) if ranks is None else Leading(unit, self.way, tuple(ranks))
            factors = {k: own.pop(k) for k in ("updates", "A", "B") if k in own}
            layers[name].check(own)
            curvatures[name] = read(unit, factors)
            layers[name].load(own)
        return layers, curvatures

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self.layers, self.curvatures = self.read_state(state)
        self.steps, self.refreshes, self.last = (int(state[k]) for k in ("steps", "refreshes", "last"))
        self.work, self.graphs = list(state["work"]), {}
        self.cost = self.work[1] / max(1.0, self.work[0])
        if self.steps:
            self.doubts.discard("uses")
        self.notes = {}
        self._watch()


def began(group: dict[str, Any], device: torch.device) -> None:
    """The state of a group on the device of its layers, before its first step."""
    if "unit" not in group:
        first = float(group.get("initial_lr", group["lr"]))
        group["unit"] = min(1.0, LARGEST / first) if first > 0 else 1.0
    for name in ("stretch", "trust", "length"):
        value = group[name]
        if not isinstance(value, Tensor) or value.device != device:
            group[name] = torch.as_tensor(float(value), device=device)


class Work:
    """What a device does in a step: no number comes back from it, and nothing but `told` changes from step to step."""

    def __init__(
        self,
        layers: list[Layer],
        parameters: list[Tensor],
        group: dict[str, Any],
        beta: float,
        decays: bool,
        measures: bool,
    ) -> None:
        self.layers, self.parameters, self.group = layers, parameters, group
        self.beta, self.decays, self.measures = beta, decays, measures

    def __call__(self, told: Tensor) -> None:
        """One step. `told` are numbers that change: see `Adaptive._take`."""
        gain, rate, damping, second, energy, kept = told.unbind()
        layers, tiny = self.layers, torch.finfo(told.dtype).tiny
        D = [layer.D for layer in layers]
        slopes = norms([layer.G for layer in layers])
        if self.measures:
            self.measure(slopes, gain)
        totals = slopes.square().unbind()
        pairs = [layer.read() for layer in layers]
        means, news = [m for old, _ in pairs for m in old], [x for _, new in pairs for x in new]
        torch._foreach_lerp_(means, news, 1 - self.beta)
        energies = [layer.energy for layer in layers]
        for e, total in zip(energies, totals):
            e.lerp_(total, energy)
        m = norms([layer.M for layer in layers])
        for layer, slope, moving in zip(layers, slopes.unbind(), m.unbind()):
            layer.direct(slope, moving, damping, second)
        d = norms(D)
        lengths = torch.stack([layer.root for layer in layers]) * m / torch.stack(energies).sqrt().clamp_min(tiny)
        ratios = torch.where(d > 0, lengths / d, 0.0) * (self.group["stretch"] * rate)
        self.group["length"].copy_((ratios * d).norm())
        torch._foreach_mul_(D, list(ratios.unbind()))
        if self.decays:
            torch._foreach_mul_(self.parameters, kept)
        torch._foreach_sub_(self.parameters, [s for layer in layers for s in layer.steps])

    def measure(self, slopes: Tensor, gain: Tensor) -> None:
        """Adapt the stretch to the gradients where the last step ended."""
        down = torch.stack([torch.dot(layer.G.flatten(), layer.D.flatten()) for layer in self.layers]).sum()
        trust, stretch, length = (self.group[name] for name in ("trust", "stretch", "length"))
        trust.lerp_(torch.nan_to_num(down / (slopes.norm() * length), 0.0, 0.0, 0.0).to(trust), 1 - TRUST)
        rate = (SLOPE * trust).clamp(-1, 1)
        least = torch.where(trust < -BACK, SHORTEST, stretch.clamp(max=1.0))
        stretch.mul_((gain * torch.where(rate < 0, DOWN * rate, rate)).exp())
        stretch.copy_(torch.maximum(stretch, least).clamp(max=LONGEST))


def norms(tensors: list[Tensor]) -> Tensor:
    """Lengths [k] of k tensors."""
    return torch.stack(torch._foreach_norm(tensors))


def replayed(graphs: dict[Any, Any], key: Any, work: Callable[[Tensor], None], told: Tensor) -> None:
    """Do some work on a GPU, from the third time on as a graph of its kernels: their launches take longer than they do.

    Where the work cannot be recorded it is done as before.
    """
    known = graphs.get(key, 0)
    if known is None or torch.cuda.is_current_stream_capturing():
        work(told)
    elif isinstance(known, int) and known < 2:
        if len(graphs) > 8:
            graphs.clear()  # parameters or layers that change from step to step
        work(told)
        graphs[key] = known + 1
    else:
        if isinstance(known, int):
            try:
                graph, kept = torch.cuda.CUDAGraph(), told.clone()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    work(kept)
                known = graphs[key] = graph, kept, work
            except RuntimeError:
                graphs[key] = None
                torch.cuda.synchronize()
                work(told)
                return
        graph, kept, _ = known
        kept.copy_(told)
        graph.replay()
