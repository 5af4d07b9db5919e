"""Results in words: one line, tables for print, and short HTML ones for notebooks, in which every text is escaped."""

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROUNDING = 1e-12  # relative errors below this are rounding, not spread
MAX_ROWS = 12  # a notebook cell is no place for a thousand rows


def number(value: float, error: float | None = None) -> str:
    """A number as people write it; with a standard error, both to the error's second digit."""
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    if error <= ROUNDING * abs(value) < math.inf:
        return f"{value:.4g} ± 0"
    if not 1e-6 < error < 1e5:  # too small or too large for plain decimals
        return f"{value:.4g} ± {error:.2g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def several(values: Iterable[float], most: int = 5) -> str:
    """The first numbers of a row, and that there are more."""
    shown = [number(float(value)) for value, _ in zip(values, range(most + 1))]
    return ", ".join(shown[:most] + ["..."] * (len(shown) > most))


def one_line(result: Any) -> str:
    """The repr of a dataclass with tensors: torch's own fills the screen. In its body: `__repr__ = one_line`.

    Example:
        >>> import torch
        >>> @dataclasses.dataclass(frozen=True)
        ... class Fit:
        ...     values: torch.Tensor
        ...     vectors: torch.Tensor
        ...     residual: float
        ...     __repr__ = one_line
        >>> Fit(torch.arange(9.0), torch.eye(9), 1 / 3)
        Fit(values=[0, 1, 2, ... 9 in all], vectors=tensor [9, 9], residual=0.3333)
    """
    shown = [f"{each.name}={_brief(getattr(result, each.name))}" for each in dataclasses.fields(result) if each.repr]
    return f"{type(result).__name__}({', '.join(shown)})"


def _brief(value: Any, most: int = 3) -> str:
    """A number to four digits, a row by its first entries, larger tensors by their shape, all else as it is."""
    if isinstance(value, float):
        return number(value)
    if type(value) is tuple:
        return f"({', '.join(map(_brief, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_brief(each)}" for key, each in value.items()) + "}"
    if not hasattr(value, "shape") or not hasattr(value, "tolist"):
        return repr(value)
    if len(value.shape) == 0:
        return _brief(value.tolist())
    if len(value.shape) > 1:
        return f"tensor {list(value.shape)}"
    shown = [_brief(each) for each in value[:most].tolist()] + [f"... {len(value)} in all"] * (len(value) > most)
    return f"[{', '.join(shown)}]"


def facts(title: str, rows: Mapping[str, object]) -> str:
    """A table of names and values under a title."""
    body = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{_text(title)}</caption><tbody>{body}</tbody></table>"


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with columns; of many rows the first, the last and some evenly in between."""
    kept = list(rows)
    n = len(kept)
    if n > MAX_ROWS:
        kept = [kept[round(i * (n - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
        title = f"{title} ({MAX_ROWS} of {n} rows)"
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in kept)
    return f"<table><caption>{_text(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for print: every column as wide as its longest cell, so that no name is cut."""
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table)


def _text(value: object) -> str:
    return html.escape(number(value) if isinstance(value, float) else str(value))
