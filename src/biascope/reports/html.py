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
from typing import Any


class Html(str):
    """Text that is markup already and must not be escaped again."""


def escape(value: object) -> Html:
    """Anything as safe markup; `Html` passes through.

    Example:
        >>> escape("<b>"), escape(Html("<b>"))
        ('&lt;b&gt;', '<b>')
    """
    return value if isinstance(value, Html) else Html(_html.escape(str(value), quote=True))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element with escaped children and attributes; `class_` means `class`, `data_x` means `data-x`, None is left
    out.

    Example:
        >>> tag("p", "a & b", class_="note")
        '<p class="note">a &amp; b</p>'
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


def data_uri(data: bytes, kind: str) -> str:
    """Bytes as a `data:` link.

    Example:
        >>> data_uri(b"hi", "text/plain")
        'data:text/plain;base64,aGk='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(png: bytes, alt: str, class_: str | None = None) -> Html:
    """A PNG inside the page."""
    return tag("img", src=data_uri(png, "image/png"), alt=alt, class_=class_)


def figure(svg: str, alt: str, caption: str = "") -> Html:
    """A drawing with words for those who cannot see it."""
    box = tag("div", Html(svg), class_="drawing", role="img", aria_label=alt)
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
    """A table with a CSV link; only the first `limit` rows are shown, the file has them all. `fold` hides it at first.

    Example:
        >>> "Download t.csv" in table(["a"], [[1]], "t")
        True
    """
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


def page(title: str, body: Iterable[object], subtitle: object = "", footer: object = "") -> str:
    """A whole HTML document.

    Example:
        >>> page("A & B", [tag("p", "x")]).count("A &amp; B")
        2
    """
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        f"<header><h1>{escape(title)}</h1>{tag('p', subtitle, class_='subtitle') if subtitle else ''}</header>\n"
        f"{join(body)}\n<footer>{escape(footer)}</footer></main>\n<script>{SCRIPT}</script></body></html>\n"
    )


CSS = """
:root{--paper:#fff;--ink:#1b1e23;--soft:#5b6470;--line:#d9dee5;--panel:#f6f8fa;--accent:#0b62a8;
--good:#00694c;--bad:#a33d00;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#7f7f7f}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8eaed;--soft:#a3adb9;--line:#343b44;--panel:#1c2026;
--accent:#7cbcf0;--good:#4fd1a5;--bad:#f4a261;--c0:#5db4f0;--c1:#ff8a4c;--c2:#3ecfa3;--c3:#e8a3c9;--c4:#f5bd4a;--c5:#9bd5f7;
--c6:#b5b5b5}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,Roboto,"DejaVu Sans",sans-serif}
main{max-width:1400px;margin:0 auto;padding:1.2rem clamp(.9rem,3vw,2.5rem) 3rem}
h1{font-size:clamp(1.5rem,4vw,2.2rem);line-height:1.2;margin:.3rem 0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:0 0 .4rem}
.subtitle,.note,figcaption,footer{color:var(--soft);font-size:.92rem}
section{background:var(--panel);border:1px solid var(--line);border-radius:10px;
padding:1.1rem clamp(.8rem,2vw,1.6rem);margin:1.2rem 0}
.columns>section{margin:0}.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1.2rem;align-items:start}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:.8rem;margin:.8rem 0;padding:0}
.facts div{border-left:3px solid var(--accent);padding-left:.7rem}
.facts dt{color:var(--soft);font-size:.85rem}
.facts dd{margin:0;font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}
.read{color:var(--soft);max-width:75ch;margin:.2rem 0 .6rem}
.meaning{border-left:3px solid var(--good);padding:.15rem 0 .15rem .8rem;max-width:75ch;margin:.6rem 0 1rem}
.skipped{border-left-color:var(--line);color:var(--soft)}
figure{margin:0;min-width:0}.drawing svg{width:100%;height:auto;max-width:560px;display:block}
.drawing{color:var(--ink)}.drawing img{max-width:100%;height:auto;display:block}
.pixels{width:100%;max-width:260px;aspect-ratio:1;image-rendering:pixelated;
border:1px solid var(--line);background:#fff;display:block}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.8rem;max-width:560px}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600}.number{text-align:right}
a{color:var(--accent)}summary{cursor:pointer;color:var(--accent)}
input[type=range]{width:100%;max-width:560px;accent-color:var(--accent);min-height:28px}
code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.9em;overflow-wrap:anywhere}
.verdict{font-weight:700}.confirmed{color:var(--good)}.not-confirmed{color:var(--bad)}.not-tested{color:var(--soft)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
@media print{section{break-inside:avoid;border:0;padding:0}details{display:none}}
"""

# A slider names a set of frames; the frame whose number it shows is visible, the others are hidden.
SCRIPT = """
document.querySelectorAll('input[data-frames]').forEach(function(s){
  var frames=document.querySelectorAll('[data-set="'+s.dataset.frames+'"]'),
    out=document.getElementById(s.dataset.frames+'-out');
  function show(){frames.forEach(function(f){f.hidden=f.dataset.frame!==s.value});
    if(out){out.textContent=s.value}}
  s.addEventListener('input',show);show();
});
"""
