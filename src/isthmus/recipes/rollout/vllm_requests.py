"""Requests for answers to vLLM servers: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from isthmus.engine.generation.schedule import Answer, Decoding
from isthmus.errors import DataError, escaped
from isthmus.recipes.rollout.routed_experts import RouterShapes
from isthmus.recipes.rollout.vllm_server import VllmServer
from isthmus.recipes.rollout.vllm_weights import ServedWeights


class AnswerRequests:
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
        self.started_s: float = time.monotonic()
        self.seconds: float = 0.0
        """Time until the last answer so far."""
        for _ in range(min(len(bodies), threads)):
            threading.Thread(target=self._work, name="vLLM requests", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether answers are missing that may still come."""
        with self._changed:
            return self._error is None and None in self._answers

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
                self.seconds = time.monotonic() - self.started_s
                self._asked.pop(index, None)
                self._changed.notify_all()


def completion_request(
    weights: ServedWeights, prompt: Sequence[int], number: int, decoding: Decoding
) -> dict[str, Any]:
    """The body of the request for an answer, whose number selects its random tokens."""
    return {
        "model": weights.model,
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
        "cache_salt": weights.salt,  # cached keys and values of earlier weights are not used
    }


def answer_seed(seed: int, number: int) -> int:
    """The seed of an answer, 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") >> 1


def parsed_answer(
    server: str, reply: Any, body: Mapping[str, Any], vocab_size: int, shapes: RouterShapes | None = None
) -> Answer:
    """The answer in the reply of the completions endpoint to a request; DataError if it has none.

    ``shapes`` are those of the experts that belong to it, if they are replayed.
    """
    max_new_tokens = body["max_tokens"]
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
    experts = None
    if shapes is not None:
        experts = shapes.decoded(choice.get("routed_experts"), len(body["prompt"]) + len(tokens), server)
    return Answer(tokens, [float(logp) for logp in logps], experts)


def broadcast(
    answers: Sequence[Answer],
    prompt_lengths: Sequence[int],
    device: torch.device,
    shapes: RouterShapes | None = None,
) -> list[Answer]:
    """The answers of rank 0, on all ranks; a collective. ``shapes`` are those of their experts, if they have any."""
    count = len(prompt_lengths)
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
    result = [Answer(*pair) for pair in zip(*values, strict=True)]
    if shapes is not None:
        counts = [prompt + length - 1 for prompt, length in zip(prompt_lengths, lengths.tolist(), strict=True)]
        experts = np.zeros((sum(counts), shapes.num_layers, shapes.top_k), dtype=shapes.dtype)
        if answers:
            experts[:] = np.concatenate([np.asarray(answer.routed_experts) for answer in answers])
        numbers = torch.from_numpy(experts.view(np.uint8)).to(device)  # no backend has collectives of uint16
        dist.broadcast(numbers, src=0)
        experts = numbers.cpu().numpy().view(shapes.dtype)
        for answer, part in zip(result, np.split(experts, np.cumsum(counts)[:-1]), strict=True):
            answer.routed_experts = part
    return result
