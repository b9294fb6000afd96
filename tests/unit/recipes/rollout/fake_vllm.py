"""A small HTTP server with the endpoints of vLLM that rollouts use.

As a program it imports neither torch nor Isthmus before it needs them: that takes seconds at each start.
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from isthmus.config.schema import RunConfig

VOCAB_SIZE = 50
CONFIG = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def rollout_config(*urls: str, **rollout: Any) -> RunConfig:
    """Settings of a run with rollouts by these servers."""
    from isthmus.config.schema import RunConfig

    values: dict[str, Any] = {
        "recipe": "grpo",
        "out": "run",
        "model": {"path": "model"},
        "data": {"files": ["data.jsonl"], "seq_length": 64},
        "rollout": {"engine": "vllm", "reward": ["exact_match"], "url": list(urls), "timeout_s": 20.0},
    }
    values["rollout"] |= {"max_new_tokens": 3} | rollout
    return RunConfig.model_validate(values)


class Policy:
    """What an engine needs of the model that is trained."""

    def __init__(self, folder: Path) -> None:
        import torch

        from isthmus.engine.parallel.process_groups import FIRST_RANK

        architecture = SimpleNamespace(family="qwen3", vocab_size=VOCAB_SIZE, moe=None)
        source = SimpleNamespace(config=CONFIG | {"model_type": "qwen3"}, path=folder / "model")
        self.plan = SimpleNamespace(adapters=None, source=source, architecture=architecture)
        self.position, self.dtype, self.logp = FIRST_RANK, torch.float32, -2.0
        self.messages: list[str] = []

    def give_experts(self) -> None:
        """Make it a model with experts in the first of two layers."""
        moe = SimpleNamespace(score="softmax", num_experts=6, top_k=2)
        layers = [SimpleNamespace(number=n, experts=None if n else moe) for n in range(2)]
        values = {"family": "qwen3_moe", "moe": moe, "layers": layers, "num_layers": 2}
        vars(self.plan.architecture).update(values)

    def score(self, samples: Sequence[tuple[list[int], int]]) -> Any:
        return [([-self.logp] * scored, []) for _, scored in samples]

    def encode(self, text: str) -> list[int]:
        return [1, 2, 3]


def encoded(experts: Any) -> str:
    """An array as vLLM returns it."""
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


class FakeVllm:
    """Answers ``max_tokens`` tokens, the first of which is the prompt's first one plus 1, with log-probability -1."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Requests for answers."""
        self.loaded: list[str] = []
        """Folders of weights."""
        self.settings: dict[str, Any] = {"model_type": "qwen3", "config": CONFIG, "logprobs_mode": "raw_logprobs"}
        self.tokens = [1, 2, 3]
        """Of any text."""
        self.has_extension = True
        self.missing: list[str] = []
        self.probe_logp = -2.0
        self.max_model_len = 64
        self.damage: Callable[[dict[str, str]], None] = lambda hashes: None
        self.dies_after: int | None = None
        """Answers until it does not answer any more."""
        self.exits = False
        """Whether the process ends then."""
        self.delay_s = 0.0
        self.returns_experts = False
        """Answers have experts: 4, and the first token of the prompt modulo 4."""
        self.answer: dict[str, Any] = {}
        """Replaced fields of an answer."""
        self._server = _TcpServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def is_dead(self) -> bool:
        return self.dies_after is not None and len(self.bodies) >= self.dies_after

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def choice(self, body: Any) -> dict[str, Any]:
        """An answer to a request."""
        tokens = [body["prompt"][0] + 1] + [7] * (body["max_tokens"] - 1)
        answer: dict[str, Any] = {"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}}
        if self.returns_experts:
            rows = len(body["prompt"]) + len(tokens) - 1
            experts = np.zeros((rows, CONFIG["num_hidden_layers"], 2), np.uint8)
            experts[:, 0] = [body["prompt"][0] % 4, 4]
            answer["routed_experts"] = encoded(experts)
        return answer

    def load(self, folder: str) -> None:
        """Use the weights of a folder."""

    def prompt_logps(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of all tokens of a prompt but the first."""
        return [self.probe_logp] * (len(tokens) - 1)

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": self.max_model_len}]}
        if path == "/tokenize":
            return 200, {"tokens": self.tokens}
        if path == "/collective_rpc":
            return self._rpc(body)
        if path == "/health":
            return 200, None
        if "prompt_logprobs" in body:
            pairs = zip(body["prompt"][1:], self.prompt_logps(body["prompt"]), strict=True)
            entries = [{str(token): {"logprob": logp}} for token, logp in pairs]
            return 200, {"choices": [{"prompt_logprobs": [None, *entries]}]}
        self.bodies.append(body)
        time.sleep(self.delay_s)
        return 200, {"choices": [self.choice(body) | self.answer]}

    def _rpc(self, body: Any) -> tuple[int, Any]:
        if not self.has_extension:
            return 500, {"error": {"message": "'CPUWorker' object has no attribute 'isthmus_settings'"}}
        if body["method"] == "isthmus_settings":
            return 200, {"results": [self.settings]}
        from safetensors.torch import load_file

        from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import tensor_hash

        (folder,) = body["args"]
        self.loaded.append(Path(folder).name)
        self.load(folder)
        hashes = {name: tensor_hash(tensor) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        self.damage(hashes)
        return 200, {"results": [{"hashes": hashes, "missing": self.missing}]}


class _TcpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            if fake.is_dead:
                if fake.exits:
                    os._exit(1)
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, result = fake.reply(self.path, body)
            content = b"" if result is None else json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """As a program in place of Python with vLLM: serves at ``--uds`` until the standard input is closed.

    The file ``dies`` in the folder of this program's link makes it end after two answers; it removes the file.
    """
    here, arguments = Path(sys.argv[1]), sys.argv[2:]
    with (here / "starts.jsonl").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    if (here / "broken").exists():
        sys.exit("ValueError: no such model")
    fake = FakeVllm()
    if (here / "dies").exists():
        (here / "dies").unlink()
        fake.dies_after, fake.exits = 2, True
    server = _UnixServer(arguments[arguments.index("--uds") + 1], _handler(fake))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
