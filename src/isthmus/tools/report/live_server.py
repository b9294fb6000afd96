"""Serves a live report to the browsers of one user: on loopback, under an address that contains a secret token.

Other users of the machine can connect to loopback too, and so can a page of any website in a browser: requests need the
token, and the name of this machine as their host (a website can give its own name the address 127.0.0.1). A request
selects nothing: the one page has no parameter, and no path from an address reaches the file system.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
import sys
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from isthmus.errors import UsageError
from isthmus.tools.report.live_report import LiveReport

_LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
"""Any port: that of a tunnel may be another one."""
_TOKEN_BYTES = 24
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all answers. The page has a policy for its content."""


@dataclass(frozen=True, slots=True)
class LiveAddress:
    """Result of ``isthmus report --live``, printed before the first request."""

    url: str
    ssh: str
    """Command that makes the address valid on another machine."""
    waiting: list[str]
    """Runs that have not begun."""

    def as_dict(self) -> dict[str, Any]:
        """The address for ``--json``."""
        return asdict(self)


class LiveServer(ThreadingMixIn, TCPServer):
    """Answers GET and HEAD of one address until it is interrupted."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, report: LiveReport, port: int = 0) -> None:
        """``port``: 0 is a free one.

        Raises:
            UsageError: another process listens on the port, or it is reserved for the system.
        """
        self.report = report
        self.path: str = f"/{secrets.token_urlsafe(_TOKEN_BYTES)}"
        try:
            super().__init__((_LOOPBACK, port), _LiveRequest)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"--port {port} is in use on this machine. Name another one, or omit it.") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise UsageError(f"--port {port}: {error.strerror}. Name one of 1024 or above, or omit it.") from None
            raise

    @property
    def address(self) -> LiveAddress:
        port = self.server_address[1]
        return LiveAddress(
            f"http://{_LOOPBACK}:{port}{self.path}",
            f"ssh -N -L {port}:{_LOOPBACK}:{port} {socket.gethostname()}",
            self.report.waiting(),
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a browser that has closed its connection is no error
            super().handle_error(request, client_address)


class _LiveRequest(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30.0
    """Seconds in which a request has to arrive, and in which its answer has to be sent."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0]) is None:
            self.send_error(HTTPStatus.FORBIDDEN, "The host is not this machine.")
            return
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            self.send_error(HTTPStatus.NOT_FOUND, "The address is not the one that isthmus report --live has printed.")
            return
        try:
            page = self.server.report.page()
        except Exception:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "The report failed; its terminal shows the reason.")
            raise
        tag = f'"{page.version}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", tag)
            self.end_headers()
            return
        is_compressed = "gzip" in self.headers.get("Accept-Encoding", "")
        self.send_response(HTTPStatus.OK)
        self.send_header("ETag", tag)
        if is_compressed:
            self.send_header("Content-Encoding", "gzip")
        self._send(page.compressed if is_compressed else page.content, "text/html; charset=utf-8")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection = True
        self.send_response(code)
        self._send(f"{message or HTTPStatus(code).phrase}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "isthmus"

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: addresses contain the token."""
