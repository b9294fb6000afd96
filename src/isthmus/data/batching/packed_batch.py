"""A micro batch: samples packed end to end in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """T tokens of whole samples end to end ("thd"), without a batch dimension.

    Under context parallelism a rank's batch has its T / cp tokens of the packed sequence; ``lengths`` and everything
    else that is per sample still describe the whole sequence.
    """

    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T], restarting at 0 in each sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample, on the host so that no layer waits for the device; padding is one more, at the end."""
    padding: int = 0
    """Tokens of padding at the end."""
    labels: Tensor | None = None
    """int64 [T], already shifted, 0 where there is no loss; None for inference."""
    loss_mask: Tensor | None = None
    """bool [T], True where the label counts in the loss."""
    loss_tokens: tuple[int, ...] = ()
    """Labels that count in the loss, for each of ``lengths``."""
    sample_ids: tuple[int, ...] = ()
    """Index of each sample in its store."""
    reference_logps: Tensor | None = None
    """float64 [num_samples], log-probability of each sample under the reference model (preference training)."""
    sample_weights: tuple[float, ...] = ()
    """For each of ``lengths``, what it adds to the denominator of the mean loss; set by the training step."""
    spans: tuple[tuple[int, int], ...] | None = None
    """Under context parallelism, the ranges [start, end) of the packed sequence that this rank has."""

    @classmethod
    def for_inference(cls, samples: Sequence[Tensor]) -> PackedBatch:
        """Pack token sequences, int64 [n] each, without labels."""
        lengths = tuple(sample.numel() for sample in samples)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(input_ids=torch.cat(list(samples)), position_ids=positions.to(samples[0].device), lengths=lengths)

    @property
    def sample_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, without the padding."""
        return self.lengths[:-1] if self.padding else self.lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without the padding."""
        return sum(self.sample_lengths)

    @property
    def num_loss_tokens(self) -> int:
        """Labels that count in the loss."""
        return sum(self.loss_tokens)
