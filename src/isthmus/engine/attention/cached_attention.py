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

    The token at position p is in column p modulo the capacity. Latent vectors are keys whose first channels are the
    values.
    """

    batch: BatchStates
    layer: int
    window: int | None
    chunk: int | None
    value_channels: int | None = None
    """Channels of the keys that are the values; None: values are tensors of their own."""

    @property
    def capacity(self) -> int:
        return min(self.batch.states.capacity, self.window or self.chunk or self.batch.states.capacity)

    def _stored(self, k: Tensor, v: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """The tensors of the cache, each with what is new in it."""
        new = {"keys": k} if v is None else {"keys": k, "values": v}
        sizes = {name: (x.size(1), self.capacity, x.size(2)) for name, x in new.items()}
        return [(self.batch.states.tensor(self.layer, name, sizes[name], x), x) for name, x in new.items()]

    def fill(self, k: Tensor, v: Tensor | None, lengths: tuple[int, ...]) -> None:
        """Keep the keys [T, G, D] and values [T, G, Dv] of new sequences; None: the keys have the values."""
        capacity = self.capacity
        for cache, x in self._stored(k, v):
            for slot, sample in enumerate(x.split(lengths)[: self.batch.sequences], start=self.batch.first):
                first = max(0, len(sample) - capacity)
                columns = torch.arange(first, len(sample), device=x.device) % capacity
                cache[slot].index_copy_(1, columns, sample[first:].transpose(0, 1))

    def append(self, k: Tensor, v: Tensor | None, positions: Tensor) -> None:
        """Add the keys [n, G, D] and values [n, G, Dv] of a token of each sequence."""
        rows = self.batch.new_rows(positions, k.size(1), self.capacity)
        for cache, x in self._stored(k, v):
            cache.view(-1, x.size(2)).index_copy_(0, rows, x.reshape(-1, x.size(2)))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        positions: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[n, G * R * Dv] of queries [n, G, R, D]; ``k`` and ``v`` are those of :meth:`append`."""
        columns = min(self.batch.longest, self.capacity)
        keys, *stored_values = (cache[: len(q), :, :columns] for cache, _ in self._stored(k, v))
        values = stored_values[0] if stored_values else keys[..., : self.value_channels]
        # In float32 on a CPU its kernel takes 3 to 11 % more time than plain matmuls for so few queries.
        plain = q.device.type == "cpu" and q.dtype == torch.float32
        if softcap is None and sinks is None and not plain:
            seen = self.batch.seen_columns(positions, columns, self.chunk)
            return scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=scale).flatten(1)
        return self._attend_by_matmuls(q, keys, values, positions, scale or q.size(-1) ** -0.5, softcap, sinks)

    def _attend_by_matmuls(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """:meth:`attend` to keys [n, G, columns, D] and values; batches of matmuls are sequences and groups."""
        groups, columns = keys.shape[1:3]
        mask = self.batch.mask(positions, columns, self.chunk, groups)
        queries, transposed_keys = q.flatten(0, 1), keys.flatten(0, 1).mT
        if softcap is None and q.dtype == mask.dtype:
            scores = torch.baddbmm(mask, queries, transposed_keys, alpha=scale)
        else:
            scores = torch.bmm(queries, transposed_keys).to(mask.dtype) * scale
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            scores = scores + mask
        if sinks is not None:
            logits = sinks.to(scores.dtype).view(1, *q.shape[1:3], 1).expand(len(q), -1, -1, -1).flatten(0, 1)
            scores = torch.cat((scores, logits), dim=-1)
        weights = scores.softmax(-1)
        weights = weights if sinks is None else weights[..., :columns]
        return torch.bmm(weights.to(values.dtype), values.flatten(0, 1)).view(len(q), -1)
