"""The flash attention kernel of torch for all samples of a packed sequence at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.engine.attention.backends.blocks import check_shapes
from isthmus.engine.attention.backends.segments import offset_ranges, segments
from isthmus.engine.host_copies import to_device
from isthmus.engine.layers.row_ranges import row_ranges
from isthmus.engine.parallel.context_parallel import Spans
from isthmus.platforms.torch_features import flash_attention


@dataclass(frozen=True, slots=True)
class _Call:
    """One span of queries and the adjacent keys of its samples."""

    first: int
    end: int
    """Keys [first, end) of the packed sequence."""
    queries: int
    cu_seqlens_q: Tensor
    """int32 [samples + 1] on the device; queries of a sample are its last keys."""
    cu_seqlens_k: Tensor
    max_queries: int
    max_keys: int


@functools.lru_cache(maxsize=4)  # shared by the layers of a micro batch with and without a window
def _calls(
    lengths: tuple[int, ...], window: int | None, spans: Spans | None, device: torch.device
) -> tuple[_Call, ...]:
    """One call, or one for each span under context parallelism: keys of several spans overlap."""
    calls = [parts for parts in segments(lengths, window, spans) if parts]
    queries = [[segment.end - segment.start for segment in parts] for parts in calls]
    keys = [[segment.end - segment.first for segment in parts] for parts in calls]
    cumulative = [list(accumulate(sizes, initial=0)) for pair in zip(queries, keys, strict=True) for sizes in pair]
    # One copy to the device per micro batch.
    joined = to_device(torch.tensor([end for ends in cumulative for end in ends], dtype=torch.int32), device)
    on_device = joined.split([len(ends) for ends in cumulative])
    return tuple(
        _Call(parts[0].first, parts[-1].end, sum(q), on_device[2 * i], on_device[2 * i + 1], max(q), max(k))
        for i, (parts, q, k) in enumerate(zip(calls, queries, keys, strict=True))
    )


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
    spans: Spans | None = None,
) -> Tensor:
    """Attend causally within each sample; arguments and result are those of :func:`packed_attention`.

    Values narrower than keys are padded with zeros: the kernel has one width.
    """
    check_shapes(q, k, lengths, spans)
    calls = _calls(lengths, window, spans, k.device)
    width = v.size(-1)
    if width < k.size(-1):
        v = F.pad(v, (0, k.size(-1) - width))
    ranges = tuple((call.first, call.end) for call in calls)
    queries = row_ranges(q.flatten(1, 2), offset_ranges(call.queries for call in calls))
    outputs = [
        flash_attention(
            *(call_q, call_k, call_v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_queries, call.max_keys),
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
        )
        for call, call_q, call_k, call_v in zip(
            calls, queries, row_ranges(k, ranges), row_ranges(v, ranges), strict=True
        )
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out[..., :width].unflatten(1, q.shape[1:3])
