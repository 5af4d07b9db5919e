"""A page on this computer that follows a folder: probes while a network trains, runs and cards as they finish.

Only the loopback address is served, every address begins with a secret token, and only pages and pictures below the
folder can be read. Pages of the folder are shown in a sandbox: their scripts cannot ask this server for anything.
"""

import html as _html
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from biascope.reports.html import page, tag
from biascope.reports.watching import Watched
from biascope.support.errors import InputError

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
SCRIPT = Path(__file__).with_name("watch.js").read_text(encoding="utf-8")
OURS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
THEIRS = "sandbox allow-scripts allow-downloads allow-popups"


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one folder on 127.0.0.1; `address` is what to open in a browser.

    Example:
        >>> import tempfile
        >>> with WatchServer(tempfile.mkdtemp()) as server:
        ...     server.address.startswith("http://127.0.0.1:")
        True
    """

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise InputError(f"{folder} is not a folder; make it, or watch the one that your runs are written to")
        self.watched = Watched(self.folder)
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used ({error.strerror}); leave --port out for a free one"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def page(self) -> str:
        """The page; its script asks for the state every second."""
        body = [tag("div", id="watch", aria_live="polite"), tag("noscript", "This page needs JavaScript.")]
        whole = page(f"Watching {self.folder.name}", body, tag("span", "", id="status"), str(self.folder))
        return whole.replace("</body>", f"<script>{SCRIPT}</script></body>")

    def inside(self, name: str) -> Path | None:
        """A page or picture below the folder, or None: links out of it and hidden files do not count."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder) or path.suffix not in KINDS or not path.is_file():
            return None
        return None if any(part.startswith(".") for part in path.relative_to(self.folder).parts) else path


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        """The page, the state, or a file of the folder."""
        server = self.server
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        token, _, rest = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        known = secrets.compare_digest(token.encode(), server.token.encode())
        if not known or host not in {"127.0.0.1", "localhost"}:  # another name: a foreign page rebinding its address
            return self._send(HTTPStatus.FORBIDDEN, b"open the address that `biascope watch` printed")
        if rest == "":
            return self._send(HTTPStatus.OK, server.page().encode(), KINDS[".html"], OURS)
        if rest == "state.json":
            state = json.dumps(server.watched.state(), allow_nan=False)
            return self._send(HTTPStatus.OK, state.encode(), "application/json", OURS)
        file = server.inside(rest.removeprefix("files/")) if rest.startswith("files/") and "\0" not in rest else None
        if file is None:
            return self._send(HTTPStatus.NOT_FOUND, f"no page or picture here: {_html.escape(rest)}".encode())
        return self._send(HTTPStatus.OK, file.read_bytes(), KINDS[file.suffix], THEIRS)

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8", rule: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if rule:
            self.send_header("Content-Security-Policy", rule)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is for the address."""
