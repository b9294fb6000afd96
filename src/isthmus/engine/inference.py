"""Scores and continues token sequences on the parallel model.

There is no cache of keys and values: each new token is a forward pass over all sequences that are not complete, packed.
That is right in every layout, and its cost, (prompt + answer / 2) x answer tokens, is affordable for short answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard
from isthmus.data.batching.packed_batch import PackedBatch, SamplingKeys
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.layers.dropout import dropout_keys
from isthmus.engine.loss.objective import LossOutput
from isthmus.engine.parallel.context_parallel import local_tokens
from isthmus.engine.step import Evaluator
from isthmus.families.architecture import Architecture

Sample = tuple[Sequence[int], int]
"""Tokens, and the number of last tokens to score."""
_Scores = list[tuple[list[float], list[int]]]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to continue a prompt."""

    max_new_tokens: int
    ends: Collection[int] = ()
    """Tokens that end an answer; it includes them."""
    temperature: float = 0.0
    """0: always the most probable token."""
    seed: int = 0
    is_complete: Callable[[Sequence[int]], bool] = lambda answer: False
    """Whether an answer ends after these tokens."""


class _TokenScores:
    """Objective that records loss and most probable token of each loss token."""

    per_token: Literal["scores"] = "scores"
    samples_per_unit = 1
    sums = ()

    def __init__(self, store: SampleStore) -> None:
        self._starts = store.starts.tolist()
        self.scores = torch.zeros(2, int(store.lengths.sum()), dtype=torch.float64)
        """[2, total tokens], at the place before that of the token; zero where another rank has them."""

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return (0.0,) * len(batch.lengths)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        assert batch.loss_mask is not None
        starts = [self._starts[sample] for sample in batch.sample_ids]
        places = [start + torch.arange(n) for start, n in zip(starts, batch.sample_lengths, strict=True)]
        positions = torch.cat([*places, torch.zeros(batch.padding, dtype=torch.int64)])
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            self.scores[:, local_tokens(positions, batch.spans)[batch.loss_mask]] = losses.cpu()
        return LossOutput(losses[0].sum().float(), 0, 0.0)

    def metrics(self, sums: object, count: float) -> dict[str, float]:
        return {}


class Inference:
    """Every rank calls the methods with the same arguments and gets the same results."""

    def __init__(
        self, evaluator: Evaluator, architecture: Architecture, parallel: ParallelConfig, *, batch_tokens: int
    ) -> None:
        """``batch_tokens``: tokens of a packed sequence, unless a sample has more."""
        self._evaluator, self._parallel, self._batch_tokens = evaluator, parallel, batch_tokens
        self._positions = architecture.max_position_embeddings if architecture.embedding.position == "learned" else None

    def score(self, samples: Sequence[Sample]) -> _Scores:
        """Losses of the last tokens of each sample, and the most probable tokens in their places.

        Fewer than all tokens of a sample can be scored.
        """
        return self._score(samples, None)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[int]]:
        """The tokens that continue each prompt (of one token or more)."""
        answers: list[list[int]] = [[] for _ in prompts]
        for step in range(decoding.max_new_tokens):
            texts = {number: [*prompt, *answers[number]] for number, prompt in enumerate(prompts)}
            texts = {number: text for number, text in texts.items() if self._continues(text, answers[number], decoding)}
            if not texts:
                break
            # The label of the last token is unknown, and the loss is not used.
            samples = [([*text, 0], 1) for text in texts.values()]
            sampling = (decoding.temperature, decoding.seed, step) if decoding.temperature else None
            scores = self._score(samples, sampling)
            for number, (_, (token,)) in zip(texts, scores, strict=True):
                answers[number].append(token)
        return answers

    def _continues(self, text: Sequence[int], answer: Sequence[int], decoding: Decoding) -> bool:
        if self._positions is not None and len(text) > self._positions:
            return False
        return not answer or not (answer[-1] in decoding.ends or decoding.is_complete(answer))

    def _score(self, samples: Sequence[Sample], sampling: tuple[float, int, int] | None) -> _Scores:
        """``sampling``: temperature, seed and step, for random tokens."""
        masks = [[0] * (len(tokens) - scored) + [1] * scored for tokens, scored in samples]
        store = SampleStore.from_samples([(tokens, mask) for (tokens, _), mask in zip(samples, masks, strict=True)])
        recorder = _TokenScores(store)
        batches = self._batches(store)
        self._evaluator.evaluate((_with_keys(batch, sampling) for batch in batches.eval_batches()), recorder)
        scores = recorder.scores.to(self._evaluator.device)
        dist.all_reduce(scores)
        losses, tokens = scores[0].tolist(), scores[1].long().tolist()
        ends = (store.starts + store.lengths - 1).tolist()
        return [
            (losses[end - scored : end], tokens[end - scored : end])
            for end, (_, scored) in zip(ends, samples, strict=True)
        ]

    def _batches(self, store: SampleStore) -> Batches:
        parallel = self._parallel
        ranks = parallel_state.get_data_parallel_world_size()
        settings = BatchSettings(
            seq_length=max(self._batch_tokens, int(store.lengths.max()) - 1),
            micro_batch_size=1,
            global_batch_size=ranks * parallel.pp,
            packing=True,
        )
        shard = BatchShard(
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=ranks,
            pad_to_multiple_of=parallel.length_multiple,
            micro_batches_multiple_of=parallel.pp if parallel.vpp > 1 else 1,
        )
        return Batches(store, settings, shard)


def _with_keys(batches: Sequence[PackedBatch], sampling: tuple[float, int, int] | None) -> Sequence[PackedBatch]:
    if sampling is None:
        return batches
    temperature, seed, step = sampling
    keys = [dropout_keys(batch, seed=seed, step=step).tokens for batch in batches]
    return [replace(batch, sampling=SamplingKeys(temperature, key)) for batch, key in zip(batches, keys, strict=True)]


class SharedInference(Inference):
    """Rank 0 calls the methods, in a ``with`` block; the other ranks call :meth:`serve`."""

    _number = 0
    _is_scoring = False
    """The other ranks are in a collective, which a failure of this rank ends."""

    def __enter__(self) -> SharedInference:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_scoring:
            self._share(None)

    def _score(self, samples: Sequence[Sample], sampling: tuple[float, int, int] | None) -> _Scores:
        self._share((samples, sampling))
        self._is_scoring = True
        scores = super()._score(samples, sampling)
        self._is_scoring = False
        return scores

    def serve(self) -> None:
        """Take part in the calls of rank 0 until its block ends."""
        while (request := self._share(None)) is not None:
            super()._score(*request)

    def _share(self, request: Any) -> Any:
        """The request of rank 0. The others wait on the store: rank 0 may load data for longer than a collective."""
        store, key = dist.distributed_c10d._get_default_store(), f"isthmus/inference/{self._number}"
        self._number += 1
        if dist.get_rank() == 0:
            store.set(key, "")
        else:
            store.wait([key], _PATIENCE)
        requests = [request]
        dist.broadcast_object_list(requests, src=0)
        return requests[0]


_PATIENCE = timedelta(days=1)
