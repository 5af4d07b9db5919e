"""Ctrl-C is an interrupt, also where it arrives as something else."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of errors that one has caused.

    Ctrl-C in the middle of torch's bookkeeping (entering vmap, say) makes its clean-up fail, and that error hides it.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is None:
            raise
        raise KeyboardInterrupt from error
