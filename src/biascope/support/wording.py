"""Advice in the words of the one who asked: options of the command, or keyword arguments of Python.

Messages are written for the command (`--input 3,32,32`); calls from Python get `input_shape=(3, 32, 32)`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from biascope.support.errors import BiascopeError

_COMMAND: ContextVar[bool] = ContextVar("command", default=False)
NAMES = {"input": "input_shape", "set": "options"}  # of arguments that are called otherwise in Python
PLAIN = re.compile(r"-?\d+(\.\d+)?|N|FILE|[A-Z]+_SHAPE")  # what needs no quotation marks
OPTION = re.compile(
    r"(?:\b(?:type|use) )?--(input|data|weights|set|networks|device|out|minutes|seed|text)\b"
    r"(?: ('[^']*'|(?!(?:and|or|is|out|with|to|by|for|as|in|are)\b)[\w./:~=,'\[\]<>*-]*[\w'\]>*](?:=\.\.\.)?))?"
)


@contextmanager
def on_the_command_line() -> Iterator[None]:
    """Inside, messages keep the options of the command."""
    token = _COMMAND.set(True)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def worded(text: str) -> str:
    """A message for the one who asked.

    Example:
        >>> worded("its first convolution takes 3 channels: type --input 3,16,16 (or give data)")
        'its first convolution takes 3 channels: pass input_shape=(3, 16, 16) (or give data)'
        >>> worded("there are no labels; add --data cifar10"), worded("e.g. --set outputs=10, or leave --input out")
        ("there are no labels; add data='cifar10'", "e.g. options={'outputs': 10}, or leave input_shape out")
    """
    return text if _COMMAND.get() else OPTION.sub(_in_python, text)


def _in_python(found: re.Match[str]) -> str:
    option, value = found.group(1), found.group(2)
    asked = "pass " if found.group(0).startswith("type ") else "use " if found.group(0).startswith("use ") else ""
    name = NAMES.get(option, option)
    if value is None:
        return f"{asked}{name}"
    if option == "set" and "=" in value:
        key, _, given = value.partition("=")
        shown = f"{{{key!r}: {given if PLAIN.fullmatch(given) or given in ('True', 'False', '...') else repr(given)}}}"
    elif option == "input":
        parts = value.split(",")
        shown = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    else:
        shown = value if PLAIN.fullmatch(value) or value.startswith("'") else repr(value)
    return f"{asked}{name}={shown}"


@contextmanager
def worded_errors() -> Iterator[None]:
    """Errors of biascope that pass are worded for the one who asked."""
    try:
        yield
    except BiascopeError as error:
        text = worded(str(error))
        if text == str(error):
            raise
        raise type(error)(text).with_traceback(error.__traceback__) from error.__cause__
