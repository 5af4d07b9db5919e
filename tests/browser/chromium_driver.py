"""A real Chromium driven over the DevTools protocol through two pipes: no driver program, no package.

with Chromium(profile_folder) as browser:
    page = browser.open(path, width=400, dark=True)
    page.js("document.title")
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """The browser: $BIASCOPE_CHROMIUM, or the first that is installed."""
    return os.environ.get("BIASCOPE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not 0 to 9: those numbers are given away in the child."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]


class Chromium:
    """One headless browser. Commands go into file descriptor 3 and answers come out of 4, each ended by a zero byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        to_browser, self._out = _pipe()
        self._in, from_browser = _pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio "
            "--disable-background-networking --disable-component-update --hide-scrollbars --remote-debugging-pipe"
        )
        program = str(executable())
        self._process = os.posix_spawn(
            program,
            [program, *flags.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, to_browser, 3),
                (os.POSIX_SPAWN_DUP2, from_browser, 4),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        where = {"behavior": "allow", "downloadPath": str(self.downloads), "eventsEnabled": True}
        self.send("Browser.setDownloadBehavior", **where)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has gone away")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path | str, width: int = 1600, height: int = 1000, dark: bool = False) -> Page:
        """A file or an address in a new tab of that size, loaded."""
        address = path if isinstance(path, str) else path.resolve().as_uri()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=address)
        page.wait("document.readyState === 'complete' && location.protocol !== 'about:'")
        return page

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            self.send("Browser.close")
        end = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self._out)
        os.close(self._in)


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Until the condition holds in the page."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"still not true: {condition}")
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element, as a reader does it."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.js(
            f"(() => {{const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]})()"
        )
        return box[0], box[1]

    def key(self, name: str) -> None:
        code = {"ArrowRight": 39, "ArrowLeft": 37, "End": 35}[name]
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def problems(self) -> list[str]:
        """Errors and warnings of this page's console, and exceptions nobody caught."""
        self.js("1")  # events that are under way arrive before the answer
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                found.append(params["entry"]["text"])
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
                found.append(str(params["args"]))
        return found

    def requests_leave(self) -> list[str]:
        """Every address the page loaded that is not its own file or inside it."""
        names = self.js("performance.getEntriesByType('resource').map(e => e.name)")
        return [name for name in names if not name.startswith(("data:", "file:"))]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)
