"""tau = theta* - theta0: what fine-tuning did to the weights, as a vector that can be added, scaled and applied.

What counts as a weight. Parameters do, each tied one once. Integer and boolean tensors never do and are never scaled:
an edited model keeps its own. Floating-point buffers (BatchNorm's running statistics) are not weights either, but the
fine-tuned function depends on them: if they differ, `buffers=` must say what becomes of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from biascope.editing.states import State, agree, belongs, chosen, joined, listed, one, place, read, tied
from biascope.network.functional import ParamSelection, select_params
from biascope.support.arguments import check_number, device_of
from biascope.support.errors import CorruptError, InputError
from biascope.support.files import checksum, read_tensors, write_tensors
from biascope.support.inputs import is_finite
from biascope.support.signatures import checked
from biascope.support.tables import grid
from biascope.tangent.anchored import copy_of
from biascope.tangent.linearized import Linearized

FORMAT = 1
M = TypeVar("M", bound=nn.Module)


class TaskVector:
    """The difference of two states of one network, with the arithmetic of vectors: `0.5 * a + b`, `-a`, `a / 2`.

    Differences are kept in the precision and on the device of the weights; norms and products are summed in float64.
    Norms, products and `size` are over weights, not over buffers.

    Args:
        pretrained: theta0: a module, a state dict, or {name: tensor}. Not copied, not changed.
        finetuned: theta*, with the same names, shapes, precision and device.
        params: which parameters are compared: "all", a name, a layer prefix or a glob pattern, a list of those, or a
            predicate. What is left out may differ or be missing (heads of different tasks).
        buffers: what to do with floating-point buffers that differ. "refuse"; "keep": an edited model keeps its own;
            "move": they are part of the vector and move with it (but not of its norm).

    In a state dict only BatchNorm's statistics are known to be buffers, by name; give a module where there are others.

    Example:
        >>> theta0, theta1 = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
        >>> tau = TaskVector(theta0, theta1)
        >>> tau.norm(), (0.5 * tau - tau)["w"]
        (5.0, tensor([-1.5000, -2.0000]))
        >>> (-tau).apply_to(theta1)["w"]
        tensor([0., 0.])
    """

    tensors: Mapping[str, Tensor]
    buffers: frozenset[str]
    aliases: Mapping[str, str]  # other names of tied tensors -> the name in `tensors`
    __array_ufunc__ = None  # numpy's numbers leave multiplication to this class

    @checked
    def __init__(
        self,
        pretrained: State,
        finetuned: State,
        *,
        params: ParamSelection = "all",
        buffers: Literal["refuse", "keep", "move"] = "refuse",
    ) -> None:
        old, new = read(pretrained, "pretrained"), read(finetuned, "finetuned")
        statistics = old.buffers | new.buffers
        old, new = chosen(old, statistics, params), chosen(new, statistics, params)
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for names in joined(tied(old.tensors), tied(new.tensors)):
            a, b = (one(side.tensors, names, who) for side, who in ((old, "pretrained"), (new, "finetuned")))
            name = names[0]
            agree(a, b, name, ("pretrained", "finetuned"))
            if not belongs(name, a, b, name in statistics, buffers):
                continue
            tensors[name] = b - a
            aliases |= dict.fromkeys(names[1:], name)
        self._set(_numbers(tensors), statistics & tensors.keys(), aliases)

    def _set(self, tensors: Mapping[str, Tensor], buffers: frozenset[str], aliases: Mapping[str, str]) -> None:
        self.tensors, self.buffers, self.aliases = tensors, frozenset(buffers), aliases

    @classmethod
    @checked
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TaskVector:
        """A vector from differences that are known already, {name: tensor}; not copied."""
        held = read(tensors, "tensors")
        groups = tied(_numbers(held.tensors))
        vector = cls.__new__(cls)
        vector._set(
            {names[0]: held.tensors[names[0]] for names in groups},
            frozenset(names[0] for names in groups if names[0] in held.buffers),
            {other: names[0] for names in groups for other in names[1:]},
        )
        return vector

    def __add__(self, other: object) -> TaskVector:
        if isinstance(other, TaskVector):
            return self._with({k: a + b for k, a, b in self._pairs(other)})
        return self if isinstance(other, int) and other == 0 else NotImplemented  # the start of sum()

    __radd__ = __add__

    def __sub__(self, other: object) -> TaskVector:
        if isinstance(other, TaskVector):
            return self._with({k: a - b for k, a, b in self._pairs(other)})
        return NotImplemented

    def __mul__(self, scale: object) -> TaskVector:
        return self._scaled(scale, torch.mul)

    __rmul__ = __mul__

    def __truediv__(self, scale: object) -> TaskVector:
        return self._scaled(scale, torch.div)

    def _scaled(self, scale: object, by: Callable[[Tensor, float], Tensor]) -> TaskVector:
        if not isinstance(scale, Real) and not (isinstance(scale, Tensor) and scale.dim() == 0):
            return cast("TaskVector", NotImplemented)
        factor = check_number(scale, "scale")
        if by is torch.div and not factor:
            raise InputError("a task vector cannot be divided by zero")
        return self._with({k: by(t, factor) for k, t in self.tensors.items()})

    def __neg__(self) -> TaskVector:
        return self._with({k: -t for k, t in self.tensors.items()})

    @checked
    def dot(self, other: TaskVector) -> float:
        """Inner product over all weights, in float64."""
        pairs = self._pairs(other)
        return math.fsum(_inner(a, b) for k, a, b in pairs if k not in self.buffers)

    def norm(self) -> float:
        """Euclidean length over all weights, in float64."""
        return math.sqrt(math.fsum(norm**2 for norm in self._norms().values()))

    @checked
    def cosine(self, other: TaskVector) -> float:
        """Cosine of the angle to another vector; NaN if one of them is zero."""
        lengths = self.norm() * other.norm()
        return min(max(self.dot(other) / lengths, -1.0), 1.0) if lengths else float("nan")

    def rms(self) -> float:
        """||tau|| / sqrt(m): how far one weight moved; with it models of different size are compared."""
        return self.norm() / math.sqrt(self.size)

    def layer_norms(self) -> dict[str, float]:
        """Length per layer, {layer: norm}; their squares sum to `norm()` squared."""
        squares: dict[str, list[float]] = {}
        for name, norm in self._norms().items():
            squares.setdefault(name.rpartition(".")[0], []).append(norm**2)
        return {layer: math.sqrt(math.fsum(parts)) for layer, parts in squares.items()}

    @checked
    def sparsity(self, share: float = 0.9) -> float:
        """The smallest share of the weights that carries `share` of the squared length; NaN for a zero vector."""
        weights = [t.flatten().double().square() for k, t in self.tensors.items() if k not in self.buffers]
        energy = torch.cat(weights).sort(descending=True).values.cumsum(0)
        needed = int((energy < share * energy[-1] * (1 - 1e-12)).sum()) + 1
        return needed / len(energy) if float(energy[-1]) else float("nan")

    def effective_ranks(self) -> dict[str, float]:
        """(sum s)^2 / sum s^2 of the singular values of every weight matrix (convolutions: outputs x the rest).

        1 for one direction, min(rows, columns) for equal singular values; NaN where the vector is zero.
        """
        matrices = {k: t for k, t in self.tensors.items() if t.dim() > 1 and t.numel() and k not in self.buffers}
        values = {k: torch.linalg.svdvals(t.double().flatten(1)) for k, t in matrices.items()}
        return {k: float(s.sum().square() / s.square().sum()) for k, s in values.items()}

    @checked
    def restrict(self, params: str | Sequence[str] | Callable[[str, Tensor], bool]) -> TaskVector:
        """The entries of some parameters or layers only; the rest is left out, so an edited model keeps it."""
        names = select_params(self.tensors, params)
        return self._with({k: self.tensors[k] for k in names})

    @checked
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TaskVector:
        """The vector on another device or in another precision."""
        where = None if device is None else device_of(device)
        return self._with({k: t.to(where, dtype) for k, t in self.tensors.items()})

    @property
    def size(self) -> int:
        """Number of weights, m; a tied tensor counts once."""
        return sum(t.numel() for k, t in self.tensors.items() if k not in self.buffers)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.aliases.get(name, name)]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.aliases

    @overload
    def apply_to(self, model: M, scale: float = ...) -> M: ...
    @overload
    def apply_to(self, model: Mapping[str, Tensor], scale: float = ...) -> dict[str, Tensor]: ...
    @checked
    def apply_to(self, model: State, scale: float = 1.0) -> Any:
        """theta + scale * tau: a new module from a module, a new state dict from a state dict.

        One copy of the model is made and moved in place; the given one is not changed. Parameters that the vector does
        not have stay as they are. In a state dict only the moved tensors are new. `apply_to(model.state_dict())` gives
        the edited weights without a second module, `apply_to(bs.linearize(model))` the post-hoc linearisation.
        """
        factor = check_number(scale, "scale")
        edited: Any
        if isinstance(model, Mapping):
            edited = state = dict(read(model, "the state dict").tensors)
            groups = {name: names for names in tied(state) for name in names}
            for name, tau in self.on(state, "the state dict").items():
                state |= dict.fromkeys(groups[name], torch.add(state[name], tau, alpha=factor))
        else:
            edited = copy_of(getattr(model, "_orig_mod", model))
            state = read(edited, "the model").tensors
            with torch.no_grad():
                for name, tau in self.places_in(edited).items():
                    state[name].add_(tau, alpha=factor)  # detached, but the same memory as the copy's own
        variances = [k for k in self.buffers if k.endswith("running_var") and k in state]
        negative = [k for k in variances if bool((state[k] < 0).any())]
        if negative:
            raise InputError(f"scale={scale:g} makes the variance {listed(negative)} negative: use buffers='keep'")
        return edited

    def places_in(self, model: nn.Module) -> dict[str, Tensor]:
        """The vector under the names of a module, `on` its state; nothing that is constant in it may be moved."""
        places = self.on(read(model, "the model").tensors)
        linear = [(f"{path}." if path else "", m) for path, m in model.named_modules() if isinstance(m, Linearized)]
        still = [
            name
            for prefix, lin in linear
            for name, tau in places.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in lin.linearized and bool((tau != 0).any())
        ]
        if still:
            raise InputError(f"the task vector moves '{still[0]}', not linearised: use restrict(...) or buffers='keep'")
        return places

    @checked
    def on(self, state: Mapping[str, Tensor], whose: str = "the model") -> dict[str, Tensor]:
        """The vector under the names of a state, tied tensors once: {name in `state`: tau}; not copied.

        Raises where a tensor of the vector has no place in it, or another shape, precision or device.
        """
        places: dict[str, Tensor] = {}
        taken: dict[tuple[object, ...], str] = {}
        for name, t in state.items():
            if name not in self:
                continue
            tau = self[name]
            agree(tau, t, name, ("the task vector", whose))
            first = taken.setdefault(place(t), name)
            if first == name:
                places[name] = tau
            elif self[first] is not tau and not torch.equal(self[first], tau):
                raise InputError(f"'{first}' and '{name}' are tied in {whose}, but the task vector moves them apart")
        lost = [k for k in self.tensors if k not in state and not any(a in state for a in self._other_names(k))]
        if lost:
            raise InputError(f"{whose} has no {listed(lost)}, which the task vector moves: use restrict(...) first")
        return places

    def _other_names(self, name: str) -> list[str]:
        return [alias for alias, first in self.aliases.items() if first == name]

    @checked
    def save(self, path: str | Path) -> Path:
        """Write to a safetensors file, which appears whole or not at all."""
        path = Path(path)
        arrays = {k: t.detach().cpu().contiguous() for k, t in self.tensors.items()}
        header = {
            "format": FORMAT,
            "kind": "task vector",
            "buffers": sorted(self.buffers),
            "aliases": dict(self.aliases),
            "sums": {k: checksum(t) for k, t in arrays.items()},
        }
        write_tensors(path, arrays, {"biascope": json.dumps(header)})
        return path

    @classmethod
    @checked
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> TaskVector:
        """Read what `save` wrote."""
        path = Path(path)
        tensors, metadata = read_tensors(path)
        header = json.loads(metadata.get("biascope", "{}"))
        if (header.get("kind"), header.get("format")) != ("task vector", FORMAT):
            raise CorruptError(f"{path}: not a task vector saved by biascope in format {FORMAT}")
        wrong = [k for k, crc in header["sums"].items() if k not in tensors or checksum(tensors[k]) != crc]
        if wrong:
            raise CorruptError(f"{path}: '{wrong[0]}' is not what was saved, the file is damaged")
        vector = cls.__new__(cls)
        where = device_of(device)
        vector._set({k: tensors[k].to(where) for k in header["sums"]}, frozenset(header["buffers"]), header["aliases"])
        return vector

    def _with(self, tensors: Mapping[str, Tensor]) -> TaskVector:
        vector = type(self).__new__(type(self))
        aliases = {alias: name for alias, name in self.aliases.items() if name in tensors}
        vector._set(tensors, self.buffers & tensors.keys(), aliases)
        return vector

    def _pairs(self, other: TaskVector) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Entries of both, by the names of this one; checked before the first is given."""
        for left, right, which in ((self, other, "second"), (other, self, "first")):
            lost = [k for k in left.tensors if not any(name in right for name in (k, *left._other_names(k)))]
            if lost:
                raise InputError(f"the {which} task vector has no {listed(lost)}: restrict both to the same parameters")
        if len(self.tensors) != len(other.tensors):
            raise InputError("tensors are tied in one of the two task vectors and not in the other")
        found = []
        for k, a in self.tensors.items():
            name = next(name for name in (k, *self._other_names(k)) if name in other)
            agree(a, other[name], k, ("the first task vector", "the second"))
            found.append((k, a, other[name]))
        return iter(found)

    def _norms(self) -> dict[str, float]:
        weights = {k: t for k, t in self.tensors.items() if k not in self.buffers}
        return {k: math.sqrt(_inner(t, t)) for k, t in weights.items()}

    def __repr__(self) -> str:
        t = next(iter(self.tensors.values()))
        moved = f", {len(self.buffers)} buffers" if self.buffers else ""
        kind = str(t.dtype).removeprefix("torch.")
        return f"TaskVector({self.size:,} weights{moved}, norm {self.norm():.4g}, {kind}, {t.device})"

    def _repr_html_(self) -> str:
        """Length per layer, for notebooks."""
        title = f"Task vector of {self.size:,} weights, norm {self.norm():.4g}"
        return grid(title, ["layer", "norm"], list(self.layer_norms().items()))


def _numbers(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors, if a vector can be made of them."""
    wrong = [k for k, t in tensors.items() if not (t.is_floating_point() and (not t.numel() or is_finite(t)))]
    if wrong or not tensors:
        raise InputError(f"a task vector needs tensors of finite floating-point numbers, not {listed(wrong) or 'none'}")
    return tensors


def _inner(a: Tensor, b: Tensor) -> float:
    """Inner product in float64, in pieces, so that a large embedding is not copied whole."""
    pieces = zip(torch.split(a.reshape(-1), 1 << 24), torch.split(b.reshape(-1), 1 << 24))
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in pieces)
