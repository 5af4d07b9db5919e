"""The ledger and the gallery: made from `reproductions/` when the site is built, so they can never be out of date.

Pages show figures of kept runs as ../../reproductions/..., which is right in the repository; the site has the runs in
its root, beside the pages' folders.
"""

import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RUNS = Path(os.environ.get("BIASCOPE_SITE_RUNS", ROOT / "reproductions"))  # tests build the site with few
HERE = "<!-- gallery -->"  # where it goes on the home page


def on_config(config: Any) -> Any:
    """The choice of versions, where mike builds the site: it needs a server, which the folder has not."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the ledger, a page that leads to it, the gallery, and the pages and figures of the kept runs."""
    sys.path.insert(0, str(Path(__file__).parent))  # its neighbour is no package
    from gallery import gallery, thumbnail

    from biascope.atlas import Atlas
    from biascope.atlas.page import atlas_page
    from biascope.reports import ledger, ledger_json, ledger_page, summary, write_pages
    from biascope.reports.html import write_look

    write_pages(RUNS)
    write_look(RUNS)
    rows = ledger(RUNS)
    (RUNS / "ledger.html").write_text(ledger_page(rows, RUNS, look="."), encoding="utf-8")
    (RUNS / "ledger.json").write_text(ledger_json(rows), encoding="utf-8")
    for stub in [file for file in files if file.src_uri == "reference/ledger.md"]:
        files.remove(stub)  # made again below, with what the kept runs say today
    # this page is reference/ledger/ on the site, the runs are at its root
    lead = f"{summary(rows)}\n\n[Every claim, with its runs](../reproductions/ledger.html)\n"
    title, _, how = (Path(config.docs_dir) / "reference" / "ledger.md").read_text(encoding="utf-8").partition("\n\n")
    text = f"{title}\n\n{lead}\n{how}"
    files.append(File.generated(config, "reference/ledger.md", content=text))
    files.append(File.generated(config, "atlas.html", content=atlas_page(Atlas.load().fingerprints)))
    config.extra["gallery"], pictures = gallery(rows, RUNS)
    for name, picture in pictures.items():
        files.append(File.generated(config, f"gallery/{name}.webp", content=thumbnail(picture)))
    for path in sorted(RUNS.rglob("*")) if RUNS.is_dir() else []:
        if path.is_file() and path.suffix in {".html", ".css", ".js", ".png", ".json"}:
            place = Path("reproductions", path.relative_to(RUNS)).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, config: Any = None, **_: Any) -> str:
    """Paths to kept runs as they are on the site, and the gallery in its place."""
    markdown = markdown.replace("](../../reproductions/", "](../reproductions/")
    return markdown.replace(HERE, config.extra["gallery"]) if HERE in markdown else markdown
