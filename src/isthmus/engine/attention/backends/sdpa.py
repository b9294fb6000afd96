"""``scaled_dot_product_attention``, one sample after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isthmus.engine.attention.backends.blocks import check_shapes
from isthmus.engine.attention.backends.segments import Segment, offset_ranges, segments
from isthmus.engine.layers.dropout import AttentionDropout
from isthmus.engine.layers.row_ranges import row_ranges
from isthmus.engine.parallel.context_parallel import Spans


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
    spans: Spans | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Attend causally within each sample; arguments and result are those of :func:`packed_attention`."""
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler

    check_shapes(q, k, lengths, spans)
    if q.is_cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length (docs/decisions/0033)
    parts = list(_short_segments(lengths, window, spans))
    key_ranges = tuple((segment.first, segment.end) for segment in parts)
    queries = row_ranges(q, offset_ranges(segment.end - segment.start for segment in parts))
    outputs = []
    dropout_p = 0.0 if dropout is None else dropout.seed_kernels()
    for part_q, part_k, part_v in zip(queries, row_ranges(k, key_ranges), row_ranges(v, key_ranges), strict=True):
        mask, masked = None, False
        if window is not None and len(part_k) > window:
            masked = True
            mask = _window_mask(len(part_q), len(part_k), window, q.device)
        elif len(part_k) > len(part_q):
            mask = causal_lower_right(len(part_q), len(part_k))  # the last query sees all keys
        shares_keys = q.size(2) > 1
        if shares_keys and q.is_cuda and (masked or q.dtype == torch.float32):
            # Flash attention has no masks and no float32, and the other kernel no shared keys. Without it torch uses
            # plain matmuls, which save all probabilities.
            part_k, part_v = (x.repeat_interleave(q.size(2), dim=1) for x in (part_k, part_v))
            shares_keys = False
        heads_first = [x.transpose(0, 1)[None] for x in (part_q.flatten(1, 2), part_k, part_v)]
        out = scaled_dot_product_attention(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=shares_keys,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs).unflatten(1, q.shape[1:3])


def _short_segments(lengths: tuple[int, ...], window: int | None, spans: Spans | None) -> Iterator[Segment]:
    """With a window the segments are short, so masks grow with the window and not with the sample."""
    for span in segments(lengths, None, spans):
        for start, end, sample in span:
            if window is None or end - sample <= window:
                yield Segment(start, end, sample)
                continue
            for at in range(start, end, window):
                yield Segment(at, min(at + window, end), max(sample, at - window + 1))


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """True where a query attends: its own key and the ``window - 1`` before. The last key belongs to the last query."""
    index = torch.arange(keys, device=device)
    distance = index[keys - queries :, None] - index[None, :]
    return (distance >= 0) & (distance < window)
