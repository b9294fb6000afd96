"""Rollouts by vLLM servers: token ids in, token ids and log-probabilities out, and verified weights.

Rank 0 talks to the servers; the other ranks get its results as tensors.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from isthmus.config.schema import RunConfig
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Answer, Decoding
from isthmus.engine.parallel.process_groups import agree, on_rank_0
from isthmus.errors import Hang, UsageError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.rollout.engines import PendingAnswers
from isthmus.recipes.rollout.routed_experts import SERVER_OPTION, RouterShapes, replay_shapes
from isthmus.recipes.rollout.vllm_group import GroupTransfer
from isthmus.recipes.rollout.vllm_requests import AnswerRequests, broadcast, completion_request, parsed_answer
from isthmus.recipes.rollout.vllm_server import (
    GROUP_OPTION,
    ServerLost,
    StartedServer,
    VllmServer,
    how_to_start,
)
from isthmus.recipes.rollout.vllm_settings import ServerFeatures, check_server, server_arguments
from isthmus.recipes.rollout.vllm_weights import ServedWeights, full_tensors, has_adapter

_WAIT_S = 0.1
"""Between the collectives of ranks that wait for answers."""
_REQUESTS = 128
"""Requests at a time to a server; it makes batches of them."""
_ALL_FEATURES = ServerFeatures(returns_experts=True, joins_groups=True)
_MOST_RESTARTS = 2
"""Restarts of a server in a generation."""


@dataclass(slots=True)
class _ServedAnswers:
    """Answers that servers generate; rank 0 has the requests."""

    requests: AnswerRequests | None
    prompt_lengths: Sequence[int]
    device: torch.device
    shapes: RouterShapes | None
    """Sizes of their experts, if training replays these."""
    seconds: float = 0.0

    def wait(self, check: Callable[[], None]) -> list[Answer]:
        """The answers; see :meth:`PendingAnswers.wait`.

        Raises:
            Hang: no answer within ``rollout.timeout_s``, or no server is left.
            DataError: a server returns something else than an answer.
        """
        requests, started_s = self.requests, time.monotonic()
        try:
            while True:
                ended = torch.tensor([float(requests is not None and requests.wait(_WAIT_S))], device=self.device)
                dist.broadcast(ended, src=0)
                if ended:
                    break
                check()
            agree(lambda: None if requests is None else requests.raise_error())
        finally:
            if requests is not None:
                requests.cancel()
        self.seconds = time.monotonic() - started_s if requests is None else requests.seconds
        answers = [] if requests is None else requests.complete()
        return broadcast(answers, self.prompt_lengths, self.device, self.shapes)


@dataclass(kw_only=True, slots=True)
class VllmEngine:
    """Answers of vLLM servers; methods are collectives, as :class:`~isthmus.recipes.rollout.engines.RolloutEngine`."""

    overlaps_training: ClassVar[bool] = True
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
    shapes: RouterShapes | None = None
    """Sizes of the experts that servers return with answers; None: they are not replayed."""
    _weights: ServedWeights | None = None
    """Those that the servers have."""
    _lost: set[VllmServer] = field(default_factory=set)
    """Without the present weights."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _requests: AnswerRequests | None = None
    """The last ones, on rank 0."""
    _closed: bool = False
    _features: ServerFeatures = _ALL_FEATURES
    """What all running servers can do."""
    _group: GroupTransfer | None = None
    """For weights that go through process groups; None: through files."""

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
            servers = [StartedServer(server_arguments(config, model), folder.absolute() / "vllm.log")]
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
        engine._agree_on_replay(replay_shapes(config, model.plan.architecture))
        engine._agree_on_transfer()
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
        assert self._requests is None or not self._requests.is_running, "servers generate with the weights before"
        if self._group is not None:
            self._update_through(self._group, step)
            return
        weights = ServedWeights.export(step, self.folder, self.config, self.model, self.tokenizer, self.inference)
        previous, self._weights = self._weights, weights
        on_rank_0(lambda: self._update(previous), "weights of vLLM")

    def _update_through(self, transfer: GroupTransfer, step: int) -> None:
        on_rank_0(lambda: transfer.start(self.servers, self._deadline), "groups with vLLM")
        hashes: Mapping[str, str] = {}
        deadline, tensors = self._deadline, full_tensors(self.model)
        if self.model.position.rank == 0:
            hashes = transfer.send(tensors, deadline)
        else:
            for _ in tensors:  # this rank sends its parts to rank 0
                pass
        self._weights = ServedWeights.measured(step, self.model, self.inference, None, hashes)
        on_rank_0(lambda: self._finish(transfer), "weights of vLLM")

    def _finish(self, transfer: GroupTransfer) -> None:
        assert self._weights is not None
        deadline, self._lost = self._deadline, set()
        for server in self.servers:
            try:
                self._weights.verify(server, transfer.finish(server, deadline), deadline)
            except ServerLost as error:
                self._leave_out(server, error)
        self._check_any()

    def start(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], decoding: Decoding) -> PendingAnswers:
        """Request answers; see :meth:`RolloutEngine.start`. The time limit is that of the last answer."""
        requests: AnswerRequests | None = None
        if self.model.position.rank == 0:
            weights = self._weights
            assert weights is not None
            pairs = zip(prompts, numbers, strict=True)
            bodies = [completion_request(weights, prompt, number, decoding) for prompt, number in pairs]
            requests = AnswerRequests(bodies, numbers, self._ask, self._deadline, _REQUESTS * len(self.servers))
            self._requests = requests
        return _ServedAnswers(requests, [len(prompt) for prompt in prompts], self.device, self.shapes)

    def close(self) -> None:
        """End the server of this run and remove the weights."""
        self._closed = True
        if self._group is not None:
            self._group.close()
        if self._requests is not None:
            self._requests.cancel()
        for server in self.servers:
            server.close()
        if self.model.position.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _update(self, previous: ServedWeights | None) -> None:
        assert self._weights is not None
        deadline, self._lost = self._deadline, set()
        for server in self.servers:
            self._load_or_lose(server, deadline)
        self._check_any()
        if previous is None:  # of a run that was killed
            for path in self.folder.iterdir():
                if path != self._weights.folder:
                    shutil.rmtree(path, ignore_errors=True)
        elif previous.folder is not None:
            shutil.rmtree(previous.folder, ignore_errors=True)

    def _load_or_lose(self, server: VllmServer, deadline: float) -> None:
        """Give the weights to a server; one that does not answer is left out, or restarted if this run started it."""
        try:
            if not isinstance(server, StartedServer) or server.is_running:
                self._load(server, deadline)
                return
        except ServerLost as error:
            if not isinstance(server, StartedServer):
                self._leave_out(server, error)
                return
            self.log(f"warning: {error}. It is started again.")
        self._start(server, deadline)

    def _leave_out(self, server: VllmServer, error: ServerLost) -> None:
        self.log(f"warning: {error}. It gets no requests until the next weights.")
        self._lost.add(server)

    def _start(self, server: VllmServer, deadline: float) -> None:
        assert isinstance(server, StartedServer) and self._weights is not None and self._weights.folder is not None
        server.start(self.model.plan.source.path if self._weights.is_adapter else self._weights.folder, deadline)
        try:
            self._check(server)
            self._load(server, deadline)
        except ServerLost as error:
            raise Hang(f"{error}, after its start. Its output is in {self.folder.parent / 'vllm.log'}.") from error

    def _load(self, server: VllmServer, deadline: float) -> None:
        assert self._weights is not None
        self._weights.load(server, deadline)

    def _check_running(self) -> None:
        for server in self.servers:
            if not isinstance(server, StartedServer):
                all_others, features = self._features, self._check(server)
                self._features = ServerFeatures(
                    returns_experts=all_others.returns_experts and features.returns_experts,
                    joins_groups=all_others.joins_groups and features.joins_groups,
                )

    def _check(self, server: VllmServer) -> ServerFeatures:
        return check_server(server, self.config, self.model.plan, self.tokenizer, self._deadline)

    def _agree_on_replay(self, shapes: RouterShapes | None) -> None:
        """Replay the experts of the servers if all of them return these; a collective."""
        if shapes is None:
            return
        # A run starts its own servers with the option only for true: without Triton, as on a CPU, vLLM refuses it.
        rollout = self.config.rollout
        returns = self._features.returns_experts if rollout.url else rollout.router_replay is True
        if self._of_rank_0(returns):
            self.shapes = shapes
            self.log("router replay: training computes each token with the experts that vLLM chose")
        else:
            self.log(f"no router replay: vLLM returns no experts without {SERVER_OPTION}")

    def _agree_on_transfer(self) -> None:
        """Choose between files and process groups; a collective."""
        rollout, timeouts = self.config.rollout, self.config.parallel
        if rollout.transfer == "files" or not rollout.url:
            return
        is_requested = rollout.transfer == "group"
        if has_adapter(self.config, self.model):
            if is_requested:
                raise UsageError(
                    "rollout.transfer=group: servers get the adapter of this run alone, which vLLM reads from files. "
                    "Set rollout.transfer=files or auto."
                )
            return
        if self._of_rank_0(is_requested or (self.device.type != "cpu" and self._features.joins_groups)):
            self._group = GroupTransfer(self.device, rollout.timeout_s, timeouts.timeout_s / 2)
            self.log("weights go to vLLM through process groups")
        elif self.device.type != "cpu":
            self.log(f"weights go to vLLM through files; through process groups with {GROUP_OPTION}")

    def _of_rank_0(self, value: bool) -> bool:
        """The value of rank 0, on all ranks; a collective."""
        flag = torch.tensor([float(value)], device=self.device)
        dist.broadcast(flag, src=0)
        return bool(flag)

    def _ask(self, body: dict[str, Any], number: int, asked: Callable[[VllmServer], None], deadline: float) -> Answer:
        """An answer, of another server or a restarted one if a server is lost."""
        for _ in range(len(self.servers) + _MOST_RESTARTS):
            server = self._server(number)
            asked(server)
            starts = server.starts if isinstance(server, StartedServer) else 0
            try:
                reply = server.post("/v1/completions", body, deadline)
                return parsed_answer(server.name, reply, body, self.model.plan.architecture.vocab_size, self.shapes)
            except ServerLost as error:
                lost = error
                with self._lock:
                    if self._closed:
                        raise
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
