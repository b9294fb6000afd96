"""``flex_attention``: a compiled kernel for logit softcapping, attention sinks, windows and context parallel spans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.attention.backends.blocks import check_shapes
from isthmus.engine.compiled import compile_limit
from isthmus.engine.host_copies import to_device
from isthmus.engine.parallel.context_parallel import Spans, local_tokens

_BLOCK = 128
"""Queries and keys of a block of the mask, the default of torch."""


@functools.lru_cache(maxsize=2)  # of layers with and without a window: 8 small tensors, T * T / 128 / 128 integers each
def _block_mask(lengths: tuple[int, ...], window: int | None, spans: Spans | None, device: torch.device) -> Any:
    """The blocks that contain pairs of a query and a key of one sample, and those that contain no other pairs.

    They follow from the first and the last key of each query, without the mask of all pairs of tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    position = torch.arange(int(ends[-1]))
    first = (ends - sizes).repeat_interleave(sizes)
    if window is not None:
        first = torch.maximum(first, position - window + 1)
    keys = len(position)
    first, last = to_device(torch.stack([local_tokens(x, spans) for x in (first, position)]).int(), device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    queries = len(first)
    missing = -queries % _BLOCK
    # A block with missing queries is not complete.
    firsts = torch.nn.functional.pad(first, (0, missing), value=keys).view(-1, _BLOCK)
    lasts = torch.nn.functional.pad(last, (0, missing), value=-1).view(-1, _BLOCK)
    start = torch.arange(0, keys, _BLOCK, device=device, dtype=torch.int32)
    end = start + _BLOCK - 1
    some = (end >= firsts.amin(1, keepdim=True)) & (start <= lasts.amax(1, keepdim=True))
    full = (start >= firsts.amax(1, keepdim=True)) & (end <= lasts.amin(1, keepdim=True))
    blocks = (*_ordered(some & ~full), *_ordered(full))
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(queries, keys))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [Q, K] -> numbers of blocks, int32 [1, 1, Q], and their indices before those of the others, [1, 1, Q, K]."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@functools.cache
def _kernel(softcap: float | None, scale: float | None, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The numbers are constants of the compiled function; lengths become symbols at the second one."""
    from torch.nn.attention import flex_attention as flex

    cap = softcap or 1.0

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    # Before torch 2.9 the log-sum-exp was the second result.
    aux = {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Any) -> Tensor:
        options = {
            "score_mod": capped if softcap else None,
            "block_mask": mask,
            "scale": scale,
            "enable_gqa": q.size(1) > k.size(1),
        }
        if sinks is None:
            return flex.flex_attention(q, k, v, **options)
        out, more = flex.flex_attention(q, k, v, **options, **aux)
        log_sum = more.lse if "return_aux" in aux else more
        # A sink is one more logit in the denominator of the softmax.
        return (out * torch.sigmoid(log_sum - sinks[:, None])[..., None]).to(dtype)

    return torch.compile(attend, fullgraph=True, **compile_limit())


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Spans | None = None,
) -> Tensor:
    """Attend causally within each sample; arguments and result are those of :func:`packed_attention`."""
    check_shapes(q, k, lengths, spans)
    heads_first = (x.transpose(0, 1)[None] for x in (q.flatten(1, 2), k, v))
    out = _kernel(softcap, scale, q.dtype)(*heads_first, sinks, _block_mask(lengths, window, spans, k.device))
    return out.squeeze(0).transpose(0, 1).unflatten(1, q.shape[1:3])
