"""A server on this machine with as much of the API of Kubernetes as ``kubectl create`` and ``kubectl apply`` need."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESOURCES = {
    "api/v1": ("secrets", "Secret"),
    "apis/trainer.kubeflow.org/v1alpha1": ("trainjobs", "TrainJob"),
    "apis/jobset.x-k8s.io/v1alpha2": ("jobsets", "JobSet"),
}
"""Name and kind of the resource of each version of an API."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    config: str
    """The content of a file for ``KUBECONFIG``."""
    created: dict[str, bytes] = field(default_factory=dict)
    """The objects, by the path of their kind."""


@contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "test", "user": {}}],
    }
    api = KubernetesApi(json.dumps(config))
    server.RequestHandlerClass = type("Handler", (_Handler,), {"api": api})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    api: KubernetesApi

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path == "openapi/v2":  # without schemas; the API server validates
            self._answer(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        elif path == "version":
            self._json(200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        elif path == "api":
            self._json(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            self._json(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()})
        elif path in RESOURCES:
            name, kind = RESOURCES[path]
            verbs = ["create", "get", "patch"]
            resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            version = path.partition("/")[2]
            self._json(200, {"kind": "APIResourceList", "groupVersion": version, "resources": [resource]})
        else:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
            self._json(404, {**status, "code": 404})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.api.created[self.path.partition("?")[0].strip("/")] = content
        self._answer(201, content, self.headers["Content-Type"])

    def _json(self, code: int, content: Any) -> None:
        self._answer(code, json.dumps(content).encode(), "application/json")

    def _answer(self, code: int, content: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _groups() -> list[dict[str, Any]]:
    groups = []
    for path in RESOURCES:
        prefix, _, version = path.partition("/")
        if prefix == "apis":
            preferred = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [preferred], "preferredVersion": preferred})
    return groups
