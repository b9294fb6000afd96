"""Rollouts by vLLM servers: token ids in, token ids and log-probabilities out, and verified weights.

Rank 0 talks to the servers; the other ranks get its results as tensors. Weights go through safetensors files: each
rank writes its own slices, without a collective (:func:`~isthmus.recipes.model.hf_export.export_hf`). After each
transfer two things are checked: the SHA-256 of each tensor as the server's workers read it, and the log-probabilities
of probe tokens, which depend on what the workers made of the tensors.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.config.schema import RunConfig
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Answer, Decoding
from isthmus.engine.parallel.process_groups import agree, gather_objects, on_rank_0
from isthmus.errors import CheckFailed, DataError, Hang, UsageError, disk_errors, escaped
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader, read_header
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.model.adapter_export import export_adapter
from isthmus.recipes.model.hf_export import export_hf
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.rollout.vllm_plugin.isthmus_vllm import COMPARED_KEYS, tensor_hash
from isthmus.recipes.rollout.vllm_server import (
    EXTENSION,
    ServerLost,
    StartedServer,
    VllmServer,
    how_to_start,
)

_WAIT_S = 0.1
"""Between the collectives of ranks that wait for answers."""
_REQUESTS = 128
"""Requests at a time to a server; it makes batches of them."""
_MOST_RESTARTS = 2
"""Restarts of a server in a generation."""
_PROBE_TOKENS, _PROBES = 32, 2
_LIMITS = {"float32": 1e-3}
"""Largest mean difference between the log-probabilities of probe tokens, by the lower precision of both."""
_LOW_PRECISION_LIMIT = 0.1
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank``."""
_MODEL, _ADAPTER = "policy", "policy-adapter"
"""Names of the served model and of its adapter."""
_TEXT = "Hello World! 12 + 3 = 15, naïve café\n\tdef f(x): return x"
"""On which tokenizers are compared."""


