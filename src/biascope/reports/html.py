"""Self-contained HTML pages from plain strings: no server, no network, no template engine.

Everything that is not already `Html` is escaped, so a network called `<b>` or a label with an ampersand cannot break
a page. Light and dark follow the reader's system; the layout goes from 400 to 1600 pixels without a second version.
"""

import base64
import csv
import html as _html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from biascope.support.files import write_text


class Html(str):
    """Text that is markup already and must not be escaped again."""


def escape(value: object) -> Html:
    """Anything as safe markup; `Html` passes through."""
    return value if isinstance(value, Html) else Html(_html.escape(str(value), quote=True))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element with escaped children and attributes; `class_` means `class`, `data_x` means `data-x`, None is left
    out.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    inside = "".join(escape(child) for child in children)
    void = name in {"img", "input", "meta", "br"}
    return Html(f"<{name}{''.join(parts)}>" + ("" if void else f"{inside}</{name}>"))


def join(parts: Iterable[object]) -> Html:
    """Markup of every part, in a row."""
    return Html("".join(escape(part) for part in parts))


def with_flags(text: str) -> Html:
    """A sentence in which what is typed stays on one line: a break after the dashes of `--networks` would mislead.

    Example:
        >>> with_flags("Try --networks 32 & see")
        'Try <span class="flag">--networks 32</span> &amp; see'
    """
    return Html(re.sub(r"--[a-z]+(?: [\w.,/]*[\w])?", r'<span class="flag">\g<0></span>', escape(text)))


def data_uri(data: bytes, kind: str) -> str:
    """Bytes as a `data:` link."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(png: bytes, alt: str, class_: str | None = None) -> Html:
    """A PNG inside the page."""
    return tag("img", src=data_uri(png, "image/png"), alt=alt, class_=class_)


def figure(svg: str, alt: str, caption: str = "", hover: str | None = None) -> Html:
    """A drawing with words for those who cannot see it; `hover` (from `figures.hover`) shows values at the pointer."""
    box = tag("div", Html(svg), class_="drawing", role="img", aria_label=alt, data_hover=hover)
    return tag("figure", box, tag("figcaption", caption) if caption else "")


def csv_link(header: Sequence[str], rows: Iterable[Sequence[Any]], name: str) -> Html:
    """A link that downloads a table as CSV, from inside the page."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_text(cell) for cell in row] for row in rows)
    uri = data_uri(buffer.getvalue().encode(), "text/csv")
    return tag("a", f"Download {name}.csv", href=uri, download=f"{name}.csv", class_="download")


def _text(cell: Any) -> Any:
    """Markup as the text a reader sees; a file needs no tags."""
    return _html.unescape(re.sub(r"<[^>]*>", "", cell)) if isinstance(cell, Html) else cell


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], name: str, limit: int = 12, fold: bool = False) -> Html:
    """A table with a CSV link; the first `limit` rows are shown, the file has all. `fold` hides it at first."""
    numeric = [bool(rows) and _is_number(cell) for cell in (rows[0] if rows else header)]
    names = zip(header, numeric)
    head = tag("tr", join(tag("th", cell, scope="col", class_="number" if right else None) for cell, right in names))
    body = join(tag("tr", join(_cell(cell) for cell in row)) for row in rows[:limit])
    more = f"{len(rows) - limit} more rows are in the file. " if len(rows) > limit else ""
    grid = tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll", tabindex=0)
    whole = join([grid, tag("p", more, csv_link(header, rows, name), class_="note")])
    return tag("details", tag("summary", f"Numbers: {name}"), whole) if fold else whole


def _cell(value: Any) -> Html:
    text = f"{value:.5g}" if isinstance(value, float) else value
    return tag("td", text, class_="number" if _is_number(value) else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def page(
    title: str, body: Iterable[object], subtitle: object = "", footer: object = "", look: str = "", stamp: str = ""
) -> str:
    """A whole HTML document: one file, or with `look` one that takes page.css and page.js from that folder.

    `stamp` says what the page was made from, for `stamp_of`.
    """
    mark = f'<meta name="biascope" content="{escape(stamp)}">' if stamp else ""
    style, script = f"<style>{CSS}</style>", f"<script>{SCRIPT}</script>"
    if look:
        style, script = f'<link rel="stylesheet" href="{look}/page.css">', f'<script src="{look}/page.js"></script>'
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"{mark}<title>{escape(title)}</title>{style}</head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>{tag('p', subtitle, class_='subtitle') if subtitle else ''}</header>\n"
        f"{join(body)}\n<footer>{escape(footer)}</footer></main>\n{script}</body></html>\n"
    )


def stamp_of(path: Path) -> str:
    """The stamp of a page, "" if it has none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        found = re.search(r'<meta name="biascope" content="([^"]*)">', file.read(2000))
    return found.group(1) if found else ""


def write_look(folder: Path) -> None:
    """page.css and page.js, for pages that link to them."""
    for name, text in (("page.css", CSS), ("page.js", SCRIPT)):
        write_text(folder / name, text)


# The look and the behaviour of every page.
CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
