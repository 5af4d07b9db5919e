"""The live page in a real browser: curves grow, runs and cards appear, nothing leaves the computer."""

import json
import threading
from pathlib import Path

import pytest
from chromium_driver import Chromium

from biascope.reports import html
from biascope.reports.watch import WatchServer
from biascope.studies import Run


def write(folder: Path, steps: int) -> None:
    rows = [{"step": s, "loss": 1 / (1 + s), "values": {"ntk_alignment": 1 - 0.1 * s}} for s in range(steps)]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_page_follows_its_folder(browser: Chromium, tmp_path: Path, width: int, dark: bool) -> None:
    write(tmp_path, 3)
    with WatchServer(tmp_path) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        page = browser.open(server.address, width=width, dark=dark)
        page.wait("document.querySelectorAll('.curves figure').length === 2")
        assert page.js("document.querySelector('.curves figcaption').textContent") == "loss = 0.333"
        write(tmp_path, 5)
        Run.create(tmp_path / "r", {"study": "nad/fig5", "size": "smoke", "seed": 3})
        (tmp_path / "card.html").write_text(html.page("Card of a network", ["hello"]))
        page.wait("document.querySelector('.curves figcaption').textContent === 'loss = 0.2'")
        page.wait("document.body.textContent.includes('nad/fig5')")
        page.wait("[...document.links].some(a => a.textContent === 'Card of a network')")
        assert page.overflow() == 0
        card = browser.open(page.js("[...document.links].find(a => a.textContent === 'Card of a network').href"))
        assert card.js("document.body.textContent.includes('hello')")
        state = card.js("fetch('../state.json').then(r => r.text()).catch(() => 'refused')")
        assert state == "refused"  # a page of the folder cannot ask the server
        card.close()
        assert page.problems() == []
        server.shutdown()
        server.server_close()
        page.wait("document.getElementById('status').textContent.startsWith('Not connected')")
        assert "card.html" in page.js("document.body.textContent")
        page.close()