@dataclass(kw_only=True, slots=True)
class VllmEngine:
    """Answers of vLLM servers; methods are collectives, as :class:`~isthmus.recipes.rollout.engines.RolloutEngine`."""

    config: RunConfig
    model: RankModel
    tokenizer: Tokenizer
    inference: Inference
    folder: Path
    """Of the run."""
    device: torch.device
    log: Callable[[str], None]
    servers: list[VllmServer]
    """On rank 0, else empty."""
    _weights: _Weights | None = None
    """Those that the servers have."""
    _lost: set[VllmServer] = field(default_factory=set)
    """Without the present weights."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def build(
        cls,
        config: RunConfig,
        model: RankModel,
        tokenizer: Tokenizer,
        inference: Inference,
        folder: Path,
        log: Callable[[str], None],
        device: torch.device,
    ) -> VllmEngine:
        """Check running servers; a collective. A server of this run is started with the first weights.

        Raises:
            UsageError: a server has another model, tokenizer or settings; or on GPUs there is no ``rollout.url``.
        """
        if not config.rollout.url and device.type != "cpu":
            raise UsageError(
                "rollout.engine=vllm on GPUs needs rollout.url: a server does not share the GPUs of training. "
                + how_to_start("servers on other GPUs")
            )
        servers: list[VllmServer] = [VllmServer(url) for url in config.rollout.url]
        if not servers:
            servers = [StartedServer(_arguments(config, model), folder.absolute() / "vllm.log")]
        engine = cls(
            config=config,
            model=model,
            tokenizer=tokenizer,
            inference=inference,
            folder=folder.absolute() / "vllm",
            device=device,
            log=log,
            servers=servers if model.position.rank == 0 else [],
        )
        on_rank_0(engine._check_running, "vLLM servers")
        return engine

    @property
    def _deadline(self) -> float:
        return time.monotonic() + self.config.rollout.timeout_s

    def update_weights(self, step: int) -> None:
        """Give the weights after ``step`` to all servers.

        Raises:
            CheckFailed: a server has another tensor, or computes other log-probabilities with them.
            Hang: a server takes longer than ``rollout.timeout_s``, or none answers.
        """
        if self._weights is not None and self._weights.step == step:
            return
        is_adapter = has_adapter(self.config, self.model)
        folder = self.folder / f"{'adapter' if is_adapter else 'weights'}-{step:07d}"
        with disk_errors(folder):
            self.folder.mkdir(exist_ok=True)
        if is_adapter:
            export_adapter(self.model, self.config, folder)
        else:
            export_hf(self.model, folder, self.tokenizer, dtype=self.model.dtype, replace=True)
        probes = probe_samples(self.model.plan.architecture.vocab_size)
        logps = [[-loss for loss in losses] for losses, _ in self.inference.score(probes)]
        weights = _Weights(step, folder, is_adapter, file_hashes(folder), [tokens for tokens, _ in probes], logps)
        previous, self._weights = self._weights, weights
        on_rank_0(lambda: self._update(previous), "weights of vLLM")

    def generate(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], decoding: Decoding, check: Callable[[], None]
    ) -> list[Answer]:
        """Answers of the servers, see :meth:`RolloutEngine.generate`.

        Raises:
            Hang: no answer within ``rollout.timeout_s``, or no server is left.
            DataError: a server returns something else than an answer.
        """
        generation: _Generation | None = None
        if self.model.position.rank == 0:
            bodies = [self._request(prompt, n, decoding) for prompt, n in zip(prompts, numbers, strict=True)]
            generation = _Generation(bodies, numbers, self._ask, self._deadline, _REQUESTS * len(self.servers))
        try:
            while True:
                ended = torch.tensor([float(generation is not None and generation.wait(_WAIT_S))], device=self.device)
                dist.broadcast(ended, src=0)
                if ended:
                    break
                check()
            agree(lambda: None if generation is None else generation.raise_error())
        finally:
            if generation is not None:
                generation.cancel()
        return _broadcast([] if generation is None else generation.complete(), len(prompts), self.device)

    def close(self) -> None:
        """End the server of this run and remove the weights."""
        for server in self.servers:
            server.close()
        if self.model.position.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _update(self, previous: _Weights | None) -> None:
        assert self._weights is not None
        deadline, self._lost = self._deadline, set()
        for server in self.servers:
            self._load_or_lose(server, deadline)
        self._check_any()
        if previous is None:  # of a run that was killed
            for path in self.folder.iterdir():
                if path != self._weights.folder:
                    shutil.rmtree(path, ignore_errors=True)
        else:
            shutil.rmtree(previous.folder, ignore_errors=True)

    def _load_or_lose(self, server: VllmServer, deadline: float) -> None:
        """Give the weights to a server; one that does not answer is left out, or restarted if this run started it."""
        try:
            if not isinstance(server, StartedServer) or server.is_running:
                self._load(server, deadline)
                return
        except ServerLost as error:
            if not isinstance(server, StartedServer):
                self.log(f"warning: {error}. It gets no requests until the next weights.")
                self._lost.add(server)
                return
            self.log(f"warning: {error}. It is started again.")
        self._start(server, deadline)

    def _start(self, server: VllmServer, deadline: float) -> None:
        assert isinstance(server, StartedServer) and self._weights is not None
        server.start(self.model.plan.source.path if self._weights.is_adapter else self._weights.folder, deadline)
        try:
            self._check(server)
            self._load(server, deadline)
        except ServerLost as error:
            raise Hang(f"{error}, after its start. Its output is in {self.folder.parent / 'vllm.log'}.") from error

    def _load(self, server: VllmServer, deadline: float) -> None:
        """Give the weights to a server, and verify them."""
        weights = self._weights
        assert weights is not None
        if weights.is_adapter:
            replies = server.rpc("isthmus_hashes", str(weights.folder), deadline=deadline)
            body = {"lora_name": weights.model, "lora_path": str(weights.folder), "load_inplace": True}
            server.post("/v1/load_lora_adapter", body, deadline)
        else:
            replies = server.rpc("isthmus_reload", str(weights.folder), deadline=deadline)
        for reply in replies:
            check_hashes(server.name, reply, weights.hashes)
        self._check_probes(server, weights, deadline)

    def _check_probes(self, server: VllmServer, weights: _Weights, deadline: float) -> None:
        differences: list[tuple[float, int, int, float, float]] = []
        for number, (tokens, expected) in enumerate(zip(weights.probes, weights.logps, strict=True)):
            body = {"model": weights.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            reply = server.post("/v1/completions", body | {"cache_salt": weights.salt}, deadline)
            try:
                entries = reply["choices"][0]["prompt_logprobs"][1:]
                logps = [float(entry[str(token)]["logprob"]) for token, entry in zip(tokens[1:], entries, strict=True)]
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{server.name} returns no log-probabilities of a prompt: {escaped(repr(error))}."
                ) from None
            for place, (logp, other) in enumerate(zip(logps, expected, strict=True), start=1):
                differences.append((abs(logp - other), number, place, logp, other))
        mean, (_, number, place, logp, other) = sum(row[0] for row in differences) / len(differences), max(differences)
        limit = _LIMITS.get(str(self.model.dtype).removeprefix("torch."), _LOW_PRECISION_LIMIT)
        if not mean <= limit:  # also NaN
            raise CheckFailed(
                f"{server.name} does not compute with the weights after step {weights.step}: log-probabilities of "
                f"{len(differences)} probe tokens differ by {mean:.3g} on average, at most {limit:g} is expected. The "
                f"largest difference: token {weights.probes[number][place]} at position {place} of probe {number} has "
                f"{logp:.5f}, in training {other:.5f}. Compare its model, its precision and its version of vLLM with "
                "the policy."
            )

    def _check_running(self) -> None:
        for server in self.servers:
            if not isinstance(server, StartedServer):
                self._check(server)

    def _check(self, server: VllmServer) -> None:
        """Raises UsageError if a server does not fit to the policy."""
        deadline, plan, rollout = self._deadline, self.model.plan, self.config.rollout
        try:
            (settings, *_) = server.rpc("isthmus_settings", deadline=deadline)
            models = server.get("/v1/models", deadline)["data"]
            served, longest = str(models[0]["id"]), int(models[0]["max_model_len"])
            tokens = server.post("/tokenize", {"prompt": _TEXT, "model": served, "add_special_tokens": False}, deadline)
            mode, config, model_type = settings["logprobs_mode"], settings["config"], settings["model_type"]
            tokens = tokens["tokens"]
        except ServerLost as error:
            raise UsageError(f"{error}. {how_to_start(server.name)}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{server.name} is not vLLM of a supported version: {escaped(repr(error))}.") from error
        policy = plan.source.config
        differing = [key for key in COMPARED_KEYS if key in policy and config.get(key) != policy[key]]
        if model_type != policy.get("model_type") or differing:
            key = differing[0] if differing else "model_type"
            value = config.get(key) if differing else model_type
            raise UsageError(
                f"{server.name} has another model than the policy: {key} is {escaped(str(value))} there and "
                f"{policy.get(key)} in {plan.source.path}. Start it with that model."
            )
        if tokens != self.tokenizer.encode(_TEXT):
            raise UsageError(
                f"{server.name} has another tokenizer than the policy: it makes other tokens of {_TEXT!r}. Start it "
                f"with the model and tokenizer of {plan.source.path}."
            )
        if longest < self.config.data.seq_length:
            raise UsageError(
                f"{server.name} has --max-model-len {longest}, less than data.seq_length="
                f"{self.config.data.seq_length}. Start it with that length."
            )
        expected = _logprobs_mode(self.config)
        if mode != expected and (rollout.temperature, rollout.top_p) != (1, 1):
            raise UsageError(
                f"{server.name} has --logprobs-mode {escaped(str(mode))}; rollout.temperature={rollout.temperature:g} "
                f"and rollout.top_p={rollout.top_p:g} need {expected}. Start it with that mode."
            )
        if rollout.url and served != _MODEL:
            raise UsageError(
                f"{server.name} serves the name {escaped(served)}. Start it with --served-model-name {_MODEL}."
            )

    def _request(self, prompt: Sequence[int], number: int, decoding: Decoding) -> dict[str, Any]:
        assert self._weights is not None
        return {
            "model": self._weights.model,
            "prompt": [int(token) for token in prompt],
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": answer_seed(decoding.seed, number),
            "stop_token_ids": sorted(decoding.ends),
            "ignore_eos": True,  # decoding.ends has all ends
            "logprobs": 0,  # those of the sampled tokens
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "cache_salt": self._weights.salt,  # cached keys and values of earlier weights are not used
        }

    def _ask(self, body: dict[str, Any], number: int, asked: Callable[[VllmServer], None], deadline: float) -> Answer:
        """An answer, of another server or a restarted one if a server is lost."""
        for _ in range(len(self.servers) + _MOST_RESTARTS):
            server = self._server(number)
            asked(server)
            starts = server.starts if isinstance(server, StartedServer) else 0
            try:
                reply = server.post("/v1/completions", body, deadline)
                return parsed_answer(server.name, reply, body["max_tokens"], self.model.plan.architecture.vocab_size)
            except ServerLost as error:
                lost = error
                with self._lock:
                    if not isinstance(server, StartedServer):
                        if server not in self._lost:
                            self.log(f"warning: {error}. Its answers are made by other servers.")
                            self._lost.add(server)
                    elif server.starts == starts:  # else another thread has started it again
                        self.log(f"warning: {error}. It is started again, and its missing answers are made again.")
                        self._start(server, deadline)
        raise Hang(f"{lost}. It was lost {_MOST_RESTARTS + 1} times in one generation; see its output.") from lost

    def _server(self, number: int) -> VllmServer:
        with self._lock:
            self._check_any()
            servers = [server for server in self.servers if server not in self._lost]
        return servers[number % len(servers)]

    def _check_any(self) -> None:
        if len(self._lost) == len(self.servers):
            names = " and ".join(server.name for server in self.servers)
            raise Hang(
                f"no vLLM server is left: {names} did not answer. Start them again, and resume with the same command."
            )


@dataclass(frozen=True, slots=True)
class _Weights:
    step: int
    folder: Path
    is_adapter: bool
    hashes: Mapping[str, str]
    """SHA-256 by tensor."""
    probes: Sequence[Sequence[int]]
    logps: Sequence[Sequence[float]]
    """Log-probabilities of the probe tokens after the first, in training."""

    @property
    def model(self) -> str:
        """The name for requests."""
        return _ADAPTER if self.is_adapter else _MODEL

    @property
    def salt(self) -> str:
        return self.folder.name


class _Generation:
    """The requests of a generation, made by daemon threads."""

    def __init__(
        self,
        bodies: Sequence[dict[str, Any]],
        numbers: Sequence[int],
        ask: Callable[[dict[str, Any], int, Callable[[VllmServer], None], float], Answer],
        deadline: float,
        threads: int,
    ) -> None:
        self._bodies, self._numbers, self._ask, self._deadline = bodies, numbers, ask, deadline
        self._answers: list[Answer | None] = [None] * len(bodies)
        self._asked: dict[int, VllmServer] = {}
        self._waiting = deque(range(len(bodies)))
        self._error: Exception | None = None
        self._changed = threading.Condition()
        for _ in range(min(len(bodies), threads)):
            threading.Thread(target=self._work, name="vLLM requests", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the generation has ended after so many seconds, with answers or an error."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._error is not None or None not in self._answers, seconds)
            if not ended and time.monotonic() > self._deadline:
                servers = {id(server): server for server in self._asked.values()}.values()
                missing = sum(answer is None for answer in self._answers)
                self._error = next(iter(servers)).late(f"{missing} of {len(self._answers)} requests")
                ended = True
            return ended

    def raise_error(self) -> None:
        """The error that ended the generation, if any."""
        if self._error is not None:
            raise self._error

    def complete(self) -> list[Answer]:
        """All answers."""
        return [answer for answer in self._answers if answer is not None]

    def cancel(self) -> None:
        """Make no further requests."""
        with self._changed:
            self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    return
                index = self._waiting.popleft()
            try:
                asked = partial(self._asked.__setitem__, index)
                answer = self._ask(self._bodies[index], self._numbers[index], asked, self._deadline)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._answers[index] = answer
                self._asked.pop(index, None)
                self._changed.notify_all()


def has_adapter(config: RunConfig, model: RankModel) -> bool:
    """Whether servers get the adapter and keep the base model; else they get all weights, with the adapter merged."""
    lora, plan = config.lora, model.plan
    if plan.adapters is None or plan.existing is not None or config.model.init != "hf":
        return False
    return not (lora.dora or lora.quantize or lora.modules_to_save) and plan.architecture.moe is None


def probe_samples(vocab_size: int) -> list[tuple[list[int], int]]:
    """Random tokens, and the number of last ones to score: all but the first; the same in every run."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (_PROBES, _PROBE_TOKENS), generator=random)
    return [(sample, _PROBE_TOKENS - 1) for sample in tokens.tolist()]


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor in the safetensors files of ``folder``, which are checked; a collective.

    The checksums of the files are those of the tensors in memory, so that a damage of the files is detected too. Each
    rank hashes a part of the tensors.
    """
    hashes: list[dict[str, str]] = []

    def hash_part() -> None:
        verifier = ChecksumVerifier()
        reader = TensorReader(verifier)
        tensors: dict[str, TensorInfo] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= read_header(path, verifier)
        names = sorted(tensors)[dist.get_rank() :: dist.get_world_size()]
        hashes.append({name: tensor_hash(reader.read(tensors[name], name=name)) for name in names})
        reader.close()

    agree(hash_part)
    return {name: value for part in gather_objects(hashes[0]) for name, value in part.items()}


def check_hashes(server: str, reply: Any, expected: Mapping[str, str]) -> None:
    """Compare the hashes of a worker with those of the tensors that it should have; CheckFailed names a tensor."""
    try:
        hashes, missing = dict(reply["hashes"]), list(reply["missing"])
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{server} returns no hashes of its tensors: {escaped(repr(error))}.") from None
    differing = sorted(name for name in expected if hashes.get(name) != expected[name])
    unknown = sorted(hashes.keys() - expected.keys())
    if differing or unknown:
        name, number = (differing or unknown)[0], len(differing) + len(unknown)
        state = "is missing" if name not in hashes else "differs" if differing else "is not a tensor of the policy"
        raise CheckFailed(
            f"{server} has other weights than the policy: the tensor {escaped(name)} {state} ({number} of "
            f"{len(expected)} tensors). Check that it reads the same files: a network file system may return old ones."
        )
    if missing:
        raise CheckFailed(
            f"{server} has not loaded its parameter {escaped(str(missing[0]))} ({len(missing)} parameters): vLLM found "
            "no tensor for it in the weights. Use another version of vLLM, or rollout.engine=native."
        )


def answer_seed(seed: int, number: int) -> int:
    """The seed of an answer, 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") >> 1


