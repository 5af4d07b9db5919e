"""Errors a user can act on: each says what is wrong, where, and what to type instead."""

import difflib
from collections.abc import Iterable

MANY = 30  # names, of which no more are listed


class BiascopeError(Exception):
    """Base of every error raised on purpose by biascope."""


class InputError(BiascopeError, ValueError):
    """Something handed in has the wrong shape, type, name or value."""


class UnsupportedError(BiascopeError, NotImplementedError):
    """What was asked is not defined here; the message names what can do it."""


class CorruptError(BiascopeError, OSError):
    """A file or folder on disk is not what it should be (truncated, foreign, wrong checksum)."""


for _kind in (BiascopeError, InputError, UnsupportedError, CorruptError):
    _kind.__module__ = "biascope"  # tracebacks show the public name


def no_network(returned: object) -> str:
    """What a function returned that should build networks: the end of an error, with what to return instead."""
    if isinstance(returned, type):
        return f"the class {returned.__name__}; it must return a network, e.g. {returned.__name__}(...)"
    return f"a {type(returned).__name__}; it must return an nn.Module"


def near(name: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown name": the nearest matches, or everything there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    close = close or [candidate for candidate in known if name.lower() in candidate.lower()][:5]
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(known) - MANY} more" if len(known) > MANY else ""
    return f"; there is {', '.join(known[:MANY])}{more}" if known else ""
