"""The ledger on the site: made from `reproductions/` when the site is built, so it can never be out of date.

Pages show figures of kept runs as ../../reproductions/..., which is right in the repository; the site has the runs in
its root, beside the pages' folders.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "reproductions"
# eight columns need the width that the menus at both sides would take
WIDE = """---
hide: [navigation, toc]
---
<style>.md-grid{max-width:100rem}.md-typeset table:not([class]) :is(th,td){padding:.5em .7em;min-width:4rem}
.md-typeset table:not([class]) td:nth-child(2){min-width:13rem}
.md-typeset table:not([class]) td:nth-child(6){min-width:20rem}
</style>

"""


def on_files(files: Files, config: Any) -> Files:
    """Add the ledger as a page, and the pages and figures of the kept runs that it links to."""
    from biascope.reports import ledger, ledger_json, ledger_markdown, ledger_page, write_pages

    write_pages(RUNS)
    rows = ledger(RUNS)
    (RUNS / "ledger.html").write_text(ledger_page(rows, RUNS, look="."), encoding="utf-8")
    (RUNS / "ledger.json").write_text(ledger_json(rows), encoding="utf-8")
    text = ledger_markdown(rows, RUNS.parent, "/index.html")
    # this page is reference/ledger/ on the site, the runs are at its root
    text = text.replace("](reproductions/", "](../reproductions/")
    filters = "The same as cards with pictures and filters: [ledger](../reproductions/ledger.html).\n\n"
    text = WIDE + text.replace("A claim is supported,", filters + "A claim is supported,", 1)
    for stub in [file for file in files if file.src_uri == "reference/ledger.md"]:
        files.remove(stub)  # which points to the ledger in the repository
    files.append(File.generated(config, "reference/ledger.md", content=text))
    for path in sorted(RUNS.rglob("*")) if RUNS.is_dir() else []:
        if path.is_file() and path.suffix in {".html", ".css", ".js", ".png", ".json"}:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Paths to kept runs as they are on the site."""
    return markdown.replace("](../../reproductions/", "](../reproductions/")
