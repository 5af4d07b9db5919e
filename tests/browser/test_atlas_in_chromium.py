"""The atlas in a real browser: points are chosen, maps change, the table sorts."""

from dataclasses import replace
from pathlib import Path

import pytest
from chromium_driver import Chromium

from biascope.atlas import Atlas
from biascope.atlas.page import atlas_page

SHOWN = "document.querySelector('#near h3').textContent"


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_map_the_neighbours_and_the_table(browser: Chromium, tmp_path: Path, width: int, dark: bool) -> None:
    known = Atlas.load().fingerprints
    path = tmp_path / "atlas.html"
    path.write_text(atlas_page(known, replace(known[4], name="mine", about={})), encoding="utf-8")
    page = browser.open(path, width=width, dark=dark)
    assert page.js("document.querySelectorAll('#map .point').length") == len(known) + 1
    assert page.js(SHOWN) == "mine"
    assert page.js("document.querySelector('#near li').textContent") == f"{known[4].name} 0.00"
    page.click("#near li:nth-child(2) button")
    second = page.js(SHOWN)
    assert second != "mine"
    siren = "document.querySelector('#map [aria-label^=\"siren\"]')"
    page.js(f"{siren}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter'}}))")
    assert page.js(SHOWN) == "siren"
    page.js("var s=document.getElementById('aspect');s.value='directions';s.dispatchEvent(new Event('change'))")
    images = sum(one.kind == "image" for one in known) + 1
    assert page.js("document.querySelectorAll('#map .point').length") == images
    assert f"{len(known) + 1 - images} networks have no such aspect" in page.js(
        "document.getElementById('reading').textContent"
    )
    page.click("#networks th:nth-child(4) button")
    column = "[...document.querySelectorAll('#networks tbody tr')].map(r => +r.cells[3].dataset.value)"
    values = page.js(column)
    assert values == sorted(values)
    page.click("#networks th:nth-child(4) button")
    assert page.js(column) == sorted(values, reverse=True)
    assert page.overflow() == 0
    assert page.problems() == []
    assert page.requests_leave() == []
    page.close()
