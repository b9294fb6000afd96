"""Attention of the last token of each sequence to keys and values that generation keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isthmus.engine.layers.sequence_states import BatchStates


@dataclass(frozen=True, slots=True)
class KeyValueCache:
    """Keys and values of a layer, [slots, G, capacity, D]; with a window or chunks as many as these have tokens.

    The token at position p is in column p modulo the capacity.
    """

    batch: BatchStates
    layer: int
    window: int | None
    chunk: int | None

    @property
    def capacity(self) -> int:
        return min(self.batch.states.capacity, self.window or self.chunk or self.batch.states.capacity)

    def _tensors(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        states, capacity = self.batch.states, self.capacity
        return (
            states.tensor(self.layer, "keys", (k.size(1), capacity, k.size(2)), k),
            states.tensor(self.layer, "values", (v.size(1), capacity, v.size(2)), v),
        )

    def fill(self, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> None:
        """Keep the keys [T, G, D] and values [T, G, Dv] of new sequences."""
        capacity = self.capacity
        for cache, x in zip(self._tensors(k, v), (k, v), strict=True):
            for slot, sample in enumerate(x.split(lengths)[: self.batch.sequences], start=self.batch.first):
                first = max(0, len(sample) - capacity)
                columns = torch.arange(first, len(sample), device=x.device) % capacity
                cache[slot].index_copy_(1, columns, sample[first:].transpose(0, 1))

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add the keys [n, G, D] and values [n, G, Dv] of a token of each sequence."""
        rows = torch.arange(len(k), device=k.device)
        for cache, x in zip(self._tensors(k, v), (k, v), strict=True):
            cache[rows, :, positions % self.capacity] = x

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[n, G * R * Dv] of queries [n, G, R, D]; ``k`` and ``v`` are those of :meth:`append`."""
        columns = min(self.batch.longest, self.capacity)
        keys, values = (cache[: len(q), :, :columns] for cache in self._tensors(k, v))
        last = positions if self.chunk is None else positions % self.chunk
        seen = (torch.arange(columns, device=q.device) <= last[:, None])[:, None, None]
        if softcap is None and sinks is None:
            return scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale).flatten(1)
        scores = (q @ keys.mT).to(torch.promote_types(q.dtype, torch.float32)) * (scale or q.size(-1) ** -0.5)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = sinks.to(scores.dtype).view(*q.shape[1:3], 1).expand(*q.shape[:3], 1)
            scores = torch.cat((scores, logits), dim=-1)
        return (scores.softmax(-1)[..., :columns].to(v.dtype) @ values).flatten(1)
