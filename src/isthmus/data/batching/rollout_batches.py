"""Prompts in the order of training, and micro batches of generated answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.data.batching.batches import AnswerBatches, Batches, BatchSettings, BatchShard
from isthmus.data.batching.bins import SingleItems
from isthmus.data.batching.packed_batch import PackedBatch, RolloutBatch
from isthmus.data.batching.shared_prefixes import SharedPrefixes, find_shared_prefixes
from isthmus.data.store.mixture import MixtureSet
from isthmus.data.store.sample_store import SampleStore

Float64 = npt.NDArray[np.float64]
RoutedExperts = npt.NDArray[Any]
"""uint8 or uint16 [tokens - 1, layers, K] of prompt and answer: all tokens but the last are inputs of training."""


class PromptBatches(Batches):
    """Prompts, each with ``group_size`` answers of at most ``answer_tokens``; ``global_batch_size`` counts answers."""

    store: SampleStore

    def __init__(
        self,
        store: SampleStore,
        settings: BatchSettings,
        shard: BatchShard | None = None,
        *,
        shares: Sequence[MixtureSet] = (),
        group_size: int,
        answer_tokens: int,
    ) -> None:
        super().__init__(store, settings, shard, shares=shares)
        self.group_size = group_size
        self.answer_tokens = answer_tokens

    @property
    def sequences_per_epoch(self) -> int:
        """Answers to the prompts of all sets."""
        return super().sequences_per_epoch * self.group_size

    @property
    def tokens_per_step(self) -> float:
        """Mean over an epoch, if all answers have ``answer_tokens``."""
        return super().tokens_per_step * self.group_size + self.answer_tokens * self.global_batch_size

    def prompt(self, position: int) -> int:
        """The sample of the store that is the prompt at a position of the order of training."""
        return self._samples(self._order.at(position))[0]

    def step(self, step_index: int) -> list[PackedBatch]:
        """The prompts of this rank in step ``step_index``, without answers."""
        prompts = -(-self.global_batch_size // self.group_size)
        return self._distribute([[self.prompt(step_index * prompts + k)] for k in range(prompts)])

    def _sequences(self, first: int, end: int) -> SingleItems:
        return SingleItems(first, end)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedAnswers:
    """Answers to prompts, with what their loss needs. Lists are by answer."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    advantages: Float64
    """[answers]"""
    weights: Float64
    """[answers], 0 without a part in the loss, else 1."""
    sampling_logps: Sequence[Float64]
    """[tokens of the answer] each, as computed in generation."""
    policy_logps: Sequence[Float64] | None = None
    """Log-probabilities of the weights that generated, as computed in training; None: they are ``old_logps``."""
    old_logps: Sequence[Float64] | None = None
    reference_logps: Sequence[Float64] | None = None
    routed_experts: Sequence[RoutedExperts] | None = None
    """The experts that the engine chose, which training chooses too; None: the routers choose."""

    def store(self) -> SampleStore:
        """Prompts with their answers, whose tokens have loss."""
        pairs = zip(self.prompts, self.answers, strict=True)
        samples = [([*prompt, *answer], [0] * len(prompt) + [1] * len(answer)) for prompt, answer in pairs]
        return SampleStore.from_samples(samples)


class RolloutBatches(AnswerBatches):
    """Micro batches of generated answers, in their order."""

    store: SampleStore

    def __init__(
        self, rollout: GeneratedAnswers, temperature: float, settings: BatchSettings, shard: BatchShard
    ) -> None:
        balanced = settings.packing and not settings.share_prefixes  # else answers to one prompt stay together
        super().__init__(rollout.store(), replace(settings, shuffle=False, packing=balanced), shard)
        self._rollout, self._temperature = rollout, temperature

    def step(self, step_index: int) -> list[PackedBatch]:
        """This rank's micro batches of update ``step_index``, with the totals of the update."""
        size = self.global_batch_size
        weights = self._rollout.weights[step_index * size : (step_index + 1) * size]
        lengths = [len(answer) for answer in self._rollout.answers[step_index * size : (step_index + 1) * size]]
        totals: dict[str, Any] = {"total_tokens": int(np.dot(weights > 0, lengths)), "total_answers": len(weights)}

        def with_totals(batch: PackedBatch) -> PackedBatch:
            assert batch.rollout is not None
            return replace(batch, rollout=replace(batch.rollout, **totals))

        return list(map(with_totals, super().step(step_index)))

    def _shared_prefixes(self, samples: list[int], inputs: list[npt.NDArray[Any]], total: int) -> SharedPrefixes | None:
        routed = self._rollout.routed_experts
        experts = None if routed is None else [routed[sample] for sample in samples]
        return find_shared_prefixes(inputs, total, self.shard.pad_to_multiple_of, experts)

    def _routed_experts(self, samples: list[int], total: int) -> torch.Tensor | None:
        """int16 [T, layers, K], -1 for padding; None: the routers choose."""
        routed = self._rollout.routed_experts
        if routed is None:
            return None
        experts = torch.full((total, *routed[0].shape[1:]), -1, dtype=torch.int16)
        start = 0
        for sample in samples:
            experts[start : start + len(routed[sample])] = torch.from_numpy(routed[sample].astype(np.int16))
            start += len(routed[sample])
        return experts

    def _pack(self, samples: list[int], total: int) -> PackedBatch:
        batch, rollout = super()._pack(samples, total), self._rollout
        assert batch.loss_mask is not None

        def at_tokens(logps: Sequence[Float64]) -> torch.Tensor:
            values = torch.zeros(total, dtype=torch.float64)
            values[batch.loss_mask] = torch.from_numpy(np.concatenate([np.empty(0), *(logps[k] for k in samples)]))
            return values

        return replace(
            batch,
            routed_experts=self._routed_experts(samples, total),
            rollout=RolloutBatch(
                temperature=self._temperature,
                advantages=torch.from_numpy(rollout.advantages[samples]),
                weights=torch.from_numpy(rollout.weights[samples]),
                sampling_logps=at_tokens(rollout.sampling_logps),
                policy_logps=None if rollout.policy_logps is None else at_tokens(rollout.policy_logps),
                old_logps=None if rollout.old_logps is None else at_tokens(rollout.old_logps),
                reference_logps=None if rollout.reference_logps is None else at_tokens(rollout.reference_logps),
            ),
        )
