"""Dropout with masks that do not depend on the parallel layout.

A mask is a hash of the seed, the step, the layer, the token (sample and position in it) and the channel or head. So all
layouts, micro batch sizes and packings have the same masks, a recomputed or resumed step too, and none has to be saved.
Only PyTorch's attention kernels on GPUs draw their own masks, from a seed per layer and rank (docs/decisions/0027).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from isthmus.data.batching.packed_batch import DropoutKeys, PackedBatch
from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.parallel.context_parallel import local_tokens

EMBEDDING, ATTENTION_OUTPUT, MLP_OUTPUT, _QUERIES, _KEYS, NOISE, EXPERTS = range(7)
"""Places of dropout and noise in a layer. Layers are counted from 1; layer 0 is the embedding."""
_PLACES = 8
_LOW_31 = 0x7FFFFFFF
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of a float."""


def dropout_keys(batch: PackedBatch, *, seed: int, step: int) -> DropoutKeys:
    """The keys of a whole micro batch, on the host."""
    identity = f"{seed}:{step}:{batch.sample_ids}".encode()
    micro_batch_key = int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "little")
    samples, positions = [], []
    for sample, length in lengths_by_sample(batch):
        samples.append(torch.full((length,), sample))
        positions.append(torch.arange(length))
    start = hashed(hashed(torch.tensor(seed)) + step)
    return DropoutKeys(micro_batch_key, hashed(hashed(start + torch.cat(samples)) + torch.cat(positions)))


def lengths_by_sample(batch: PackedBatch) -> Iterator[tuple[int, int]]:
    """(index, tokens) of each sample of the packed sequence, also of one that crosses documents; padding is -1."""
    ids = [*batch.sample_ids, -1] if batch.padding else batch.sample_ids
    for sample, segments in groupby(zip(ids, batch.lengths, strict=True), key=lambda segment: segment[0]):
        yield sample, sum(length for _, length in segments)


def hashed(x: Tensor) -> Tensor:
    """MurmurHash3's 64-bit finalizer, elementwise on int64."""
    x = (x ^ ((x >> 33) & _LOW_31)) * -0xAE502812AA7333
    x = (x ^ ((x >> 33) & _LOW_31)) * -0x3B314601E57A13AD
    return x ^ ((x >> 33) & _LOW_31)


def keys_of(batch: PackedBatch) -> DropoutKeys:
    """The keys of the whole packed sequence."""
    if batch.dropout is None:
        raise ValueError(
            "a model with dropout or noise in training mode needs PackedBatch.dropout, got None; set it to "
            "isthmus.engine.layers.dropout.dropout_keys(batch, seed=..., step=...), or call model.eval()"
        )
    return batch.dropout


def _number(layer: int, place: int) -> int:
    return layer * _PLACES + place


def _site(tokens: Tensor, layer: int, place: int) -> Tensor:
    return hashed(tokens + _number(layer, place))


