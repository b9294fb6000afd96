"""A server on this machine with as much of the Hugging Face Hub as downloads of models and data sets need."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class HubServer:
    address: str
    """Such as ``http://127.0.0.1:1234``."""
    repositories: Mapping[str, Mapping[str, bytes]]
    """Contents of each file, by repository: ``org/name``, or ``datasets/org/name``."""
    gated: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)
    """The requested paths."""


@contextmanager
def serve_hub(
    repositories: Mapping[str, Mapping[str, bytes]], gated: frozenset[str] = frozenset()
) -> Iterator[HubServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = HubServer(f"http://127.0.0.1:{server.server_port}", repositories, gated)
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        self.hub.asked.append(f"/{path}")
        parts = path.removeprefix("api/").removeprefix("models/").split("/")
        size = 3 if parts[0] == "datasets" else 2
        repository, rest = "/".join(parts[:size]), parts[size:]
        files = self.hub.repositories.get(repository)
        if repository in self.hub.gated:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["resolve"]:
            self._file(files, "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            self._json(
                _tree(
                    files, "/".join(rest[2:]), recursive="true" in parse_qs(url.query).get("recursive", [""])[0].lower()
                )
            )
        elif rest[:1] == ["paths-info"]:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            everything = {item["path"]: item for item in _tree(files, "", recursive=True)}
            self._json([everything[name] for name in form["paths"] if name in everything])
        else:
            name = repository.removeprefix("datasets/")
            self._json({"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files], "tags": []})

    def _file(self, files: Mapping[str, bytes], name: str) -> None:
        if name in files:
            self._answer(200, files[name], {"ETag": f'"{name}"', "X-Repo-Commit": SHA})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _tree(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, object]]:
    below = f"{folder}/" if folder else ""
    rows: dict[str, dict[str, object]] = {}
    for name, content in files.items():
        if not name.startswith(below):
            continue
        *folders, _ = name.removeprefix(below).split("/")
        for depth in range(1, len(folders) + 1):
            path = below + "/".join(folders[:depth])
            rows[path] = {"type": "directory", "path": path, "oid": path, "size": 0}
        rows[name] = {"type": "file", "path": name, "oid": name, "size": len(content)}
    return [row for path, row in rows.items() if recursive or "/" not in path.removeprefix(below)]
