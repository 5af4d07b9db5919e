"""The documentation site, built with a few kept runs and opened from its folder as a reader opens it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accessible import AUDIT
from chromium_driver import Chromium

ROOT = Path(__file__).parents[2]
RUNS = ("nad-fig4a-laptop-cpu", "alignment-fig4.1-laptop-cpu", "nad-fig5-paper-h200")  # pages show pictures of two
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    home = tmp_path_factory.mktemp("site")
    for name in RUNS:
        shutil.copytree(ROOT / "reproductions" / name, home / "runs" / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(home / "site")]
    made = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"BIASCOPE_SITE_RUNS": str(home / "runs")}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return home / "site"


def test_the_home_page_is_a_gallery_that_filters(browser: Chromium, site: Path) -> None:
    page = browser.open(site / "index.html")
    seen = "[...document.querySelectorAll('.run')].filter(e => e.offsetParent).length"
    assert page.js(seen) == 3
    page.js("document.querySelector('[data-pick=words]').value = 'tangent'")
    page.js("document.querySelector('[data-pick=words]').dispatchEvent(new Event('input'))")
    assert page.js(seen) == 1
    assert page.js("document.querySelector('.gallery output').textContent") == "1 run"
    page.js("document.querySelector('.run:not([hidden])').click()")
    page.wait("location.pathname.endsWith('alignment-fig4.1-laptop-cpu/index.html')")
    page.close()


def test_search_works_on_pages_opened_from_the_folder(browser: Chromium, site: Path) -> None:
    page = browser.open(site / "index.html")
    page.js("document.querySelector('[data-md-component=search-query]').focus()")
    page.js("document.querySelector('[data-md-component=search-query]').value = 'kernel'")
    page.js(
        "document.querySelector('[data-md-component=search-query]').dispatchEvent(new Event('keyup', {bubbles: true}))"
    )
    page.wait("document.querySelectorAll('.md-search-result__item').length > 3")
    assert "kernel" in page.js("document.querySelector('.md-search-result__item').innerText").lower()
    page.close()


def test_the_reference_names_what_one_types(browser: Chromium, site: Path) -> None:
    page = browser.open(site / "reference" / "kernels.html")
    titles = page.js("[...document.querySelectorAll('h2.doc-heading')].map(e => e.innerText.trim())")
    assert {"bs.ntk", "bs.Kernel", "bs.kernels.open_kernel"} <= {title.split()[0] for title in titles}
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_pages_are_sound_and_readable(browser: Chromium, site: Path, width: int, dark: bool) -> None:
    for name in ("index.html", "concepts/alignment.html", "howto/own-data.html", "reference/kernels.html"):
        page = browser.open(site / name, width=width, dark=dark)
        assert page.problems() == [], name
        assert page.requests_leave() == [], name
        assert page.overflow() <= 0, name
        assert (site / name).stat().st_size < 3_000_000
        assert page.js(AUDIT) == [], name
        page.close()
