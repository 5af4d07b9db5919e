"""What torch differentiates wrongly, or not at all, in another way."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from biascope.network.elementary import (
    glu,
    gru_cell,
    instance_norm,
    layer_norm,
    lstm_cell,
    prelu,
    rnn_relu_cell,
    rnn_tanh_cell,
    weight_norm,
)
from biascope.network.swapped import functional_call
from biascope.support.errors import UnsupportedError

NORMS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding of indices [...] with weight [m, d]: [..., d], whose padding row has no derivative.

    torch's backward pass skips the padding row, but its forward mode does not, and under vmap over tables it skips that
    of the first table alone: the row is cut off here. Gradients are never sparse, which nothing but some optimisers
    can read.
    """
    out = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(weight)
    if padding_idx is None or not (in_forward_mode() or wrapped):
        return out
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), out.detach(), out)


def lookup(weight: Tensor, indices: Tensor, padding_idx: int = -1, *how: Any, **more: Any) -> Tensor:
    """torch.embedding, in the way of `embedding`; here -1 stands for no padding row."""
    frequencies = how[0] if how else more.get("scale_grad_by_freq", False)
    padding = None if padding_idx == -1 else padding_idx
    return embedding(indices, weight, padding, scale_grad_by_freq=frequencies)


def embedding_bag(input: Tensor, weight: Tensor, **how: Any) -> Tensor:
    """F.embedding_bag, whose gradients are never sparse."""
    return F.embedding_bag(input, weight, **{**how, "sparse": False})


def requires_grad(t: Tensor) -> bool:
    """Tensor.requires_grad; what stands for several tensors under vmap asks those, where torch always says no.

    Layers ask it before they hang a hook on a tensor or choose a way: they would go another way under vmap than alone.
    """
    functorch = torch._C._functorch
    while not t.requires_grad and functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.requires_grad


def in_forward_mode() -> bool:
    """Are tangents carried along, by torch.func.jvp or by dual tensors?"""
    return forward_ad._current_level >= 0


ARGUMENTS = {  # of the calls that read a table
    F.embedding: "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    F.embedding_bag: "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse",
    torch.embedding: "weight indices padding_idx scale_grad_by_freq sparse",
    torch.embedding_bag: "weight indices offsets scale_grad_by_freq mode sparse",
    torch.embedding_renorm_: "weight indices max_norm norm_type",
}


