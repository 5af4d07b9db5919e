"""Errors a user can act on: each says what is wrong, where, and what to type instead."""


class BiascopeError(Exception):
    """Base of every error raised on purpose by biascope."""


class InputError(BiascopeError, ValueError):
    """Something handed in has the wrong shape, type, name or value."""


class UnsupportedError(BiascopeError, NotImplementedError):
    """What was asked is not defined here; the message names what can do it."""


class CorruptError(BiascopeError, OSError):
    """A file or folder on disk is not what it should be (truncated, foreign, wrong checksum)."""
