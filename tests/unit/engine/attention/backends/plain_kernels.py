"""Kernels of PyTorch that a CPU does not have, as plain operations with the documented meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from isthmus.engine.attention.backends import cudnn, flex, varlen


def plain_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """That of ``torch_features``: the last query of a sample is aligned with its last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key)) == (len(query), len(value))
    assert query.size(-1) == key.size(-1) == value.size(-1)
    assert all(item.stride(-1) == 1 for item in (query, key, value))
    share = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    outputs = []
    for (q_start, q_end), (k_start, k_end) in zip(
        pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
    ):
        queries, keys = q_end - q_start, k_end - k_start
        assert 0 < queries <= max_q and queries <= keys <= max_k
        positions = torch.arange(queries)[:, None] + keys - queries
        other = torch.arange(keys)[None, :]
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if window_size[0] >= 0:
            seen &= other >= positions - window_size[0]
        if window_size[1] >= 0:
            seen &= other <= positions + window_size[1]
        scores = torch.einsum("tnd,snd->nts", query[q_start:q_end], key[k_start:k_end]) * scale
        probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append(torch.einsum("nts,snd->tnd", probabilities, value[k_start:k_end]))
    return torch.cat(outputs)


def plain_cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: None, compute_log_sumexp: bool, *, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[Tensor]:  # fmt: skip
    """``aten::_scaled_dot_product_cudnn_attention`` of [1, N, T, D], with grouped query heads."""
    assert query.dim() == 4 and query.size(0) == 1 and all(x.stride(-1) == 1 for x in (query, key, value))
    assert compute_log_sumexp == torch.is_grad_enabled()
    assert (attn_bias, dropout_p, is_causal) == (None, 0.0, True)
    share = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    seen = torch.ones(query.size(2), key.size(2), dtype=torch.bool).tril()
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ value,)


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash_attention as plain operations; torch's flex_attention, uncompiled, with the backward pass of its tests."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(varlen, "flash_attention", plain_flash_attention)
    monkeypatch.setattr(cudnn, "_KERNEL", plain_cudnn_attention)
    monkeypatch.setattr(
        flex_attention, "_validate_device", lambda *_: None, raising=False
    )  # refuses gradients on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    caches = (flex._kernel, flex._block_mask, varlen._calls)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
