"""Networks as a card needs them: one floating tensor in, one tensor out, the layers under the names their owner knows.

Objects with `.logits`, dicts and tuples come back as one tensor. What looks up tokens by number takes embedded tokens,
which have derivatives, in the place of its own embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.ensembles.redraw import from_transformers
from biascope.network.outputs import main_tensor
from biascope.support.hints import arguments_of

Take = Callable[[Any], Tensor | None]
Still = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
PARALLEL = "DistributedDataParallel"  # by name: torch.distributed is not there in every build


@dataclass(frozen=True)
class Way:
    """How a network is called, and what is taken of what it returns.

    Floating inputs of a network of tokens are embedded tokens [n, tokens, width]: `argument` "inputs_embeds" takes them
    where its forward has that, else they stand for what the layer `table` returns. Inputs beside the first stand
    `still`, at zeros of a shape per example and a dtype.
    """

    take: Take
    argument: str = ""
    table: str = ""
    still: Still = field(default_factory=dict)


class Adapted(nn.Module):
    """A network behind another call. Its parameters, buffers and layers are the network's own, under their names."""

    def __init__(self, net: nn.Module, way: Way) -> None:
        super().__init__()
        # not registered, which would put a name in front of all others: the dictionaries are shared instead
        vars(self)["_adapted"], vars(self)["_way"] = net, way
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[shared] = vars(net)[shared]
        self.training = net.training

    def train(self, mode: bool = True) -> "Adapted":
        """The network too, which is no child of this module."""
        vars(self)["_adapted"].training = mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] to the tensor that is meant."""
        net: nn.Module = vars(self)["_adapted"]
        way: Way = vars(self)["_way"]
        given: dict[str, Any] = {"use_cache": False} if caches(net) else {}
        given |= {name: x.new_zeros((len(x), *shape), dtype=kind) for name, (shape, kind) in way.still.items()}
        if not way.table or not x.is_floating_point():
            argument = "input_ids" if way.argument == "inputs_embeds" and not x.is_floating_point() else way.argument
            out = net(**{argument: x}, **given) if argument else net(x, **given)
        else:
            table = net.get_submodule(way.table)
            handle = table.register_forward_hook(lambda *_: x)
            word = int(getattr(table, "padding_idx", None) != 1)  # 0 is often padding, which networks mask
            try:
                out = net(torch.full(x.shape[:-1], word, device=x.device), **given)
            finally:
                handle.remove()
        found = way.take(out)
        return out if found is None else found


def plain(net: nn.Module) -> nn.Module:
    """The network itself, without `Adapted`, `DistributedDataParallel` and `torch.compile` around it."""
    while True:
        inner = vars(net)["_adapted"] if isinstance(net, Adapted) else getattr(net, "_orig_mod", None)
        if isinstance(net, nn.DataParallel) or type(net).__name__ == PARALLEL:
            inner = net.module
        if not isinstance(inner, nn.Module):
            return net
        net = inner


def embedding(net: nn.Module) -> nn.Embedding | None:
    """The table by which a network that is `Adapted` to embedded tokens looks them up."""
    if not isinstance(net, Adapted):
        return None
    inner, way = plain(net), vars(net)["_way"]
    if way.argument == "inputs_embeds":
        inner = inner.get_input_embeddings()  # type: ignore[operator]
    elif not way.table:
        return None
    else:
        inner = inner.get_submodule(way.table)
    return inner if isinstance(inner, nn.Embedding) else None


def shown_output(net: nn.Module) -> int:
    """The output whose bias the card shows: the first, unless it scores padding by its row of a tied table, zero."""
    table, head = embedding(net), getattr(plain(net), "get_output_embeddings", lambda: None)()
    return int(table is not None and table.padding_idx == 0 and getattr(head, "weight", None) is table.weight)


def meant(out: Any) -> Tensor | None:
    """The tensor of an output, see `main_tensor`."""
    return main_tensor(out)[0]


def one_row(out: Any) -> Tensor | None:
    """What a transformers model says of an example as a whole.

    Logits, of the last token where every token has some; else the pooled output, or the mean of the last hidden state.
    """
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits[:, -1] if logits.ndim == 3 else logits
    pooled, hidden = (getattr(out, name, None) for name in ("pooler_output", "last_hidden_state"))
    if isinstance(pooled, Tensor):
        return pooled.flatten(1)
    if isinstance(hidden, Tensor):
        return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)
    return meant(out)


def caches(net: nn.Module) -> bool:
    """Does the network keep keys and values for the next token, unless it is told not to?"""
    return "use_cache" in arguments_of(net)


def argument_of(net: nn.Module) -> str:
    """The keyword of a transformers model's input: embedded tokens where it takes them; "" for other networks."""
    if not from_transformers(net):
        return ""
    name = str(net.main_input_name)
    return "inputs_embeds" if name == "input_ids" and "inputs_embeds" in arguments_of(net) else name


def first_table(net: nn.Module) -> str:
    """The name of the first embedding with more than one row, "" if there is none."""
    tables = (name for name, m in net.named_modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 1)
    return next(tables, "")
