"""cuDNN's attention kernel where a packed sequence is one sample; flash attention for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.engine.attention.backends.blocks import check_shapes
from isthmus.engine.attention.backends.varlen import varlen_attention
from isthmus.engine.parallel.context_parallel import Spans

_KERNEL: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
"""What scaled_dot_product_attention calls, without its choice between kernels."""
LENGTH_MULTIPLE = 256
"""cuDNN builds a plan for each length, in 20 to 40 ms. Few lengths are multiples: 32 up to 8,192 tokens."""


def cudnn_attention(
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

    The lengths decide, which the host has. Other lengths, several samples, windows shorter than the sample and parts of
    a sequence use :func:`varlen_attention`.
    """
    windowed = window is not None and window < lengths[0]
    if len(lengths) > 1 or lengths[0] % LENGTH_MULTIPLE or windowed or spans is not None:
        return varlen_attention(q, k, v, lengths, window, scale=scale, spans=spans)
    check_shapes(q, k, lengths, spans)
    heads_first = [x.transpose(0, 1)[None] for x in (q.flatten(1, 2), k, v)]
    needs_log_sum_exp = torch.is_grad_enabled()
    out: Tensor = _KERNEL(*heads_first, None, needs_log_sum_exp, dropout_p=0.0, is_causal=True, scale=scale)[0]
    return out.squeeze(0).transpose(0, 1).unflatten(1, q.shape[1:3])
