"""The ledger on the site: made from `reproductions/` when the site is built, so it can never be out of date."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "reproductions"


def on_files(files: Files, config: Any) -> Files:
    """Add the ledger as a page, and the pages and figures of the kept runs that it links to."""
    from biascope.reports import ledger, ledger_markdown

    text = ledger_markdown(ledger(RUNS), RUNS.parent, "/index.html")
    # this page is reference/ledger/ on the site, the runs are at its root
    text = text.replace("](reproductions/", "](../reproductions/")
    files.append(File.generated(config, "reference/ledger.md", content=text))
    for path in sorted(RUNS.rglob("*")) if RUNS.is_dir() else []:
        if path.is_file() and path.suffix in {".html", ".png", ".json"}:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files
