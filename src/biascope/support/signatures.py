"""The type hints of a function, compared with what it is called with: one line instead of one per argument.

A float where a count belongs, an array for a tensor, a class for a module or a name that is not among those there are
gets an error that names the argument and the fix. What the hints do not say (shapes, ranges, NaN) the function checks.
"""

import os
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import Parameter, isclass, signature, unwrap
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from biascope.support.arguments import as_number, as_whole, check_choice, check_tensor, shown, tensor_fix
from biascope.support.errors import InputError, near
from biascope.support.inputs import check_shape
from biascope.support.readers import to_tensor

P = ParamSpec("P")
R = TypeVar("R")
RENAMED = {"centred": "centered", "center": "centered"}  # arguments of version 0.1.0.dev0, which work and warn
Check = Callable[[Any, str], Any]  # value, name of the argument -> the value to work with


@dataclass(frozen=True)
class Rule:
    """What one type hint asks: `quick` types pass at once, others go through `check`; `words` name it in a choice."""

    check: Check
    words: str
    quick: frozenset[type] = frozenset()
    names: frozenset[str] = frozenset()  # of a choice: these pass at once too
    order: tuple[str, ...] = ()  # the same, as they are written


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Compare the arguments of every call with the type hints; numpy's whole numbers and floats become Python's.

    Hints are read at the first call; those that exist for type checkers only, and `Any`, ask for nothing.
    """
    check = _Arguments(fn)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        held, named = check(args, kwargs)
        return fn(*held, **named)

    # doctest knows by its globals whose function this is
    here = types.FunctionType(call.__code__, unwrap(fn).__globals__, fn.__name__, None, call.__closure__)
    return wraps(fn)(here)


class _Arguments:
    """The rules of one function, by the names of its parameters."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = unwrap(fn)
        parameters = signature(fn).parameters.values()
        self.positions = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
        self.rest = next((p.name for p in parameters if p.kind is Parameter.VAR_POSITIONAL), "")
        self.others = {p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD}
        self.names = [p.name for p in parameters if p.name != "self"]

    @cached_property
    def rules(self) -> dict[str, Rule]:
        found = {}
        for name, hint in self.fn.__annotations__.items():
            one = types.SimpleNamespace(__annotations__={name: hint})
            try:
                rule = rule_of(get_type_hints(one, self.fn.__globals__, include_extras=True)[name])
            except NameError:  # imported for type checkers only
                continue
            if name == "input_shape":  # its own errors say more
                rule = Rule(lambda value, name: value if value is None else check_shape(value, name), "a shape")
            if rule is not None and name != "return" and name not in self.others:
                found[name] = rule
        return found

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        check, known = self._check, len(self.positions)
        for old in RENAMED.keys() & kwargs.keys() - set(self.names):
            if (new := RENAMED[old]) in self.names:
                warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
                kwargs = {new if name == old else name: value for name, value in kwargs.items()}
        if not self.others and (odd := next((name for name in kwargs if name not in self.names), "")):
            raise InputError(
                f"{self.fn.__qualname__.removesuffix('.__init__')}() takes no {odd!r}{near(odd, self.names)}"
            )
        held = [check(name, value) for name, value in zip(self.positions, args, strict=False)]
        held += [check(self.rest, value) for value in args[known:]]
        return held, {name: check(name, value) for name, value in kwargs.items()}

    def _check(self, name: str, value: Any) -> Any:
        rule = self.rules.get(name)
        if rule is None or type(value) in rule.quick or (type(value) is str and value in rule.names):
            return value
        return rule.check(value, name)


def rule_of(hint: Any) -> Rule | None:
    """What a type hint asks of a value; None for nothing."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:  # a rule of its own, see limits.py
        return next((extra for extra in args[1:] if isinstance(extra, Rule)), rule_of(args[0]))
    if hint in PLAIN:
        return PLAIN[hint]
    if origin in {Union, types.UnionType}:
        return _any_of([rule_of(member) for member in args])
    if origin is Literal:
        return _choice(args)
    if origin in {tuple, list, Sequence}:
        return _sequence(origin, args)
    if hint is Callable or origin is Callable:
        return Rule(_function, "a function")
    kind = origin or hint
    if not isclass(kind) or kind in {Any, object} or getattr(kind, "_is_protocol", False):
        return None
    return _module(kind) if issubclass(kind, nn.Module) else _instance(kind)


def only_tensors(value: Any, name: str) -> Tensor:
    """No arrays or lists: of a choice of hints they may mean another, and what is trained must be the caller's own."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(value).__name__}")
    return _real(value, name)


def _real(value: Any, name: str) -> Tensor:
    found = value if isinstance(value, Tensor) else check_tensor(to_tensor(value, name), name)
    if found.is_complex():
        raise InputError(f"{name} is complex: pass {name}.real, or both parts as features (torch.view_as_real)")
    return found


def _truth(value: Any, name: str) -> bool:
    if isinstance(value, bool | int | np.bool_) and value in (0, 1):
        return bool(value)
    raise InputError(f"{name}={shown(value)}: True or False is needed")


def _path(value: Any, name: str) -> Path:
    if isinstance(value, os.PathLike):
        return Path(value)
    raise InputError(f"{name}={shown(value)}: a path is needed, e.g. 'runs/first'")