def refuse_impure_tables(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a call of torch reads a table in a way that changes it, or whose gradient is none."""
    given = dict(zip(ARGUMENTS[func].split(), args)) | dict(kwargs)
    weight, who = given["weight"], func.__name__
    if given.get("max_norm") is not None:
        raise UnsupportedError(
            f"{who} is called with max_norm={given['max_norm']} on a table of shape {list(weight.shape)}, which writes "
            "new weights into the model at every call: bring the rows to that norm once, then leave max_norm out"
        )
    if given.get("scale_grad_by_freq") and _is_followed(weight):
        raise UnsupportedError(
            f"{who} is called with scale_grad_by_freq=True on a table of shape {list(weight.shape)}: the gradient of "
            "an example depends on the others in its batch and is no derivative. Leave that out, or the table "
            "out of params"
        )


def _is_followed(t: Tensor) -> bool:
    """Is a tensor differentiated, in whichever way torch does it?"""
    if not torch.is_grad_enabled() and not in_forward_mode():
        return False
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(t)
    return t.requires_grad or wrapped or (in_forward_mode() and forward_ad.unpack_dual(t).tangent is not None)  # type: ignore[no-untyped-call]


IS_FOLLOWED = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
EMBEDDINGS: dict[Any, Any] = {F.embedding: embedding, torch.embedding: lookup, F.embedding_bag: embedding_bag}
WRITTEN_OUT: dict[Any, Any] = {  # torch's function: the same by elementary operations
    **dict.fromkeys((F.prelu, torch.prelu, torch.Tensor.prelu), prelu),
    torch._weight_norm: weight_norm,
    torch.rnn_tanh_cell: rnn_tanh_cell,
    torch.rnn_relu_cell: rnn_relu_cell,
    torch.gru_cell: gru_cell,
    torch.lstm_cell: lstm_cell,
    **EMBEDDINGS,
}


class RightGradients(TorchFunctionMode):
    """While active, what torch (2.13) differentiates wrongly, or not at all, is written in another way.

    On a CPU the backward pass of batch and instance normalisation misreads gradients in some memory orders: those of
    one example whose channels come last, as a transformer after the normalisation sends them; instance normalisation,
    which sees all examples as one, those of any number. Under vmap PReLU takes examples for cotangents, and the cells
    of recurrent networks fail. Weight normalisation has no forward-mode derivative. Embeddings push a tangent of the
    padding row forward that their backward pass never pulls back, except under vmap. If `pure`, tables that change when
    they are read, or whose gradients are none, are refused; where a network is only trained they are its own affair,
    as are hooks by which its layers change gradients: under vmap they are seen, and fail, where torch skips them.
    """

    def __init__(self, pure: bool = False) -> None:
        super().__init__()
        self.pure = pure

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.pure and func in ARGUMENTS:
            refuse_impure_tables(func, args, kwargs or {})
        if not self.pure and func == IS_FOLLOWED:  # a new object every time
            return requires_grad(*args)
        out = WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))
        return in_plain_order(out) if func in NORMS else out


class RightTangents(TorchFunctionMode):
    """While active, tangents are those that the backward pass is the adjoint of; for forward mode without gradients.

    Not the rest of `RightGradients`: that mends backward passes, and there is none. Impure tables are refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ARGUMENTS:
            refuse_impure_tables(func, args, kwargs or {})
        return EMBEDDINGS.get(func, func)(*args, **(kwargs or {}))


THIRD: dict[Any, Any] = {  # torch's function whose third derivatives are wrong, or none: by elementary operations
    F.glu: glu,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), layer_norm),
    **dict.fromkeys((F.instance_norm, torch.instance_norm), instance_norm),
}
NO_THIRD = {  # those that cannot be written out in a line
    *(torch.linalg.solve, torch.linalg.det, torch.linalg.slogdet),
    *(torch.det, torch.slogdet, torch.logdet, Tensor.det, Tensor.slogdet, Tensor.logdet),
}