def keep_mask(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """A mask of pairs of int32 keys, broadcast: int32, all bits with probability 1 - ``rate``, else none."""
    return uniform(rows, columns).ge_(round(rate * 2**32) - 2**31).neg_()


def uniform(rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform int32 of pairs of int32 keys, broadcast."""
    # Integer operations in place, which are several times as fast on a CPU as those on bool masks.
    hashes = rows + columns
    shifted = hashes >> 16
    hashes.bitwise_xor_(shifted).mul_(0x21F0AAAD)
    return hashes.bitwise_xor_(torch.bitwise_right_shift(hashes, 15, out=shifted)).mul_(0x735A2D97)


def drop(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """A copy of ``x`` with the values outside of ``mask`` zeroed and the others divided by 1 - ``rate``."""
    out = x * (1 / (1 - rate))
    integers = _INTEGERS[x.element_size()]
    out.view(integers).bitwise_and_(mask.to(integers))
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, site: Tensor, rate: float, first: int) -> Tensor:
        ctx.save_for_backward(tokens, site)
        ctx.rate, ctx.first = rate, first
        return _dropped(x, tokens, site, column_keys(x.size(-1), x.device, first), rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, site = ctx.saved_tensors
        columns = column_keys(grads[0].size(-1), grads[0].device, ctx.first)
        return _dropped(grads[0], tokens, site, columns, ctx.rate), None, None, None, None


@compiled_on_gpu
def _dropped(x: Tensor, tokens: Tensor, site: Tensor, columns: Tensor, rate: float) -> Tensor:
    return drop(x, keep_mask(row_keys(tokens, site), columns, rate), rate)


def row_keys(tokens: Tensor, site: Tensor) -> Tensor:
    """int32 [T, 1] of int64 [T] keys of tokens."""
    return hashed(tokens + site).int()[:, None]


@functools.cache
def column_keys(width: int, device: torch.device, first: int = 0) -> Tensor:
    """int32 [1, H], of channels from ``first``.

    Not in the region: torch 2.6 compiles the hash of an ``arange`` in 32 bits, which is wrong.
    """
    return hashed(torch.arange(first, first + width, device=device)).int()[None]


def drop_channels(x: Tensor, tokens: Tensor, site: Tensor, rate: float, first: int = 0) -> Tensor:
    """Dropout of ``x`` [n, H], channels from ``first``, with the keys of ``tokens`` [n]; ``site`` is int64 []."""
    dropped: Tensor = _Dropout.apply(x, tokens, site, rate, first)
    return dropped


def hidden_dropout(x: Tensor, batch: PackedBatch, rate: float, *, layer: int, place: int) -> Tensor:
    """Dropout of this rank's hidden states, [T, 1, H], or [T / tp, 1, H] under sequence parallelism."""
    if not rate:
        return x
    tokens = rows_of_rank(keys_of(batch).tokens, x, batch)
    return drop_channels(x[:, 0], tokens, site_of(layer, place, x.device), rate)[:, None]


def token_keys(x: Tensor, batch: PackedBatch, *, layer: int, place: int) -> Tensor:
    """int64 [n], random keys of the tokens of ``x`` [n, ...], this rank's hidden states."""
    return _site(rows_of_rank(keys_of(batch).tokens, x, batch), layer, place)


def gumbel_noise(keys: Tensor, start: int, size: int) -> Tensor:
    """Float64 [n, size], for columns from ``start`` on; a hash of ``keys`` int64 [n]."""
    columns = hashed(torch.arange(start, start + size, device=keys.device))
    uniform = ((hashed(keys[:, None] + columns) >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def rows_of_rank(values: Tensor, x: Tensor, batch: PackedBatch) -> Tensor:
    """The rows of a tensor over the whole packed sequence, [T, ...], that belong to this rank's hidden states."""
    rows = local_tokens(values, batch.spans)
    if x.size(0) < len(rows):
        rows = rows.chunk(len(rows) // x.size(0))[parallel_state.get_tensor_model_parallel_rank()]
    return rows


def site_of(layer: int, place: int, device: torch.device) -> Tensor:
    """int64 scalar; as a number, a compiled region would compile once a layer."""
    return torch.full((), _number(layer, place), device=device)


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout of attention probabilities in one layer, for the heads and queries of this rank."""

    rate: float
    layer: int
    first_head: int
    """Number of this rank's first query head."""
    batch: PackedBatch

    def query_keys(self, groups: int, repeat: int) -> Tensor:
        """int32 [G, T * R, 1], T / cp under context parallelism."""
        tokens = local_tokens(keys_of(self.batch).tokens, self.batch.spans)
        heads = torch.arange(groups * repeat, device=tokens.device).view(groups, 1, repeat) + self.first_head
        return hashed(_site(tokens, self.layer, _QUERIES)[:, None] + heads).int().flatten(1)[..., None]

    def key_keys(self, groups: int) -> Tensor:
        """int32 [G, T, 1]"""
        tokens = keys_of(self.batch).tokens
        return _site(tokens, self.layer, _KEYS).int()[None, :, None].expand(groups, -1, -1)

    def seed_kernels(self) -> float:
        """Seed the GPU's generator for PyTorch's attention kernels; returns their ``dropout_p``."""
        ranks = parallel_state.get_tensor_model_parallel_rank() << 10 | parallel_state.get_context_parallel_rank()
        torch.cuda.manual_seed(keys_of(self.batch).seed ^ self.layer << 20 ^ ranks)
        return self.rate
