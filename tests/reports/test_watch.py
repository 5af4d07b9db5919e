"""The local page that follows a folder: what it finds, and what nobody else may read."""

import json
import math
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import biascope as bs
from biascope.cli.app import app
from biascope.reports import html
from biascope.reports.watch import WatchServer
from biascope.reports.watching import POINTS, Watched
from biascope.studies import Run
from biascope.support.errors import InputError


def trained(folder: Path, steps: int) -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    probe = bs.Probe(net, x, y, ["sign_similarity"], schedule=1, max_overhead=None, out=folder)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        probe.step(loss)
    probe.finish()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "runs"
    inside.mkdir()
    return inside


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(folder) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield opened
        opened.shutdown()
        thread.join(5)


def ask(server: WatchServer, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_a_probe_is_shown_as_it_was_recorded(folder: Path) -> None:
    trained(folder / "net", 3)
    (probe,) = Watched(folder).state()["probes"]
    records = bs.probes.read_records(folder / "net")
    assert probe["name"] == "net"
    assert probe["step"] == 3
    assert probe["curves"]["sign_similarity"] == [[r.step, r["sign_similarity"]] for r in records]
    assert probe["curves"]["loss"] == [[r.step, r.loss] for r in records if r.loss is not None]


def test_a_growing_probe_is_read_again_and_nothing_else_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(folder / "a", 1)
    trained(folder / "b", 1)
    watched = Watched(folder)
    watched.state()
    trained(folder / "a", 4)  # goes on from step 1
    read = []
    from biascope.reports import watching

    monkeypatch.setattr(watching, "read_records", lambda p: read.append(p.name) or bs.probes.read_records(p))
    probes = {p["name"]: p["step"] for p in watched.state()["probes"]}
    assert (probes, read) == ({"a": 5, "b": 1}, ["a"])


def test_values_that_json_does_not_know_are_gaps(folder: Path) -> None:
    rows = [{"step": s, "values": {"m": None if s == 1 else 1.0}} for s in range(3)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    state = Watched(folder).state()
    assert state["probes"][0]["curves"]["m"] == [[0, 1.0], [1, None], [2, 1.0]]
    assert "NaN" not in json.dumps(state)
    assert math.isnan(bs.probes.read_records(folder)[1]["m"])


def test_long_curves_are_thinned_and_keep_their_ends(folder: Path) -> None:
    rows = [{"step": s, "values": {"m": s}} for s in range(3 * POINTS + 7)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    points = Watched(folder).state()["probes"][0]["curves"]["m"]
    assert len(points) <= POINTS + 1
    assert (points[0][0], points[-1][0]) == (0, 3 * POINTS + 6)


def test_runs_and_pages_are_listed_and_a_damaged_probe_hides_nothing(folder: Path) -> None:
    run = Run.create(folder / "r", {"study": "nad/fig5", "size": "smoke", "seed": 3})
    run.log(step=1, loss=0.25)
    (folder / "card.html").write_text(html.page("Card of <lenet>", []))
    (folder / "bad").mkdir()
    (folder / "bad" / "records.jsonl").write_text("{\n{}\n")
    state = Watched(folder).state()
    (found,) = state["runs"]
    assert (found["study"], found["size"], found["seed"], found["finished"]) == ("nad/fig5", "smoke", 3, False)
    assert found["last"] == {"step": 1, "loss": 0.25}
    assert [(p["name"], p["title"]) for p in state["pages"]] == [("card.html", "Card of <lenet>")]
    assert "line 1 is not JSON" in state["probes"][0]["problem"]


def test_only_the_token_opens_the_page(server: WatchServer, folder: Path) -> None:
    (folder / "card.html").write_text(html.page("Card", []))
    home = f"/{server.token}/"
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, home)[0] == 200
    assert ask(server, home + "files/card.html")[0] == 200
    wrong = "/" + "x" * len(server.token) + "/"
    for path in ("/", wrong, wrong + "state.json", wrong + "files/card.html", "/files/card.html"):
        status, content, _ = ask(server, path)
        assert (status, b"Card" in content) == (403, False), path
    assert ask(server, home, host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, home, host=f"localhost:{server.server_port}")[0] == 200


def test_no_file_outside_the_folder_can_be_read(server: WatchServer, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    (folder / "weights.pt").write_text("secret")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.html").write_text("secret")
    names = ("../secret.html", "%2e%2e/secret.html", "..%2fsecret.html", str(tmp_path / "secret.html"), "link.html")
    for name in (*names, "/" + str(tmp_path / "secret.html"), "weights.pt", ".hidden/a.html", "", ".", "a%00.html"):
        status, content, _ = ask(server, f"/{server.token}/files/{name}")
        assert (status, b"secret<" in content, content == b"secret") == (404, False, False), name


def test_pages_of_the_folder_are_in_a_sandbox(server: WatchServer, folder: Path) -> None:
    (folder / "card.html").write_text(html.page("Card", []))
    rule = ask(server, f"/{server.token}/files/card.html")[2]["Content-Security-Policy"]
    assert rule.startswith("sandbox")
    assert "allow-same-origin" not in rule


def test_a_missing_folder_and_a_used_port_are_named(folder: Path, server: WatchServer) -> None:
    with pytest.raises(InputError, match="not a folder"):
        WatchServer(folder / "none")
    with pytest.raises(InputError, match=f"port {server.server_port} cannot be used"):
        WatchServer(folder, server.server_port)


def test_the_command_prints_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: WatchServer, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", stop)
    found = CliRunner().invoke(app, ["watch", str(folder), "--no-browser"])
    assert found.exit_code == 0, found.output
    assert "http://127.0.0.1:" in found.output
    assert "stopped" in found.output
