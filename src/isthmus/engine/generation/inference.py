"""Scores and continues token sequences on the parallel model, in any layout.

Each layer keeps the state of its sequences, on the ranks that have the layer. Prompts are packed sequences; then a
forward pass has the last token of each sequence. Its tokens are padded to the multiple that sequence parallelism needs,
and all ranks of context parallelism compute the same. Sequences that are longer than
:attr:`~isthmus.families.architecture.Architecture.longest_with_state` are computed again for each token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.decoder.decoder import Decoder
from isthmus.engine.generation.schedule import Answer, Decoding, RankInputs, Schedule
from isthmus.engine.generation.token_recorders import NextTokens, RandomTokens, SampleScores
from isthmus.engine.layers.sequence_states import BatchStates, SequenceStates
from isthmus.engine.linear.packed_weights import PackedWeights
from isthmus.engine.loss.objective import PerToken
from isthmus.engine.step import Evaluator
from isthmus.families.architecture import Architecture

Sample = tuple[Sequence[int], int]
"""Tokens, and the number of last tokens to score."""
_Scores = list[tuple[list[float], list[int]]]


_FEWEST_SLOTS = 8
"""Sequences at a time, also of more tokens than a packed sequence."""


class Inference:
    """Every rank calls the methods with the same arguments and gets the same results."""

    _states: SequenceStates
    _packed: PackedWeights

    def __init__(
        self,
        evaluator: Evaluator,
        architecture: Architecture,
        parallel: ParallelConfig,
        *,
        batch_tokens: int,
        slots: int | None = None,
    ) -> None:
        """Args:
        evaluator: of the model.
        architecture: of the model.
        parallel: its layout.
        batch_tokens: tokens of a packed sequence, unless a sample has more.
        slots: sequences that a data-parallel rank continues at a time; None: those of a packed sequence, at least 8.
        """
        self._evaluator, self._parallel, self._batch_tokens, self._slots = evaluator, parallel, batch_tokens, slots
        self.stages: list[Any] = evaluator.model
        self.device: torch.device = evaluator.device
        self._positions = architecture.max_position_embeddings if architecture.embedding.position == "learned" else None
        self.longest_with_state: int | None = architecture.longest_with_state
        """Most tokens of a sequence that is not computed again for each token; None: any number."""

    @property
    def decoders(self) -> list[Decoder]:
        """The stages of this rank without their wrappers."""
        return [get_attr_wrapped_model(stage, "decoder", return_model_obj=True) for stage in self.stages]

    def score(self, samples: Sequence[Sample]) -> _Scores:
        """Losses of the last tokens of each sample, and the most probable tokens in their places.

        Fewer than all tokens of a sample can be scored.
        """
        scores: _Scores = self._on_all_ranks("_score", samples, "scores", None)
        return scores

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[int]]:
        """The tokens that continue each prompt (of one token or more)."""
        return [answer.tokens for answer in self.answers(prompts, decoding)]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        numbers: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Continue each prompt (of one token or more).

        Args:
            prompts: token ids.
            decoding: how to choose tokens.
            numbers: of the prompts, which select the random tokens, so that these do not depend on other prompts; None:
                their order.
            check: called after each forward pass; an error of it, on all ranks, ends the generation.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        limit = self.longest_with_state or math.inf
        indices: dict[bool, list[int]] = {True: [], False: []}
        for index, prompt in enumerate(prompts):
            indices[len(prompt) + decoding.max_new_tokens <= limit].append(index)
        answers: dict[int, Answer] = {}
        for has_state, chosen in indices.items():
            group = [prompts[index] for index in chosen]
            random_tokens = RandomTokens(decoding.temperature, decoding.seed, top_p=decoding.top_p)
            sampling = random_tokens if decoding.temperature else None

            def continues(index: int, answer: Answer, group: Sequence[Sequence[int]] = group) -> bool:
                return self._continues(len(group[index]), answer.tokens, decoding)

            schedule = Schedule(group, continues, numbers=[numbers[index] for index in chosen])
            if has_state:
                self._continue(schedule, decoding.max_new_tokens, sampling, check)
            else:
                self._continue_without_states(schedule, sampling, check)
            answers |= dict(zip(chosen, schedule.answers, strict=True))
        return [answers[index] for index in range(len(prompts))]

    def repeat(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Run the forward passes of generation for a known sequence, on all data-parallel ranks the same."""
        ranks = parallel_state.get_data_parallel_world_size()
        self._on_all_ranks("_allocate", 1, len(tokens))
        start = 0
        for end in range(prompt_tokens, len(tokens)):
            inputs = RankInputs(tokens=(tuple(tokens[start:end]),), past=(start,), numbers=(0,))
            self._on_all_ranks("_run_pass", [inputs] * ranks, None)
            start = end
        self._on_all_ranks("_release")

    def _continues(self, prompt_tokens: int, answer: Sequence[int], decoding: Decoding) -> bool:
        if len(answer) == decoding.max_new_tokens:
            return False
        if self._positions is not None and prompt_tokens + len(answer) > self._positions:
            return False
        return not answer or not (answer[-1] in decoding.ends or decoding.is_complete(answer))

    def _continue(
        self, schedule: Schedule, max_new_tokens: int, sampling: RandomTokens | None, check: Callable[[], None]
    ) -> None:
        capacity = max((len(prompt) for prompt in schedule.prompts), default=0) + max_new_tokens
        ranks = parallel_state.get_data_parallel_world_size()
        slots = self._slots or max(_FEWEST_SLOTS, self._batch_tokens // max(1, capacity))
        slots = min(slots, math.ceil(len(schedule.prompts) / ranks))
        schedule.start(ranks, slots, self._batch_tokens)
        inputs = schedule.next_pass()
        if not inputs:
            return
        self._on_all_ranks("_allocate", slots, capacity)
        while inputs:
            schedule.add(self._on_all_ranks("_run_pass", inputs, sampling))
            inputs = schedule.next_pass()
            check()
        self._on_all_ranks("_release")

    def _continue_without_states(
        self, schedule: Schedule, sampling: RandomTokens | None, check: Callable[[], None]
    ) -> None:
        """Compute all tokens of the sequences again for each new token."""
        schedule.start(1, len(schedule.prompts), self._batch_tokens)
        while indices := schedule.next_sequences():
            # The label of the last token is unknown, and not used.
            samples = [([*schedule.prompts[index], *schedule.answers[index].tokens, 0], 1) for index in indices]
            if sampling is not None:
                sampling = replace(sampling, numbers=[schedule.numbers[index] for index in indices])
            scores = self._on_all_ranks("_score", samples, "next_tokens", sampling)
            schedule.add([[(loss, token) for (loss,), (token,) in scores]])
            check()

    def _on_all_ranks(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def _score(self, samples: Sequence[Sample], per_token: PerToken, sampling: RandomTokens | None) -> _Scores:
        masks = [[0] * (len(tokens) - scored) + [1] * scored for tokens, scored in samples]
        store = SampleStore.from_samples([(tokens, mask) for (tokens, _), mask in zip(samples, masks, strict=True)])
        recorder = SampleScores(store, per_token)
        batches = self._batches(store).eval_batches()
        self._evaluator.evaluate((_with_keys(batch, sampling) for batch in batches), recorder)
        scores = recorder.scores.to(self._evaluator.device)
        dist.all_reduce(scores)
        losses, tokens = scores[0].tolist(), scores[1].long().tolist()
        ends = (store.starts + store.lengths - 1).tolist()
        return [
            (losses[end - scored : end], tokens[end - scored : end])
            for end, (_, scored) in zip(ends, samples, strict=True)
        ]

    def _allocate(self, slots: int, capacity: int) -> None:
        multiple = self._parallel.length_multiple  # the padding of a step has slots too
        rows = math.ceil(slots / multiple) * multiple
        self._states = SequenceStates(rows, capacity)
        weights = itertools.chain.from_iterable(decoder.matmul_weights() for decoder in self.decoders)
        self._packed = PackedWeights(weights, rows)

    def _release(self) -> None:
        del self._states, self._packed

    def _run_pass(self, inputs: Sequence[RankInputs], sampling: RandomTokens | None) -> list[list[tuple[float, int]]]:
        """Loss and token of each sequence, by data-parallel rank."""
        rank_inputs, parallel = inputs[parallel_state.get_data_parallel_rank()], self._parallel
        for source, target in rank_inputs.copies:
            self._states.copy(source, target)
        batches = [self._batch(rank_inputs, sampling)]
        if parallel.vpp > 1:  # interleaved stages need several micro batches
            batches += [self._batch(RankInputs(), None)] * (parallel.pp - 1)
        recorder = NextTokens(len(inputs), self._states.slots)
        with contextlib.nullcontext() if rank_inputs.is_prefill else self._packed.used():
            self._evaluator.run_forward(batches, recorder)
        values = recorder.values
        if dist.get_world_size() > 1:  # also alone, gloo waits for its thread
            values = values.to(self._evaluator.device)
            dist.all_reduce(values)
        return [
            [(loss, int(token)) for loss, token in zip(*rank_values, strict=True)][: len(rank.tokens)]
            for rank_values, rank in zip(values.tolist(), inputs, strict=True)
        ]

    def _batch(self, inputs: RankInputs, sampling: RandomTokens | None) -> PackedBatch:
        """The packed sequence of a pass; without sequences it has padding only."""
        lengths = tuple(len(tokens) for tokens in inputs.tokens)
        total, multiple = max(1, sum(lengths)), self._parallel.length_multiple
        padding = math.ceil(total / multiple) * multiple - sum(lengths)
        positions = [range(past, past + n) for past, n in zip(inputs.past, lengths, strict=True)]
        loss_mask = torch.tensor([k == n for n in lengths for k in range(1, n + 1)] + [False] * padding)
        states = None
        if lengths:
            longest = max(past + n for past, n in zip(inputs.past, lengths, strict=True))
            states = BatchStates(self._states, inputs.first, len(lengths), inputs.is_prefill, longest)
        batch = PackedBatch(
            input_ids=torch.tensor([*itertools.chain(*inputs.tokens), *[0] * padding]),
            position_ids=torch.tensor([*itertools.chain(*positions), *[0] * padding]),
            lengths=(*lengths, padding) if padding else lengths,
            padding=padding,
            labels=torch.zeros(len(loss_mask), dtype=torch.int64),
            loss_mask=loss_mask,
            loss_tokens=(1,) * len(lengths),
            sample_ids=tuple(range(len(lengths))),
            states=states,
        )
        return batch if sampling is None else sampling.with_keys(batch, inputs.numbers)

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


def _with_keys(batches: Sequence[PackedBatch], sampling: RandomTokens | None) -> Sequence[PackedBatch]:
    if sampling is None:
        return batches
    return [sampling.with_keys(batch, [sampling.numbers[sample] for sample in batch.sample_ids]) for batch in batches]


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

    def _on_all_ranks(self, method: str, *arguments: Any) -> Any:
        self._share((method, arguments))
        self._is_scoring = True
        result = super()._on_all_ranks(method, *arguments)
        self._is_scoring = False
        return result

    def serve(self) -> None:
        """Take part in the calls of rank 0 until its block ends."""
        while (request := self._share(None)) is not None:
            method, arguments = request
            super()._on_all_ranks(method, *arguments)

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
