"""A micro batch: one packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isthmus.data.batching.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """What the dropout masks of a micro batch in one step are computed from."""

    seed: int
    """Key of the micro batch, for kernels that draw their own masks."""
    tokens: Tensor
    """int64 [T], a random key of each token of the whole packed sequence."""


@dataclass(frozen=True, slots=True)
class SamplingKeys:
    """What random tokens of a micro batch are computed from."""

    temperature: float
    tokens: Tensor
    """int64 [T], a random key of each token of the whole packed sequence."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable ones that have this probability together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """What the loss on generated answers needs besides their tokens.

    Log-probabilities are float64 [T] of the whole packed sequence, at the place of the token before (as ``labels``),
    zero where there is no loss, at ``temperature``.
    """

    temperature: float
    """The logits are divided by it."""
    advantages: Tensor
    """float64 [samples without padding]"""
    weights: Tensor
    """float64 [samples without padding], 0 for answers without a loss, else 1."""
    sampling_logps: Tensor
    """As computed in generation."""
    policy_logps: Tensor | None = None
    """Log-probabilities of the weights that generated, as computed by training; None: they are ``old_logps``."""
    old_logps: Tensor | None = None
    """As computed by training before the first update on these answers; None in that update."""
    reference_logps: Tensor | None = None
    """Under the reference policy; None without a KL divergence."""
    total_tokens: int = 0
    """Loss tokens of the answers with weight 1 in the global batch of this update; for an entropy bonus."""
    total_answers: int = 0
    """Answers in the global batch of this update, of any weight; for an entropy bonus."""


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Groups of tokens of a micro batch whose expert load is balanced."""

    group_ids: Tensor
    """int64 [T], the group of each token of this rank; ``number`` for padding."""
    lengths: Tensor
    """float32 [S], tokens of each group on all ranks, at least 1."""
    weights: Tensor
    """float32 [S], each group's part of the denominator of the mean loss."""

    @property
    def number(self) -> int:
        """S"""
        return self.lengths.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """T tokens of whole samples ("thd" layout), without a batch dimension.

    Under context parallelism a rank has T / cp tokens of the packed sequence; per-sample fields describe the whole
    sequence.
    """

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 in each sample, and in each document unless ``data.reset_position_ids`` is off."""
    lengths: tuple[int, ...]
    """Tokens of each sample, or of each document in samples that cross documents; on the host to avoid device syncs.
    Padding is the last one."""
    padding: int = 0
    """Padding tokens at the end."""
    labels: Tensor | None = None
    """int64 [T], shifted, 0 without loss; None for inference."""
    loss_mask: Tensor | None = None
    """bool [T]."""
    loss_tokens: tuple[int, ...] = ()
    """Number of loss tokens of each sample in ``lengths``."""
    sample_ids: tuple[int, ...] = ()
    """Index in the store of the sample of each of ``lengths`` without padding."""
    reference_logps: Tensor | None = None
    """float64 [num_samples], log-probabilities under the reference model (DPO, KTO)."""
    values: tuple[float, ...] = ()
    """Label of each answer (KTO: 1 is desirable, 0 is not) or margin of its pair (reward)."""
    mismatched: PackedBatch | None = None
    """The same prompts, each with the answer to another one, for the KL divergence of KTO."""
    sample_weights: tuple[float, ...] = ()
    """Part of each of ``lengths`` in the denominator of the mean loss; set by the training step."""
    spans: tuple[tuple[int, int], ...] | None = None
    """Under context parallelism, this rank's ranges [start, end) of the packed sequence."""
    dropout: DropoutKeys | None = None
    """Set by the training step of a model with dropout."""
    sampling: SamplingKeys | None = None
    """Set to draw random tokens."""
    teacher: Any = None
    """Set by the training step of distillation on the last pipeline stage: the engine's ``TeacherOutput``."""
    rollout: RolloutBatch | None = None
    """What the loss on generated answers (GRPO) needs."""
    shared: SharedPrefixes | None = None
    """Tokens that the layers compute once; None: they compute all."""
    routed_experts: Tensor | None = None
    """int16 [T, layers, K] of the whole packed sequence, the experts that a rollout chose; -1 and None: the routers
    choose. The decoder replaces it by the rows that this rank computes."""
    states: Any = None
    """Set by generation: the engine's ``BatchStates`` of the samples, which continue earlier batches. Each rank of
    context parallelism has all tokens then."""
    token_groups: tuple[TokenGroups, TokenGroups] | None = None
    """The samples, and the whole batch as one group; set in training by a model with experts."""

    @classmethod
    def for_inference(cls, samples: Sequence[Tensor]) -> PackedBatch:
        """Pack token sequences, int64 [n] each, without labels."""
        lengths = tuple(sample.numel() for sample in samples)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(input_ids=torch.cat(list(samples)), position_ids=positions.to(samples[0].device), lengths=lengths)

    @classmethod
    def for_training(cls, samples: Sequence[Tensor], loss_masks: Sequence[Tensor] | None = None) -> PackedBatch:
        """Pack token sequences, int64 [n] each, to predict each token from those before it in its sample.

        ``loss_masks`` (bool [n] each) selects the tokens with loss; default: all but the first of a sample.
        """
        if loss_masks is None:
            loss_masks = [torch.ones_like(sample, dtype=torch.bool) for sample in samples]
        loss_mask = torch.cat([mask[1:] for mask in loss_masks])
        loss_tokens = tuple(int(mask[1:].sum()) for mask in loss_masks)
        return replace(
            cls.for_inference([sample[:-1] for sample in samples]),
            labels=torch.cat([sample[1:] for sample in samples]) * loss_mask,
            loss_mask=loss_mask,
            loss_tokens=loss_tokens,
            sample_weights=loss_tokens,
            sample_ids=tuple(range(len(samples))),
        )

    def layer_inputs(self) -> PackedBatch:
        """The batch with ids and positions of the U rows that layers compute; see :class:`SharedPrefixes`."""
        if self.shared is None:
            return self
        return replace(self, input_ids=self.layer_rows(self.input_ids), position_ids=self.layer_rows(self.position_ids))

    def layer_rows(self, tokens: Tensor) -> Tensor:
        """The rows [U, ...] that layers compute of [T, ...]."""
        return tokens if self.shared is None else self.shared.select(tokens)

    @property
    def num_rows(self) -> int:
        """Tokens that layers compute, with padding."""
        return self.input_ids.numel() if self.shared is None else self.shared.num_rows

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """``lengths`` without padding."""
        return self.lengths[:-1] if self.padding else self.lengths

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return sum(self.sample_lengths)

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens of all samples."""
        return sum(self.loss_tokens)
