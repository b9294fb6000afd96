"""Dropout of the inputs of adapters. The mask depends on the linear layer of transformers and not on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import drop_channels, keys_of
from isthmus.engine.parallel.context_parallel import local_tokens

Result = TypeVar("Result")
_batch: PackedBatch | None = None
"""Batch of the decoder layer that runs: linear layers do not get it as an argument."""


def use_batch(_layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder layer."""
    global _batch
    _batch = kwargs["packed_seq_params"]


def with_this_batch(run: Callable[..., Result]) -> Callable[..., Result]:
    """``run`` with the present batch, also when it runs again in the backward pass, after other batches."""
    batch = _batch

    def again(*args: Any) -> Result:
        global _batch
        _batch = batch
        return run(*args)

    return again


def input_dropout(x: Tensor, rate: float, *, module: str, first_channel: int) -> Tensor:
    """Dropout of ``x`` [n, 1, K], the channels from ``first_channel`` of the input of a linear layer.

    The tokens are those of the packed sequence, of this rank under context parallelism, or of its part under sequence
    parallelism.
    """
    assert _batch is not None
    tokens = keys_of(_batch).tokens
    if x.size(0) < len(tokens):
        tokens = local_tokens(tokens, _batch.spans)
    if x.size(0) < len(tokens):
        tokens = tokens.chunk(len(tokens) // x.size(0))[parallel_state.get_tensor_model_parallel_rank()]
    digest = hashlib.blake2b(module.encode(), digest_size=8).digest()
    site = torch.full((), int.from_bytes(digest, "little", signed=True), device=x.device)
    return drop_channels(x[:, 0], tokens, site, rate, first_channel)[:, None]
