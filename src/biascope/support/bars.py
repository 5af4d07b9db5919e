"""Progress bars that behave: shown on a terminal, silent in pipes and logs.

`BIASCOPE_PROGRESS=1` forces them on, `BIASCOPE_PROGRESS=0` off.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def _disable() -> bool | None:
    """What tqdm calls `disable`: None means "only when standard error is not a terminal"."""
    choice = os.environ.get("BIASCOPE_PROGRESS", "")
    return None if choice == "" else choice in {"0", "false", "no"}


def progress(items: Iterable[T], description: str, total: int | None = None, leave: bool = True) -> Iterator[T]:
    """Iterate over `items` and show how far it is on standard error.

    Example:
        >>> sum(progress(range(4), "adding"))
        6
    """
    yield from tqdm(items, desc=description, total=total, leave=leave, disable=_disable(), dynamic_ncols=True)


def counted(items: Iterable[T], description: str, total: int, size: Callable[[T], int]) -> Iterator[T]:
    """The same for pieces of different sizes: the bar counts what is in them, of `total` in all."""
    with tqdm(desc=description, total=total, leave=False, disable=_disable(), dynamic_ncols=True) as bar:
        for item in items:
            yield item
            bar.update(size(item))
