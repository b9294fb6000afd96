"""Losses and tokens of sequences on the last stage, and the random keys of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch, SamplingKeys
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.layers.dropout import hashed
from isthmus.engine.loss.objective import LossOutput, PerToken
from isthmus.engine.parallel.context_parallel import local_tokens


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Random tokens are hashes of the seed, the number of the prompt and the position, in all layouts and batches."""

    temperature: float
    seed: int
    numbers: Sequence[int] = ()
    """Number of the prompt of each sample of a store."""
    top_p: float = 1.0

    def with_keys(self, batch: PackedBatch, numbers: Sequence[int]) -> PackedBatch:
        """The batch with a key of each token; ``numbers`` are those of its samples."""
        lengths = torch.tensor(batch.lengths)
        samples = torch.tensor([*numbers, *(0,) * (len(lengths) - len(numbers))]).repeat_interleave(lengths)
        keys = hashed(hashed(hashed(torch.tensor(self.seed)) + samples) + batch.position_ids)
        return replace(batch, sampling=SamplingKeys(self.temperature, keys, self.top_p))


class _Recorder(ABC):
    """Objective without a loss, which records values of each loss token."""

    samples_per_unit = 1
    sums = ()

    def __init__(self, per_token: PerToken) -> None:
        self.per_token = per_token

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return (0.0,) * len(batch.lengths)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            self.record(losses.cpu().double(), batch)
        return LossOutput(losses.new_zeros(()), 0, 0.0)

    @abstractmethod
    def record(self, values: Tensor, batch: PackedBatch) -> None:
        """Record the values, float64 [2, n], of the loss tokens of a batch."""

    def metrics(self, sums: object, count: float) -> dict[str, float]:
        return {}


class SampleScores(_Recorder):
    def __init__(self, store: SampleStore, per_token: PerToken) -> None:
        super().__init__(per_token)
        self._starts = store.starts.tolist()
        self.scores: Tensor = torch.zeros(2, int(store.lengths.sum()), dtype=torch.float64)
        """[2, total tokens], at the place before that of the token; zero where another rank has them."""

    def record(self, values: Tensor, batch: PackedBatch) -> None:
        assert batch.loss_mask is not None
        starts = [self._starts[sample] for sample in batch.sample_ids]
        places = [start + torch.arange(n) for start, n in zip(starts, batch.sample_lengths, strict=True)]
        positions = torch.cat([*places, torch.zeros(batch.padding, dtype=torch.int64)])
        self.scores[:, local_tokens(positions, batch.spans)[batch.loss_mask]] = values.double()


class LogpRecorder(SampleScores):
    """Records the log-probability of each loss token of the samples of a store, at the temperature of the rollout."""

    def __init__(self, store: SampleStore) -> None:
        super().__init__(store, "policy")
        masks = [store[sample][1].astype(bool) for sample in range(len(store))]
        for mask in masks:
            mask[0] = False  # nothing predicts the first token
        self._places = torch.from_numpy(np.concatenate(masks).nonzero()[0] - 1)

    def gathered(self, device: torch.device) -> Tensor:
        """The log-probabilities of all samples, float64 [loss tokens], on the host; a collective."""
        scores = self.scores[0].to(device)
        dist.all_reduce(scores)
        return -scores.cpu()[self._places]


class NextTokens(_Recorder):
    def __init__(self, ranks: int, slots: int) -> None:
        super().__init__("next_tokens")
        self.values: Tensor = torch.zeros(ranks, 2, slots, dtype=torch.float64)
        """Loss and token of each sequence of a pass by data-parallel rank; zero where another rank has them."""

    def record(self, values: Tensor, batch: PackedBatch) -> None:
        if batch.states is not None and parallel_state.get_context_parallel_rank() == 0:
            self.values[parallel_state.get_data_parallel_rank(), :, : values.size(1)] = values
