"""A module that remembers where it started: the base of the linearised and of the lazy network."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from biascope.network.door import refuse_batch_dependence, refuse_wrappers, uninitialised
from biascope.network.functional import Params
from biascope.support.arguments import check_tensor
from biascope.support.errors import InputError, UnsupportedError

State = nn.Module | Mapping[str, Tensor]  # a module, its state_dict, or {name: tensor}


class Anchored(nn.Module):
    """A copy of a network with the same parameter and buffer names, plus a frozen copy of its first state.

    It uses the copy's own tables of parameters, buffers and children, so `named_parameters`, `state_dict`, optimisers
    and DDP see exactly the original names. The frozen state is in none of them, but it moves along with `.to`,
    `.double`, `deepcopy` and pickle.

    Layers stay in the mode (train or eval) they had when the copy was made, whatever `.train()` is called with: a
    training loop may call it freely. BatchNorm in train mode and active dropout are refused by name.
    """

    _skeleton: nn.Module  # the copy, which computes
    _frozen: dict[str, Params]  # states that are neither trained nor saved

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_model(model)
        skeleton = copy_of(model)
        self.training = model.training
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = skeleton.__dict__[table]
        self.__dict__["_skeleton"] = skeleton  # not a child: its names would be prefixed
        self.__dict__["_frozen"] = {"origin": snapshot(skeleton)}

    @property
    def origin(self) -> Params:
        """Parameters and buffers at the start, {name: tensor}; not trained, not saved."""
        return self._frozen["origin"]

    @property
    def displacement(self) -> Params:
        """Parameters minus their values at the start, {name: tensor}: the task vector of a fine-tuned network."""
        return {k: p.detach() - self.origin[k] for k, p in self.named_parameters()}

    def synchronize(self, src: int = 0) -> None:
        """Give every process the frozen state of process `src`.

        DDP does this for the parameters. Call it once, on every process, if the processes initialised the network with
        different seeds.
        """
        with torch.no_grad():
            for state in self._frozen.values():
                for t in state.values():
                    torch.distributed.broadcast(t, src)

    def train(self, mode: bool = True) -> Anchored:
        """Set the flag `training`; layers keep the mode they had when the copy was made."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original module's state_dict."""
        return self._skeleton.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._skeleton._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Anchored:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved: dict[int, Tensor] = {}  # the states may share tensors
        for state in self._frozen.values():
            for k, t in state.items():
                if id(t) not in moved:
                    moved[id(t)] = fn(t)
                state[k] = moved[id(t)]
        return self

    def extra_repr(self) -> str:
        """Name the original class."""
        return f"of {type(self._skeleton).__name__}"


def check_model(model: nn.Module) -> None:
    """Raise if a module cannot be copied and expanded around its parameters."""
    if isinstance(model, Anchored):
        raise InputError(f"the model is {type(model).__name__} already; pass the original network")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"pass the network itself (model.module) and wrap the result in {type(model).__name__}")
    refuse_wrappers(model)
    refuse_batch_dependence(model)
    named = dict(model.named_parameters())
    if not named:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to expand around")
    if any(is_lazy(p) for p in named.values()):
        raise uninitialised(named)
    for name, p in named.items():
        if not p.is_floating_point():
            raise UnsupportedError(f"parameter '{name}' is {p.dtype}: real numbers are needed")


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters can be trained, or an error that names what cannot be copied.

    What layers keep of their last call (a recurrent state, say) is copied without its history, as torch does not.
    """
    who = type(model).__name__
    kept = [t for part in model.modules() for t in vars(part).values() if isinstance(t, Tensor) and not t.is_leaf]
    try:
        copied = copy.deepcopy(model, {id(t): t.detach().clone() for t in kept})
    except (RuntimeError, TypeError) as problem:
        raise UnsupportedError(f"{who} cannot be copied: {str(problem).splitlines()[0]}") from problem
    for name, p in copied.named_parameters():
        if not p.is_leaf:  # TorchScript
            raise UnsupportedError(f"{who} cannot be copied: the copy of '{name}' is not a leaf (is it TorchScript?)")
    return copied


def snapshot(module: nn.Module) -> Params:
    """Detached copies of all parameters and buffers, {name: tensor}."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: t.detach().clone() for k, t in state.items()}