def _nothing(value: Any, name: str) -> None:
    if value is not None:
        raise InputError(f"{name}={shown(value)}: None is needed")


def _dtype(value: Any, name: str) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    raise InputError(f"{name}={shown(value)}: a torch dtype is needed, e.g. torch.float64")


PLAIN: dict[Any, Rule] = {
    int: Rule(as_whole, "an integer", frozenset({int})),
    float: Rule(as_number, "a number", frozenset({float, int})),
    bool: Rule(_truth, "True or False", frozenset({bool})),
    Tensor: Rule(_real, "a tensor"),
    Path: Rule(_path, "a path"),
    torch.dtype: Rule(_dtype, "a torch dtype", frozenset({torch.dtype})),
    type(None): Rule(_nothing, "None", frozenset({type(None)})),
}


def _any_of(rules: Sequence[Rule | None]) -> Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    real = [rule for rule in known if rule.check is not _nothing]
    real.sort(key=lambda rule: rule is not PLAIN[Tensor])  # a tensor that is learnt must not become a number
    quick = frozenset[type]().union(*(rule.quick for rule in known))
    words = " or ".join(rule.words for rule in known)
    names = list(dict.fromkeys(word for rule in known for word in rule.order))

    def check(value: Any, name: str) -> Any:
        if value is None and len(real) < len(known):
            return value
        if len(real) == 1:
            return real[0].check(value, name)
        if isinstance(value, str) and names and str not in quick:  # this error knows the nearest name
            return check_choice(value, name, names)
        for rule in real:
            with suppress(InputError):
                return (only_tensors if rule is PLAIN[Tensor] else rule.check)(value, name)
        if PLAIN[Tensor] in real and isinstance(found := to_tensor(value, name), Tensor):
            return PLAIN[Tensor].check(found, name)
        got = f" is the class {value.__name__}" if isclass(value) else f"={shown(value)}"
        fix = tensor_fix(value, name) if PLAIN[Tensor] in real else ""
        raise InputError(f"{name}{got}: {words} is needed{fix}")

    return Rule(check, words, quick, frozenset(names), tuple(names))


def _choice(choices: Collection[Any]) -> Rule:
    words = " or ".join(map(repr, choices))
    names = tuple(choice for choice in choices if isinstance(choice, str))

    def check(value: Any, name: str) -> Any:
        if len(names) == len(choices):
            return check_choice(value, name, choices)
        found = [choice for choice in choices if type(choice) is type(value) and choice == value]
        if not found:
            raise InputError(f"{name}={shown(value)}: {words} is needed")
        return value

    return Rule(check, words, names=frozenset(names), order=names)


def _sequence(kind: Any, hints: tuple[Any, ...]) -> Rule:
    """`tuple[float, float]` has a length; the others have not."""
    each = rule_of(hints[0]) if hints else None
    size = len(hints) if kind is tuple and Ellipsis not in hints and len(set(hints)) == 1 else None
    mixed = kind is tuple and Ellipsis not in hints and len(set(hints)) > 1
    kind_of_each = each.words.partition(" from ")[0].partition(" above ")[0] if each else ""
    many = {"an integer": "integers", "a number": "numbers", "a tensor": "tensors"}.get(kind_of_each, "")
    words = f"{size or 'a sequence of'} {many}" if many else "a sequence"

    def check(value: Any, name: str) -> Any:
        if isinstance(value, Tensor | np.ndarray) and many in {"integers", "numbers"}:
            value = value.tolist()
        single = isinstance(value, str | bytes | Mapping) or not (
            hasattr(value, "__len__") and hasattr(value, "__getitem__")
        )
        if single or (size is not None and len(value) != size):
            fix = f", e.g. [{value!r}]" if isinstance(value, str | int | float) and size is None else ""
            raise InputError(f"{name}={shown(value)}: {words} {'are' if size else 'is'} needed{fix}")
        if each is None or mixed or not isinstance(value, list | tuple):  # others may be lazy
            return value
        held = [v if type(v) in each.quick else each.check(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return value if all(new is old for new, old in zip(held, value, strict=True)) else tuple(held)

    return Rule(check, words)


def _function(value: Any, name: str) -> Any:
    if not callable(value):
        raise InputError(f"{name}={shown(value)}: a function is needed")
    return value


def _module(kind: type[nn.Module]) -> Rule:
    def check(value: Any, name: str) -> Any:
        if isinstance(value, kind):
            return value
        if isclass(value):
            raise InputError(f"{name} is the class {value.__name__}: pass a network, e.g. {value.__name__}(...)")
        what = "an nn.Module" if kind is nn.Module else f"a {kind.__name__}"
        fix = "; pass the network, not its parameters" if isinstance(value, list | Iterator) else ""
        raise InputError(f"{name}: expected {what}, got {type(value).__name__}{fix}")

    return Rule(check, "an nn.Module" if kind is nn.Module else f"a {kind.__name__}")


def _instance(kind: type) -> Rule:
    known: dict[Any, str] = {str: "a string", Iterable: "an iterable", Mapping: "a dict"}
    words = known.get(kind, f"a {kind.__name__}")

    def check(value: Any, name: str) -> Any:
        if isinstance(value, kind):
            return value
        got = f"the class {value.__name__}" if isclass(value) else type(value).__name__
        raise InputError(f"{name}: expected {words}, got {got}")

    return Rule(check, words, frozenset({kind}))
