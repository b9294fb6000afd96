"""NEFTune (arXiv 2310.05914): uniform noise on embeddings in training.

The noise is a hash of the same numbers as a dropout mask (``dropout.py``), so all layouts, recomputed and resumed steps
have the same. In the paper and in other trainers, a sequence of L tokens has noise of magnitude alpha / sqrt(L * H); in
a packed sequence, L is the length of each sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.host_copies import to_device
from isthmus.engine.layers.dropout import (
    NOISE,
    column_keys,
    keys_of,
    lengths_by_sample,
    row_keys,
    rows_of_rank,
    site_of,
    uniform,
)


def with_noise(x: Tensor, batch: PackedBatch, alpha: float, *, layer: int) -> Tensor:
    """Embeddings with noise: this rank's [T, 1, H], or [T / tp, 1, H] under sequence parallelism."""
    if not alpha:
        return x
    lengths = torch.cat([torch.full((length,), float(length)) for _, length in lengths_by_sample(batch)])
    tokens, lengths = (rows_of_rank(rows, x, batch) for rows in (keys_of(batch).tokens, lengths))
    magnitudes = to_device(alpha / (lengths * x.size(-1)).sqrt(), x.device)
    site, columns = site_of(layer, NOISE, x.device), column_keys(x.size(-1), x.device)
    return x + _noise(tokens, site, columns, magnitudes)[:, None].to(x.dtype)


@compiled_on_gpu
def _noise(tokens: Tensor, site: Tensor, columns: Tensor, magnitudes: Tensor) -> Tensor:
    """float32 [T, H]"""
    return uniform(row_keys(tokens, site), columns) * (magnitudes / 2**31)[:, None]