Slot = tuple[dict[str, Any], str, str]  # a module's table, the key in it, and the name in `snapshot`


def slots(module: nn.Module) -> list[Slot]:
    """Every place where a parameter or buffer hangs; tied ones go by the first of their names."""
    found: list[Slot] = []
    first: dict[int, str] = {}
    for path, m in module.named_modules():
        for table in (m._parameters, m._buffers):
            for key, t in table.items():
                if t is not None:
                    found.append((table, key, first.setdefault(id(t), f"{path}.{key}" if path else key)))
    return found


@contextlib.contextmanager
def swapped_in(where: Sequence[Slot], state: Mapping[str, Tensor]) -> Iterator[None]:
    """The tensors of a state in their places for a while (`functional_call` with the search done before)."""
    kept = [table[key] for table, key, _ in where]
    try:
        for table, key, name in where:
            table[key] = state[name]
        yield
    finally:
        for (table, key, _), t in zip(where, kept):
            table[key] = t


def copies(tree: Any) -> Any:
    """The same arguments with copies of the tensors in them."""
    return pytree.tree_map_only(Tensor, torch.clone, tree)


@contextlib.contextmanager
def deterministic(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise if torch's random state moves while a network is called: it is another function in every call then.

    This finds dropout called as a function, RReLU in train mode and added noise. The state is put back.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = _random_states(device)
        yield
        moved = any(not torch.equal(a, b) for a, b in zip(before, _random_states(device)))
    if moved:
        fix = "call model.eval() first, or switch off what is random in it"
        raise UnsupportedError(f"{type(module).__name__} draws random numbers (dropout as a function, noise?): {fix}")


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def versions(tree: Any) -> list[int]:
    """How often each of the tensors in some arguments was changed in place, where torch counts that."""
    return [t._version for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and not t.is_inference()]


NORM_BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}


def state_of(source: State, like: Params, what: str, needed: Sequence[str] = ()) -> Params:
    """The tensors of a module or state dict that are named in `like`, checked, on the same devices and precision.

    Names that `like` lacks are refused where one that it has is missing (a name was misspelt, or is of another network)
    and named in a warning where all are there. A module's buffers, and in a state dict those of normalisation layers,
    whole numbers and other names of a tied parameter, are no such names.
    """
    if isinstance(source, nn.Module):
        source = getattr(source, "_orig_mod", source)
        parameters = dict(source.named_parameters())
        unknown = [k for k in parameters if k not in like]
        source = {**parameters, **dict(source.named_buffers())}
    else:
        unknown = _unknown(source, like)
    found = {}
    for k, t in like.items():
        if k in source:
            given = check_tensor(source[k], f"{what} '{k}'")
            if given.shape != t.shape:
                raise InputError(f"{what}: '{k}' has shape {list(given.shape)}, the model has {list(t.shape)}")
            found[k] = given.detach().to(t.device, t.dtype, copy=True)
    if unknown:
        missing = [k for k in like if k not in found]
        if missing:
            raise InputError(f"{what}: the model has no '{unknown[0]}'; what it has and is not given: '{missing[0]}'")
        warnings.warn(
            f"{what}: the model has no '{unknown[0]}'; {len(unknown)} such tensors are not used", stacklevel=3
        )
    lost = [k for k in needed if k not in found]
    if lost:
        raise InputError(f"{what}: no parameter is called '{lost[0]}'")
    return found


def _unknown(source: Mapping[str, Tensor], like: Params) -> list[str]:
    """Names of a state dict that `like` lacks and that are nothing a state dict has besides parameters."""
    own = {t.data_ptr() for k, t in source.items() if k in like and isinstance(t, Tensor) and t.numel()}

    def besides(k: str, t: object) -> bool:
        if not isinstance(t, Tensor) or not t.is_floating_point() or k.rsplit(".", 1)[-1] in NORM_BUFFERS:
            return True
        return t.numel() > 0 and t.data_ptr() in own  # tied: two names of one tensor

    return [k for k, t in source.items() if k not in like and not besides(k, t)]