class ThirdDerivatives(TorchFunctionMode):
    """While active, what torch (2.13) has right first and second derivatives of, but wrong third ones, is written out.

    Layer and instance normalisation keep means and variances for the backward pass, as solves and determinants keep
    their factors; when that is differentiated twice more, the kept numbers are taken for constants, in whichever order
    of modes. Solves and determinants are refused. Gated linear units have no third derivatives in forward mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NO_THIRD:
            raise UnsupportedError(
                f"torch takes third derivatives of {func.__name__} wrongly: write it out, a solve as "
                "torch.linalg.inv(A) @ B"
            )
        return THIRD.get(func, func)(*args, **(kwargs or {}))


class PlainList(nn.ParameterList):
    """A ParameterList whose slices are plain lists; see `plain_containers`."""

    def __getitem__(self, idx: Any) -> Any:
        """One entry, or a list of them."""
        inside = range(*idx.indices(len(self))) if isinstance(idx, slice) else None
        return super().__getitem__(idx) if inside is None else [self[i] for i in inside]


class PlainDict(nn.ParameterDict):
    """A ParameterDict whose copies and unions are plain dicts; see `plain_containers`."""

    def copy(self) -> Any:
        """A dict of the same entries."""
        return dict(self.items())


@cache
def plain(kind: type) -> type | None:
    """The class that a container of parameters is for a while; None if it is none, or slices and copies by itself."""
    for usual, made, own in ((nn.ParameterList, PlainList, "__getitem__"), (nn.ParameterDict, PlainDict, "copy")):
        if issubclass(kind, usual) and getattr(kind, own) is getattr(usual, own):
            return made if kind is usual else type(kind.__name__, (made, kind), {})
    return None


@contextmanager
def plain_containers(module: nn.Module) -> Iterator[None]:
    """Let tensors that stand in for parameters keep their derivatives in slices of an nn.ParameterList.

    torch makes such a slice (`self.weights[1:]` in a forward), and a copy of an nn.ParameterDict, out of new parameters
    where what is in it are tensors: the output does not change, but its derivative by them is zero.
    """
    held = [(part, type(part), made) for part in module.modules() if (made := plain(type(part)))]  # type: ignore[arg-type]  # mypy takes no class for hashable
    try:
        for part, _, made in held:
            part.__class__ = made
        yield
    finally:
        for part, kind, _ in held:
            part.__class__ = kind


def right_gradients(tables: bool = False) -> AbstractContextManager[object]:
    """`RightGradients` where gradients are wanted, `RightTangents` where only tangents are, nothing where neither.

    With `tables`, something in any case: the network may read a table, and must not do so in a way that changes it.
    """
    if torch.is_grad_enabled():
        return RightGradients(pure=True)
    return RightTangents() if in_forward_mode() or tables else nullcontext()


_WRITES: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()  # by training mode


def call(module: nn.Module, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """torch.func.functional_call; what is differentiated through it is so rightly, and the inputs stay as they are.

    A module that writes into its inputs (`x.mul_(2)`, `nn.ReLU(inplace=True)` first of all) would change the caller's
    data, and what it gives the next time: it gets copies. Whether it does so is seen when it is first called; one that
    begins with it later is refused.
    """
    writes = writes_into_inputs(module)
    if writes is not False:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    inputs = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
    given = [t for t in inputs if not t.is_inference()]
    seen = [t._version for t in given]
    with right_gradients(tables=any(not t.is_floating_point() for t in inputs)), plain_containers(module):
        out = functional_call(module, tensors, args, kwargs)
    changed = seen != [t._version for t in given]
    if writes is None and not any(torch._C._functorch.is_batchedtensor(t) for t in given):  # those do not tell
        _WRITES.setdefault(module, {})[module.training] = changed
    if writes is False and changed:
        raise UnsupportedError(
            f"{type(module).__name__} changes its inputs in place, in this call and not in the first one: write the "
            "operation without the in-place form"
        )
    return out


def writes_into_inputs(module: nn.Module) -> bool | None:
    """Whether the module, in its present mode, changes its inputs, as `call` has seen; None if it was not called."""
    return _WRITES.get(module, {}).get(module.training)


def in_plain_order(out: Tensor) -> Tensor:
    """The same values; their gradient is contiguous. No view, for the sake of activations in place."""
    if out.device.type != "cpu":
        return out
    flat = torch.ops.aten._unsafe_view(out.contiguous(), [out.numel()])
    plain: Tensor = torch.ops.aten._unsafe_view(flat, out.shape)
    return plain


@contextmanager
def second_derivatives(module: nn.Module) -> Iterator[None]:
    """What torch raises inside, where it cannot differentiate twice or in forward mode, as an error with the module."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, UnsupportedError):
            raise
        lines = str(error).strip().splitlines()
        recurrent = [name for name, part in module.named_modules() if isinstance(part, nn.RNNBase)]
        fix = f"; '{recurrent[0]}' is fused: write it out with nn.LSTMCell or nn.GRUCell" if any(recurrent) else ""
        raise UnsupportedError(
            f"torch cannot take the second derivatives of {type(module).__name__} that are needed "
            f"({lines[0] if lines else type(error).__name__}){fix}"
        ) from error


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Use attention kernels that support forward-mode and double differentiation, and restore the old choice after.

    The fused kernels have no forward-mode rule (NotImplementedError), and MultiheadAttention's fast path has none.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
