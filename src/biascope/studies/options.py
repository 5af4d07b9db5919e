"""A function's keyword arguments seen as options: type hints, defaults and `Annotated` help become what a user types.

    def fig4a(run: Run, *, sigma: Annotated[float, "noise"] = 3.0) -> StudyResult: ...

gives an option `sigma`, a number, 3.0 unless it says otherwise. Types: int, float, str, bool, Literal, `X | None`,
tuple[X, ...]. Options that several studies share are written once, as the fields of a dataclass:

    def fig6(run: Run, *, protocol: Protocol = Protocol(sigma=3.0)) -> StudyResult: ...

gives an option for every field of `Protocol`, with the defaults of that instance.
"""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from biascope.support.errors import InputError, near

WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Option:
    """One option: its name, type, default and help."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def type_name(self) -> str:
        """How the type reads to a user: `int`, `a|b`, `float,...`."""
        return _name(self.type)


def options_of(function: Callable[..., Any]) -> tuple[Option, ...]:
    """The keyword-only arguments of a function, as options; each needs a type hint and a default."""
    hints = get_type_hints(function, include_extras=True)
    options = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.default is inspect.Parameter.empty or parameter.name not in hints:
            raise InputError(f"option {parameter.name!r} of {function.__name__} needs a type hint and a default value")
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            fields = get_type_hints(hint, include_extras=True)
            options += [_option(name, fields[name], getattr(parameter.default, name)) for name in _fields(hint)]
        else:
            options.append(_option(parameter.name, hint, parameter.default))
    names = [option.name for option in options]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{function.__name__} has two options called {' and '.join(sorted(twice))}")
    return tuple(options)


def arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the function from a flat table of options: the way back from `options_of`."""
    found: dict[str, Any] = {}
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and dataclasses.is_dataclass(hint):
            found[parameter.name] = hint(**{field: values[field] for field in _fields(hint)})  # type: ignore[operator]
    grouped = {field for group in found.values() for field in _fields(type(group))}
    return found | {name: value for name, value in values.items() if name not in grouped}


def _fields(group: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(group)]


def _option(name: str, hint: Any, default: Any) -> Option:
    text = ""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        text = next((note for note in notes if isinstance(note, str)), "")
    return Option(name, hint, default, text)


def convert(option: Option, value: Any) -> Any:
    """A value of the option's type from text (or from an already typed value); a wrong one is named.

    Numbers must be finite: a study with NaN or infinity for an option would end in NaN and numbers that mean nothing.
    """
    try:
        found = _convert(option.type, value)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise InputError(f"option {option.name}={value!r} should be {option.type_name}") from error
    parts = found if isinstance(found, tuple) else (found,)
    if not all(math.isfinite(part) for part in parts if isinstance(part, float)):
        raise InputError(f"option {option.name}={value!r} should be a finite {option.type_name}")
    return found


def merge(options: Iterable[Option], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults overridden by each layer in turn; an unknown key is refused with its nearest match."""
    known = {option.name: option for option in options}
    values = {option.name: option.default for option in known.values()}
    for layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_") if key not in known else key
            if name not in known:
                raise InputError(f"unknown option {key!r}{near(key, known)}")
            values[name] = convert(known[name], value)
    return values


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        for choice in arguments:
            if value == choice or str(value) == str(choice):
                return choice
        raise ValueError
    if origin in (Union, types.UnionType):
        if value is None or value == "none":
            return None
        return _convert(next(argument for argument in arguments if argument is not type(None)), value)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else list(value)
        return tuple(_convert(arguments[0], item) for item in items if item != "")
    if kind is bool:
        return WORDS[str(value).lower()]
    if kind is int:
        number = Decimal(str(value))  # exact, and reads 1e3
        if number != int(number):
            raise ValueError
        return int(number)
    if kind is float:
        return float(value)
    return str(value)


def _name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(argument) for argument in arguments)
    if origin is tuple:
        return f"{_name(arguments[0])},..."
    return "none" if kind is type(None) else str(getattr(kind, "__name__", kind))