def parsed_answer(server: str, reply: Any, max_new_tokens: int, vocab_size: int) -> Answer:
    """The answer in the reply of the completions endpoint; DataError if it has none."""
    try:
        (choice,) = reply["choices"]
        tokens, logps = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        are_tokens = all(type(token) is int and 0 <= token < vocab_size for token in tokens)
        are_logps = all(isinstance(logp, float | int) and math.isfinite(logp) and logp < 1e-3 for logp in logps)
        if not (0 < len(tokens) <= max_new_tokens and len(tokens) == len(logps) and are_tokens and are_logps):
            raise ValueError(f"{len(tokens)} tokens {tokens[:8]}, {len(logps)} log-probabilities {logps[:8]}")
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{server} returns something else than 1 to {max_new_tokens} tokens below {vocab_size} with their "
            f"log-probabilities: {escaped(str(error))[:500]}."
        ) from None
    return Answer(tokens, [float(logp) for logp in logps])


def _broadcast(answers: Sequence[Answer], count: int, device: torch.device) -> list[Answer]:
    """The answers of rank 0, on all ranks."""
    lengths = torch.zeros(count, dtype=torch.int64)
    if answers:
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
    lengths = lengths.to(device)
    dist.broadcast(lengths, src=0)
    tokens = torch.tensor([token for answer in answers for token in answer.tokens], dtype=torch.int64)
    logps = torch.tensor([logp for answer in answers for logp in answer.logps], dtype=torch.float64)
    total = int(lengths.sum())
    values = []
    for local in (tokens, logps):
        tensor = (local if answers else torch.zeros(total, dtype=local.dtype)).to(device)
        dist.broadcast(tensor, src=0)
        values.append([part.tolist() for part in tensor.cpu().split(lengths.tolist())])
    return [Answer(*pair) for pair in zip(*values, strict=True)]


def _logprobs_mode(config: RunConfig) -> str:
    """vLLM's mode that returns log-probabilities at the temperature, among all tokens."""
    return "raw_logprobs" if config.rollout.temperature == 1 else "processed_logprobs"


def _arguments(config: RunConfig, model: RankModel) -> list[str]:
    """Of a server of this run, besides the model."""
    result = ["--served-model-name", _MODEL, "--dtype", str(model.dtype).removeprefix("torch."), "--enforce-eager"]
    result += ["--max-model-len", str(config.data.seq_length), "--logprobs-mode", _logprobs_mode(config)]
    result += ["--generation-config", "vllm", "--worker-extension-cls", EXTENSION]
    if config.model.trust_remote_code:
        result.append("--trust-remote-code")
    if has_adapter(config, model):
        rank = config.lora.rank or 1
        result += ["--enable-lora", "--max-lora-rank", str(next((r for r in _LORA_RANKS if r >= rank), rank))]
    return result
