"""What a study page takes from the documents: citation, symbols, and published numbers beside ours."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from biascope.reports import figures
from biascope.reports.html import Html, figure, join, table, tag
from biascope.studies.claims import Document, symbols
from biascope.studies.judging import Compared

MOST = 24  # numbers in one chart
WIDE = 50.0  # ratio of the largest to the smallest number from which the axis is logarithmic


def citation(document: Document, titled: bool = True) -> Html:
    """Authors, title, venue and year of a document, with a link to arXiv where it is there."""
    venue = document.venue or document.title
    title = f"{document.title}. " if titled and venue != document.title else ""
    year = "" if document.year is None or str(document.year) in venue else f", {document.year}"
    parts: list[object] = [f"{document.authors}. {title}{venue}{year}."]
    if document.arxiv:
        parts += [" ", tag("a", f"arXiv:{document.arxiv}", href=f"https://arxiv.org/abs/{document.arxiv}")]
    return join(parts)


def symbol_list(study: str, texts: Iterable[str]) -> Html:
    """Definitions of the symbols that occur in the texts of a page."""
    whole = "\n".join(texts)
    found = [
        tag("div", tag("dt", tag("code", term)), tag("dd", meaning))
        for term, meaning in symbols().get(study.partition("/")[0], {}).items()
        if re.search(rf"(?<![\w^]){re.escape(term)}(?![\w(])", whole)
    ]
    return tag("dl", join(found), class_="symbols") if found else Html("")


def published_section(compared: Iterable[Compared]) -> Html:
    """Published numbers and ours as a chart and a table, each number once; nothing where none is published."""
    each_once = list({each.published.number: each for each in compared}.values())
    if not each_once:
        return Html("")
    header = ("published number", "published", "measured", "standard error", "")
    rows = [
        (
            each.published.number,
            each.published.value,
            each.ours.value,
            "" if each.ours.standard_error is None else each.ours.standard_error,
            "agree" if each.agree else "differ",
        )
        for each in each_once
    ]
    both = [published_chart(each_once), tag("div", table(header, rows, "published and measured", limit=MOST))]
    return tag("section", tag("h2", "Published and measured"), tag("div", *both, class_="beside"))


def published_chart(compared: Sequence[Compared]) -> Html:
    """Published numbers and ours in one chart, a row each.

    The bar around a published number is how far ours may lie from it; ours have two standard errors.
    """
    shown = compared[:MOST]
    theirs = np.array([each.published.value for each in shown])
    ours = np.array([each.ours.value for each in shown])
    errors = np.array([2 * (each.ours.standard_error or 0.0) for each in shown])
    rooms = np.array([each.published.tolerance + 2 * (each.published.error or 0.0) for each in shown])
    rows = np.arange(len(shown))
    with figures.style():
        drawing, axes = figures.new_figure(5.6, 0.75 + 0.24 * len(shown))
        axes.errorbar(theirs, rows, xerr=rooms, fmt="D", color="C1", markerfacecolor="none", elinewidth=4, alpha=0.45)
        axes.plot(theirs, rows, "D", color="C1", markerfacecolor="none", label="published")
        axes.errorbar(ours, rows, xerr=errors, fmt="o", color="C0", elinewidth=1, label="ours")
        _scale(axes, theirs, ours)
        axes.set_yticks(rows, [_short(each.published.number) for each in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.legend(loc="best")
    hover = figures.hover(axes, [("published", theirs, rows), ("ours", ours, rows)], by="y")
    alt = "; ".join(f"{each.published.number}: published {each.published.value:g}, ours {each.ours}" for each in shown)
    more = f" {len(compared) - MOST} more are in the tables." if len(compared) > MOST else ""
    caption = f"Bars: how far ours may lie from the published number, and two standard errors of ours.{more}"
    return figure(figures.inline_svg(drawing, "published"), alt, caption, hover)


def _scale(axes: Any, theirs: Any, ours: Any) -> None:
    """A logarithmic axis for positive numbers of very different size."""
    sizes = np.abs(np.concatenate([theirs, ours]))
    sizes = sizes[sizes > 0]
    if not len(sizes) or sizes.max() / sizes.min() < WIDE or sizes.max() <= 1.5:
        return
    if min(theirs.min(), ours.min()) > 0:
        figures.log_scale(axes, "x")


def _short(name: str, most: int = 46) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
