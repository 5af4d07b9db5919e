"""The ledger on the site: made from `reproductions/` when the site is built, so it can never be out of date.

Pages show figures of kept runs as ../../reproductions/..., which is right in the repository; the site has the runs in
its root, beside the pages' folders.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "reproductions"


def on_files(files: Files, config: Any) -> Files:
    """Add the ledger, a page that leads to it, and the pages and figures of the kept runs that it links to."""
    from biascope.reports import ledger, ledger_json, ledger_page, summary, write_pages

    write_pages(RUNS)
    rows = ledger(RUNS)
    (RUNS / "ledger.html").write_text(ledger_page(rows, RUNS, look="."), encoding="utf-8")
    (RUNS / "ledger.json").write_text(ledger_json(rows), encoding="utf-8")
    for stub in [file for file in files if file.src_uri == "reference/ledger.md"]:
        files.remove(stub)  # made again below, with what the kept runs say today
    # this page is reference/ledger/ on the site, the runs are at its root
    told = f"{summary(rows)}\n\n[Every claim, with its runs](../reproductions/ledger.html)\n"
    title, _, how = (ROOT / "docs" / "reference" / "ledger.md").read_text(encoding="utf-8").partition("\n\n")
    text = f"{title}\n\n{told}\n{how}"
    files.append(File.generated(config, "reference/ledger.md", content=text))
    for path in sorted(RUNS.rglob("*")) if RUNS.is_dir() else []:
        if path.is_file() and path.suffix in {".html", ".css", ".js", ".png", ".json"}:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Paths to kept runs as they are on the site."""
    return markdown.replace("](../../reproductions/", "](../reproductions/")
