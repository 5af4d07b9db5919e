"""Input gradients of sampled networks, row by row: by finite differences or by autograd.

Finite differences with a large step are what the NAD paper uses: for a step far above the size of x, a ReLU network
answers (f(x + h e_i) - f(x - h e_i)) / 2h with its response to a single pixel, whatever x is. All 2D perturbed inputs
are the same for many networks, so they are built once: for the even ones at one x and for the odd ones at another, so
that what two halves of the networks share is no property of x. Exact gradients see only the linear piece around x;
there every network has its own.

The head: the last layer's weights are drawn independently of everything else with mean zero and variance s^2, so given
the features phi below it, E[g g^T] = s^2 (dphi/dx)^T (dphi/dx), exactly. `head="marginal"` uses that: one network gives
as many rows as it has features, from the same forward passes, and far fewer networks are needed for the same accuracy.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from biascope.ensembles import Evaluator, Initialiser, Networks, Precision, input_gradients, outputs
from biascope.ensembles.engines import try_input
from biascope.ensembles.evaluate import Scalarise, scalar_of
from biascope.ensembles.initialisers import tensors_of
from biascope.geometry.nad_result import NADs
from biascope.network.door import HALVES, refuse_inference_mode, say_widened
from biascope.network.functional import explained
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import budget
from biascope.support.processes import ALONE, Processes
from biascope.support.seeds import generator

ROUNDING = 1e-2  # share of the trace that rounding may explain without a word
OF_ROUNDING = (
    "rounding explains about {:.0%} of the trace: the networks hardly depend on their input there; look at what is "
    "before their output, or use dtype=torch.float64"
)
NO_GRADIENT = (
    "all gradients are zero: a ReLU network without biases has none at 0 (use {}), and none has one of a scalarise "
    "that is constant, or steps like a sign or an argmax"
)
NO_MIXED = (
    "all mixed derivatives are zero: at x = 0 a ReLU network without biases has none, use another x; elsewhere what "
    "the output makes of the input is not up to the parameters"
)
HALF, FEW_ENTRIES = 0.5, 16  # squared cosine with x that is warned of; of few entries any direction may have it
NO_SPREAD = "centered=True takes the mean gradient off, and nothing is left of one network: give n_networks"
COARSE = {"tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}  # relative rounding where it is not the dtype's


def first_output(out: Tensor) -> Tensor:
    """The first of several outputs [n, c]: freshly initialised, they are alike."""
    return out[:, 0]


def dtype_of(initialiser: Initialiser, dtype: torch.dtype | None) -> torch.dtype | None:
    """`dtype`, or float32 for a factory whose networks are of half precision: derivatives would be rounded away."""
    kinds = {p.dtype for p in initialiser.template.parameters()}
    if dtype is not None or kinds.isdisjoint(HALVES):
        return dtype
    say_widened(initialiser.template, kinds)
    return torch.float32


def chosen_output(first: Networks, x: Tensor, scalarise: Scalarise | None) -> Scalarise | None:
    """`scalarise`, or the first output of networks that have more than two at inputs x [n, ...]."""
    return first_output if scalarise is None and try_input(first, x[:1]).shape[1] > 2 else scalarise


@dataclass(frozen=True)
class Sampler:
    """Gradients of the networks of one ensemble.

    `rows(networks)` gives [networks, r, D]: r = 1 for a sampled head, the number of features for a marginal one.
    """

    initialiser: Initialiser
    x: Tensor  # [*input_shape], of all networks if it was given, else of the first
    seed: int
    method: str
    step: float
    device: torch.device
    dtype: torch.dtype | None
    scalarise: Scalarise | None
    precision: Precision
    max_memory: str | int | None
    head: str | None = None  # name of the last layer when it is marginalised
    head_variance: float = 0.0
    drawn: bool = False  # x was not given: networks differ in their inputs too
    team: Processes = ALONE  # whose ranks have shares of the networks
    sizes: list[float] = field(default_factory=list)  # of the outputs, once differences were taken; see `rounding`

    @property
    def dimension(self) -> int:
        """D."""
        return self.x.numel()

    def draw(self, start: int, stop: int) -> Networks:
        """Networks start, ..., stop - 1."""
        return self.initialiser.draw(self.seed, start, stop, self.device, self.dtype)

    @property
    def piece(self) -> int:
        """How many networks are drawn at once."""
        size = max(1, min(self.initialiser.block, 2**26 // (2 * self.dimension)))
        if self.device.type == "cuda":  # a captured graph pays only when many networks are run through it
            own = 4 * sum(p.numel() for p in self.initialiser.template.parameters())
            room = min(4096, 2**30 // (2 * self.dimension), budget(self.max_memory, self.device) // (8 * own))
            size = max(size, room // size * size)
        return size

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(first network, rows) for networks start, ..., stop - 1, in pieces that respect the initialiser's blocks."""
        size, together = self.piece, 0
        held = self.method == "finite-difference" and self._at_once == self.dimension
        evaluate = tuple(self._evaluator(x) for x in self._points(stop)) if held else ()
        while start < stop:
            end = min(stop, (start // size + 1) * size)
            networks = self.draw(start, end)
            together = together or self._together(networks, size)
            for first in range(0, end - start, together):
                part = networks[first : first + together]
                yield start + first, self.rows(part, start + first, stop - start - first, evaluate)
            start = end

    def _together(self, networks: Networks, size: int) -> int:
        """Of `size` networks drawn at once, how many may be evaluated at once: features and outputs multiply."""
        if self.method == "autograd" or (self.head is None and self.scalarise is None):  # one output, or two
            return size
        below = networks[:1] if self.head is None else without_head(networks[:1], self.head)
        width = try_input(below, self.x[None]).shape[1]
        # outputs in pieces and joined; then, of features, their differences, joined and scaled
        held = (4 * self._at_once + (2 * self.dimension if self.head is not None else 0)) * width
        return max(1, min(size, budget(self.max_memory, self.device) // (2 * held * self.x.element_size())))

    def rows(self, networks: Networks, start: int = 0, total: int = 0, evaluate: tuple[Evaluator, ...] = ()) -> Tensor:
        """Gradients [networks, r, D] of networks start, ..., out of `total` that are still to come.

        `evaluate` knows all perturbed inputs already, if they are few enough to be held.
        """
        if self.method == "autograd":
            own = [self.point(start + i) for i in range(len(networks))] if self.drawn else None
            x = self.x[None] if own is None else torch.stack(own)[:, None]
            options: dict[str, Any] = {"scalarise": self.scalarise, "max_memory": self.max_memory}
            return input_gradients(networks, x, per_network=self.drawn, **options).flatten(2)
        points = self._points(start + len(networks))
        shares = [slice((start + i) % len(points), None, len(points)) for i in range(len(points))]
        shares = [share for share in shares if share.start < len(networks)]
        found = []
        for share in shares:
            which = (start + share.start) % len(points)
            ready = evaluate[which] if evaluate else None
            found.append(self._rows_at(points[which], networks[share], -(-total // len(points)), ready))
        if len(found) == 1:
            return found[0]
        out = found[0].new_empty(len(networks), *found[0].shape[1:])
        for share, rows in zip(shares, found):
            out[share] = rows
        return out

    def _rows_at(self, x: Tensor, networks: Networks, total: int, evaluate: Evaluator | None) -> Tensor:
        if self.head is None:
            return self._differences(x, networks, total, evaluate)[:, None]
        rows = self._differences(x, without_head(networks, self.head), total, evaluate)
        return rows.mul_(math.sqrt(self.head_variance)).transpose(1, 2)

    def point(self, network: int) -> Tensor:
        """The input of one network, where each has its own."""
        if network == 0:
            return self.x
        x = torch.randn(self.x.shape, generator=generator(self.seed, "x", network), device="cpu")
        return x.to(self.x.device, self.x.dtype)

    def _points(self, total: int) -> tuple[Tensor, ...]:
        """Where differences are taken: of the even networks and of the odd ones."""
        return (self.x, self.point(1)) if self.drawn and total > 1 else (self.x,)

    def inputs(self, count: int) -> int:
        """How many inputs `count` networks were looked at with."""
        if not self.drawn or self.method in ("mixed-derivative", "ntk"):
            return 1
        return count if self.method == "autograd" else min(count, 2)

    @property
    def _at_once(self) -> int:
        """Input directions whose perturbed inputs are held at once: an eighth of the memory, if that was given."""
        most = 2**26  # pairs of entries
        if self.max_memory is not None:  # else what is free, which changes from call to call
            most = min(most, budget(self.max_memory, self.device) // (8 * 2 * self.x.element_size()))
        return max(1, min(self.dimension, most // self.dimension))

    def _evaluator(self, x: Tensor, start: int = 0) -> Evaluator:
        x = perturbed(x, start, min(start + self._at_once, self.dimension), self.step)
        return Evaluator(x, precision=self.precision, max_memory=self.max_memory)

    def _differences(self, x: Tensor, networks: Networks, total: int, evaluate: Evaluator | None) -> Tensor:
        """Central differences: [T, D] of the scalar output, or [T, D, features]."""
        pieces, squares, watch = [], 0.0, len(self.sizes) < 16  # the first tell how large outputs are
        for start in range(0, self.dimension, self._at_once):
            out = raw = (evaluate or self._evaluator(x, start))(networks, total)
            if self.head is None:
                T, n, c = out.shape
                out = scalar_of(out.reshape(T * n, c), self.scalarise).reshape(T, n)
            squares += float((raw if self.scalarise is None else out).norm()) ** 2 if watch else 0.0
            del raw
            half = out.shape[1] // 2
            pieces.append((out[:, :half] - out[:, half:]).div_(2 * self.step))
        if watch:
            scale = (1.0 if self.head is None else self.head_variance) / (4 * self.step**2)
            self.sizes.append(scale * squares / len(networks))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def result(
        self, vectors: Tensor, values: Tensor, errors: Tensor, trace: float, count: int, step: float, **more: Any
    ) -> NADs:
        """What is given back, from eigenvectors [D, k] and eigenvalues [k] of `count` networks."""
        if not bool(values[0] > 0):
            raise InputError(NO_MIXED if self.method in ("mixed-derivative", "ntk") else NO_SPREAD)
        directions, reasons = vectors.T.reshape(-1, *self.x.shape).cpu().contiguous(), dict(self.initialiser.reasons)
        inputs = self.inputs(count)
        x = self.x.cpu() if inputs == 1 and self.method != "ntk" else None
        about = {"fallback": reasons, "x": x, "inputs": inputs, **more}
        values, errors = values.double().cpu(), errors.double().cpu()
        found = NADs(directions, values, errors, trace, count, self.seed, self.method, step, **about)
        if found.towards_x**2 > HALF and found.dimension >= FEW_ENTRIES:
            warnings.warn(
                f"the first direction is nearly the input x itself (cosine {found.towards_x:.2f}), since all networks "
                "share it: leave out x=, or take wide finite differences",
                stacklevel=7,
            )
        return found

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of networks start, ..., stop - 1."""
        part = self.team.share(stop - start)
        return start + part.start, start + part.stop

    def together(self) -> None:
        """From here on all ranks know the same of the size of outputs: that of the first networks."""
        if self.team.size > 1:
            self.sizes[:] = next((sizes for sizes in self.team.gather(self.sizes) if sizes), [])

    def rounding(self, trace: float) -> float:
        """Share of the trace that rounding explains: of the outputs and of x + h and x - h, or of exact gradients.

        f is rounded to eps |f|, so (f+ - f-) / 2h has the variance eps^2 (f+^2 + f-^2) / 4h^2. Of tf32 the outputs are
        float32: it rounds factors inside the network, most of them alike on both sides.
        """
        if self.method == "autograd":
            return share_of_rounding(self.initialiser, self.x[None], self.seed, self.device, self.dtype, self.scalarise)
        if not self.sizes or not trace > 0:
            return 0.0
        width = ((self.x + self.step) - (self.x - self.step)).double() / (2 * self.step)
        eps = self._eps("float32" if self.precision == "tf32" else self.precision)
        return eps**2 * fmean(self.sizes) / trace + float((width - 1).square().mean())

    def floor(self, trace: float) -> float:
        """Eigenvalue up to which a direction may be made of rounding alone, which spreads over all of them."""
        eps = self._eps(self.precision)
        return 4 * eps**2 * fmean(self.sizes) / self.dimension if self.sizes else 100 * eps**2 * trace

    def _eps(self, precision: Precision) -> float:
        return max(torch.finfo(self.x.dtype).eps, COARSE.get(precision, 0.0))

    def marginal(self) -> Sampler:
        """The same with the head averaged out; refused when the last layer is not one that can be."""
        refuse_inference_mode()  # in it tensors do not say whether they were changed
        if self.scalarise is not None:
            raise sampled_only("the last layer is averaged out, so there is nothing to scalarise")
        networks = self.initialiser.draw(self.seed, 0, 1, dtype=self.dtype)
        try_input(networks, self.x[None].to(networks.device))  # after a call, what weight_norm computes can be copied
        name, outputs_count = find_head(networks, self.x)
        variance = self.initialiser.variance_of(f"{name}.weight")
        if variance is None:
            how = self.initialiser.distribution(f"{name}.weight")
            raise sampled_only(f"the weights of '{name}' are not independent and centred ({how})")
        if not self.initialiser.drawn_apart(f"{name}.weight"):
            raise sampled_only(f"other parameters or buffers are made of the weights of '{name}'")
        if outputs_count > 2:
            raise sampled_only(f"it is for one output or two logits, not {outputs_count}")
        if not _is_linear(networks, name, self.x):
            raise sampled_only(f"what '{name}' gives is not its weight times what it gets, plus its bias")
        return replace(self, head=name, head_variance=variance * outputs_count)


def sampled_only(why: str) -> UnsupportedError:
    """Why the head cannot be averaged out."""
    return UnsupportedError(f"head='marginal': {why}; use head='sampled'")


def share_of_rounding(
    initialiser: Initialiser,
    x: Tensor,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    scalarise: Scalarise | None,
) -> float:
    """Share of the trace that rounding explains in exact gradients at x [n, ...], seen on two networks in float64.

    It is all of it where a network does not depend on its input: the mean of what instance normalisation gives is zero,
    but for rounding. 0 where there is nothing finer to compare with.
    """
    own, finer = (initialiser.draw(seed, 0, 2, device, kind) for kind in (dtype, torch.float64))
    if own.dtype == finer.dtype:
        return 0.0
    try:
        rough, exact = (
            input_gradients(networks, x, scalarise=scalarise, engine="loop").double() for networks in (own, finer)
        )
    except (RuntimeError, TypeError):  # constants of another precision
        return 0.0
    size = float(rough.square().sum())
    return float((rough - exact).square().sum()) / size if size > 0 else 0.0


def perturbed(x: Tensor, start: int, stop: int, step: float) -> Tensor:
    """x + h e_i for i = start, ..., stop - 1, then x - h e_i for the same: [2 (stop - start), *shape]."""
    count = stop - start
    made = x.flatten().repeat(2 * count, 1)
    index = torch.arange(count, device=x.device)
    made[index, start + index] += step
    made[count + index, start + index] -= step
    return made.view(2 * count, *x.shape)


def find_head(networks: Networks, x: Tensor) -> tuple[str, int]:
    """Name and number of outputs of the nn.Linear whose output is the network's output."""
    module = networks.module(0)
    x = x[None].to(networks.device, networks.dtype)
    seen: dict[str, tuple[Tensor, Tensor, int]] = {}  # input, output and how often it had been written to
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda m, args, out, name=name: seen.__setitem__(name, (args[0], out, out._version))
            )
    with torch.no_grad(), explained(module, x):
        out = module(x.clone())  # it may write into what it gets
        last = [name for name, (_, value, _) in seen.items() if isinstance(out, Tensor) and value is out]
        if len(last) != 1 or last[0] == "":
            raise sampled_only("the network does not end in an nn.Linear")
        if out._version != seen[last[0]][2]:
            raise sampled_only(f"the output of the last layer '{last[0]}' is changed in place after it")
        features = seen[last[0]][0].clone()
        if features.numel() != features.shape[-1]:
            raise sampled_only(f"the last layer '{last[0]}' acts on several places of an input, {list(features.shape)}")
        weight = module.get_submodule(last[0])._parameters.get("weight")
        if weight is None:
            raise sampled_only(f"the weight of the last layer '{last[0]}' is computed from other parameters")
        weight.add_(1)
        module(x.clone())
    if not torch.equal(seen[last[0]][0], features):
        raise sampled_only(f"the weight of the last layer '{last[0]}' is used below it too")
    return last[0], int(out.shape[-1])


def _is_linear(networks: Networks, head: str, x: Tensor) -> bool:
    """Whether the network is weight @ features + bias: classes and hooks can do more than nn.Linear."""
    inputs, values = x[None].to(networks.device, networks.dtype), networks.one(0)
    expected = outputs(networks[:1], inputs, engine="loop")[0]
    features = outputs(without_head(networks[:1], head), inputs, engine="loop")[0]
    weight = values[f"{head}.weight"]
    found = nn.functional.linear(features, weight, values.get(f"{head}.bias"))
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(features.norm() * weight.norm()))


def without_head(networks: Networks, head: str) -> Networks:
    """The same networks ending below their last layer."""
    template = _truncated(networks.template, head)
    params, buffers = (
        {name: value for name, value in part.items() if not name.startswith(f"{head}.")}
        for part in (networks.params, networks.buffers)
    )
    if not params and not buffers:
        buffers = {NOTHING: torch.zeros(len(networks), dtype=networks.dtype, device=networks.device)}
    return Networks(template, params, buffers)


NOTHING = "nothing_below_the_head"  # a linear network has no tensors without its only layer, but stacks have a length
_TRUNCATED: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()


def _truncated(template: nn.Module, head: str) -> nn.Module:
    cache = _TRUNCATED.setdefault(template, {})
    if head not in cache:  # one copy per template, so that evaluation plans are remembered
        cut = copy.deepcopy(template)
        parent, _, name = head.rpartition(".")
        setattr(cut.get_submodule(parent), name, nn.Identity())
        if not tensors_of(cut):
            cut.register_buffer(NOTHING, torch.zeros((), device="cpu"))
        cache[head] = cut
    return cache[head]
