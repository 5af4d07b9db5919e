"""The ways to run many networks on the same or their own inputs: in turn, by vmap, or as one captured graph."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from biascope.ensembles.compiled import Compiled
from biascope.ensembles.graphs import capture
from biascope.ensembles.networks import Networks
from biascope.ensembles.products import AffineNorm
from biascope.network.derivatives import call
from biascope.network.functional import as_rows, explained
from biascope.network.outputs import main_tensor
from biascope.support.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Plan:
    """How the networks are run: engine, inputs per call, networks per call (vmap), memory layout (loop, graph).

    `seconds` is what one network took on all inputs when engines were compared; 0 when there was no choice.
    """

    engine: str
    inputs: int
    networks: int = 1
    channels_last: bool = False
    seconds: float = 0.0


def run_group(group: Networks, x: Tensor, start: int, plan: Plan, per_network: bool) -> Tensor:
    """Outputs [networks, inputs, c] of a group on inputs start, ..., start + plan.inputs - 1."""
    piece = x[:, start : start + plan.inputs] if per_network else x[start : start + plan.inputs]
    if plan.engine == "vmap":
        values = {**group.params, **group.buffers}
        run = vmap(lambda v, inputs: call_rows(group.template, v, inputs), in_dims=(0, 0 if per_network else None))
        return run(values, piece)
    rows = []
    for i in range(len(group)):
        values, inputs = group.one(i), piece[i] if per_network else piece
        if plan.channels_last:
            values, inputs = _channels_last(values), layout(inputs, True)
        rows.append(call_rows(group.template, values, inputs))
    return torch.stack(rows)


def run_all(networks: Networks, x: Tensor, plan: Plan, per_network: bool) -> Tensor:
    """By vmap or in turn, in as many pieces as the plan says."""
    pieces, n = [], x.shape[1] if per_network else len(x)
    with as_vmap("run", networks.template) if plan.engine == "vmap" else nullcontext():
        for start in range(0, len(networks), plan.networks):
            group = networks[start : start + plan.networks]
            own = x[start : start + plan.networks] if per_network else x
            parts = [run_group(group, own, i, plan, per_network) for i in range(0, n, plan.inputs)]
            pieces.append(torch.cat(parts, dim=1))
    return torch.cat(pieces)


@contextmanager
def as_vmap(verb: str, template: nn.Module) -> Iterator[None]:
    """What torch raises where vmap does not know an operation, with the engine that does."""
    try:
        yield
    except (torch.OutOfMemoryError, UnsupportedError):
        raise
    except (RuntimeError, NotImplementedError) as error:
        what = f"{type(template).__name__} ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        raise UnsupportedError(f"vmap cannot {verb} {what}; use engine='loop'") from error


class Replay:
    """Networks in turn, each copied into the parameters of one captured CUDA graph that runs all inputs."""

    def __init__(
        self,
        networks: Networks,
        x: Tensor,
        plan: Plan,
        made: Compiled | None = None,
        long: bool = False,
        search: bool = False,
    ) -> None:
        x, first, template = layout(x, plan.channels_last), networks.one(0), networks.template
        if made is None:
            static = {name: value.clone() for name, value in first.items()}
            static = _channels_last(static) if plan.channels_last else static
        else:
            held = made.values()
            static = {name: held[name] for name in first}

        def outputs_on(piece: Tensor) -> Tensor:
            if made is None:
                return call_rows(template, static, piece)
            return rows_of(made.call(piece), piece, template)

        def everything() -> Tensor:
            return torch.cat([outputs_on(x[i : i + plan.inputs]) for i in range(0, len(x), plan.inputs)])

        with nullcontext() if made else AffineNorm():
            self.run = capture(everything, device=networks.device, warm_up=1, search=search)
        self.static, self.made_for = static, (template, networks.device, networks.dtype, plan, long)

    def serves(self, networks: Networks, plan: Plan, long: bool) -> bool:
        """Is it for such networks, and compiled where that pays?"""
        return self.made_for == (networks.template, networks.device, networks.dtype, plan, long or self.made_for[-1])

    def __call__(self, networks: Networks) -> Tensor:
        """Outputs [T, n, c]."""
        for i in range(len(networks)):
            own = networks.one(i)
            torch._foreach_copy_(list(self.static.values()), [own[name] for name in self.static])
            out = self.run()
            if i == 0:
                results = out.new_empty(len(networks), *out.shape)
            results[i].copy_(out)
        return results


def call_rows(template: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs [n, c] of the template with these parameters and buffers."""
    return rows_of(call(template, values, (x,)), x, template)


def logits_of(out: Any) -> Any:
    """The tensor that is meant by an output, see `main_tensor`; what has none as it is."""
    held = main_tensor(out)[0]
    return out if held is None else held


def rows_of(out: Any, x: Tensor, template: nn.Module) -> Tensor:
    """What the template returned as [n, c], in float32 at least."""
    if not isinstance(logits_of(out), Tensor):
        raise InputError(f"{type(template).__name__} returned a {type(out).__name__}: let it return one tensor")
    rows = as_rows(out, len(x), None, template)
    return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows


def layout(x: Tensor, channels_last: bool) -> Tensor:
    """Inputs in the memory order that is wanted."""
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def takes_channels_last(module: nn.Module, x: Tensor, values: dict[str, Tensor] | None = None) -> bool:
    """Whether inputs x are images [n, c, h, w], and the network runs with them and its weights in channels-last order.

    `x.view(len(x), -1)`, which asks for the plain order, does not.
    """
    if x.dim() != 4:
        return False
    tensors = dict((*module.named_parameters(), *module.named_buffers())) if values is None else values
    training = module.training
    try:
        with torch.no_grad():
            call(module.eval(), _channels_last({k: v.detach() for k, v in tensors.items()}), (layout(x[:2], True),))
    except RuntimeError:
        return False
    finally:
        module.train(training)
    return True


def _channels_last(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in values.items()
    }


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are equal but for rounding; what is not finite is for others to refuse."""
    scale = float(a.abs().max())
    # on a GPU sums may come in another order each time, of numbers of 11 bits (tf32)
    room = 0.1 if a.is_cuda else 10 * torch.finfo(a.dtype).eps ** 0.5
    return not scale < torch.inf or bool(((a - b).abs() <= room * scale).all())


def try_input(networks: Networks, x: Tensor) -> Tensor:
    """Outputs [1, c] of the first network on the first of x [n, ...], or an error that says what does not fit.

    Networks that write into their buffers when they are called are refused: what they give would depend on how often
    they were called before, and on which of them share the memory of a constant. So are those that draw random numbers,
    which a second call shows.
    """
    one, values, template = x[:1], networks.one(0), networks.template
    buffers = {name: values[name].clone() for name in networks.buffers}
    versions = {name: value._version for name, value in buffers.items()}
    with torch.no_grad(), explained(template, one):
        out = call_rows(template, {**values, **buffers}, one)
    changed = [name for name, value in buffers.items() if value._version != versions[name]]
    if changed:
        kind, mode = (
            type(template).__name__,
            "train mode" if template.training else "eval mode; it may in train mode",
        )
        raise UnsupportedError(f"{kind} changes its buffer '{changed[0]}' when it is called in {mode}")
    with torch.no_grad():
        again = call_rows(template, {**values, **buffers}, one)
    if not alike(out, again):
        fix = "switch off what is random in it (F.dropout needs training=self.training)"
        raise UnsupportedError(f"{type(template).__name__} gives different outputs for the same input: {fix}")
    return out
