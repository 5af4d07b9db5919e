"""The documentation: no page is empty, every picture is there, and the site has the look of the kept pages."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from biascope import reports

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")]
MADE = {ROOT / "docs" / "atlas.html"}  # with the site


def hook() -> ModuleType:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    spec = importlib.util.spec_from_file_location("ledger_hook", ROOT / ".mkdocs" / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules(room: str) -> list[str]:
    package = importlib.import_module(room)
    inner = pkgutil.walk_packages(package.__path__, f"{room}.") if hasattr(package, "__path__") else ()
    return [room, *(module.name for module in inner)]


# the other rooms have such a test of their own
@pytest.mark.parametrize("room", ["kernels", "network", "support"])
def test_examples_in_docstrings_run(room: str) -> None:
    for name in modules(f"biascope.{room}"):
        assert doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def anchors(page: Path) -> set[str]:
    """Where links into a page can point: its headings, as the site and GitHub name them, and what it documents."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"\s", "-", each) for each in words} | set(re.findall(r"^::: (\S+)$", text, re.M))


@pytest.mark.parametrize("page", [*PAGES, *TOP], ids=lambda page: page.stem)
def test_pages_say_something_and_their_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text) > 20
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for words, target, anchor in re.findall(r"(!?\[[^\]]*\])\(([^)#\s]*)#?([^)\s]*)\)", prose):
        if "://" not in target:
            leads = (page.parent / target) if target else page
            assert leads.exists() or leads.resolve() in MADE, target
            assert not anchor or anchor in anchors(leads), f"{target}#{anchor}: there is no such heading"
        assert not words.startswith("![") or len(words) > 20, f"{target}: a picture needs words"


def test_every_concept_has_a_picture() -> None:
    concepts = [page for page in PAGES if page.parent.name == "concepts"]
    assert len(concepts) >= 5
    assert not [page.name for page in concepts if "![" not in page.read_text(encoding="utf-8")]


def test_the_site_gets_the_ledger_the_runs_and_their_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / ".mkdocs")
    module = hook()
    for name in ("nad-fig4a-laptop-cpu", "alignment-fig4.1-laptop-cpu"):
        shutil.copytree(ROOT / "reproductions" / name, tmp_path / "reproductions" / name)
    monkeypatch.setattr(module, "RUNS", tmp_path / "reproductions")
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    config = MkDocsConfig()
    config.load_dict({"site_name": "s", "docs_dir": str(ROOT / "docs"), "site_dir": str(ROOT / "no-site")})
    config.validate()
    config.plugins._current_plugin = None  # set by mkdocs while hooks run
    files = module.on_files(Files([]), config=config)
    names = {file.src_uri for file in files}
    assert {"reproductions/page.css", "reproductions/page.js", "reference/ledger.md"} <= names
    leads = files.get_file_from_path("reference/ledger.md").content_string
    assert re.findall(r"\]\(\.\./(reproductions/[^)]*)\)", leads) == ["reproductions/ledger.html"]
    cards = (tmp_path / "reproductions" / "ledger.html").read_text()
    linked = {f"reproductions/{run}" for run in re.findall(r'href="([^":]*/index.html)"', cards)}
    assert len(linked) == 2
    assert linked <= names
    assert module.on_page_markdown("![a](../../reproductions/r/f.png)") == "![a](../reproductions/r/f.png)"
    home = module.on_page_markdown(f"# b\n\n{module.HERE}", config=config)
    thumbnails = re.findall(r'src="(gallery/[^"]+\.webp)"', home)
    assert len(thumbnails) == 2
    assert set(thumbnails) | set(re.findall(r'class="run".*?href="([^"]+)"', home)) <= names
    assert files.get_file_from_path(thumbnails[0]).content_bytes[8:12] == b"WEBP"
    assert home.count('data-verdict="supported"') + home.count('data-verdict="undecided"') == 2


def test_what_reports_offer_is_on_the_reference_page_with_an_example() -> None:
    text = (ROOT / "docs" / "reference" / "reports.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: biascope\.reports\.(\w+)$", text, re.MULTILINE)) == set(reports.__all__)
    functions = [getattr(reports, name) for name in reports.__all__ if inspect.isfunction(getattr(reports, name))]
    assert not [function.__name__ for function in functions if "Example:" not in (function.__doc__ or "")]
