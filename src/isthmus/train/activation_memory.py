"""Bytes of activations that a rank keeps between the forward and the backward pass of a micro batch.

The method is that of arXiv 2205.05198 ("Reducing Activation Recomputation in Large Transformer Models"), section 4:
the tensors that autograd saves are added up layer by layer. The layer differs from the paper's, so the sums do too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from isthmus.families.architecture import Architecture

_NORMS = {"pre": (4, 2), "post": (4, 2), "sandwich": (6, 4), "parallel": (2, 1), "parallel_two_norms": (3, 2)}
"""By form: [T, H] tensors saved by a layer's norms and the projections after them; number of norms."""
_MLP = {("silu", True): 3, ("silu", False): 2, ("gelu", True): 4, ("gelu", False): 2}
"""[T, F] tensors saved by a feed-forward block, by activation and gating."""


def layer_bytes(
    architecture: Architecture,
    *,
    num_tokens: int,
    bytes_per_element: int,
    tp: int = 1,
    sp: bool = False,
    recomputed: Sequence[Literal["core_attn", "mlp"]] = (),
) -> int:
    """Activation bytes of one dense decoder layer for a micro batch of T tokens.

    With hidden size H, feed-forward width F, N query heads and G key/value heads of D channels, in elements:

    - norms and the projections after them (divided by tp only with sequence parallelism): a norm saves its input and
      one float32 number a token (two for LayerNorm), the projection saves its input; 4 T H for the form ``pre``;
    - attention (divided by tp): the QKV output T (N + 2G) D, of which values are a view; rotated queries and keys
      T (N + G) D; the attention output T N D. Scores are computed in blocks and never saved, so the paper's 5 a s / h
      is 0. A norm of queries and keys saves one float32 number a head, or two float32 copies if it is over all heads;
    - feed-forward (divided by tp): the first projection's output, T 2F if gated, else T F, and the activation's T F;
      gated GELU consists of two operations and saves another T F.

    Recomputing ``core_attn`` saves nothing: only its inputs are kept anyway. Recomputing ``mlp`` keeps only the
    feed-forward block's input.

    Measured on a CPU without context parallelism and MTP layers. GPU attention kernels also keep their output and one
    number a head beside the copy that is counted here.

    Args:
        architecture: of the model; the layer has no experts and no MLA.
        num_tokens: T, of the whole packed sequence.
        bytes_per_element: of the activations; FP8 matmuls save theirs in bfloat16.
        tp: tensor-parallel ranks.
        sp: sequence parallelism.
        recomputed: recomputed parts.

    Raises:
        ValueError: the model has no such layer.
    """
    a = architecture
    if a.mla is not None or (a.moe is not None and len(a.moe.dense_layers) == 0):
        raise ValueError(f"{a.family} has no layer with plain attention and a dense feed-forward block")
    outside = num_tokens // tp if sp else num_tokens
    activation = "silu" if a.activation == "silu" else "gelu"
    feed_forward = 0 if "mlp" in recomputed else _MLP[activation, a.gated] * a.ffn_hidden_size
    query_width = a.num_attention_heads * a.kv_channels
    key_width = a.num_query_groups * a.kv_channels
    if a.position == "rope":
        rotated = query_width + key_width
    else:  # queries are copied only where several share a key head
        rotated = query_width if key_width < query_width else 0
    attention = (query_width + 2 * key_width) + rotated + query_width
    tensors, norms = _NORMS[a.form]
    elements = outside * tensors * a.hidden_size + num_tokens * (attention + feed_forward) // tp
    float32 = outside * norms * (2 if a.normalization == "LayerNorm" else 1)
    if a.qk_norm:
        heads = a.num_attention_heads + a.num_query_groups
        float32 += num_tokens * (heads if a.qk_norm_over == "head" else 2 * (query_width + key_width)) // tp
    return elements * bytes_per_element + 4 * float32


def stage_bytes(
    architecture: Architecture,
    *,
    num_layers: int,
    num_tokens: int,
    loss_tokens: int,
    bytes_per_element: int,
    tp: int = 1,
    sp: bool = False,
    first: bool = True,
    last: bool = True,
    recompute: Literal["none", "selective", "full"] = "none",
    recompute_modules: Sequence[Literal["core_attn", "mlp"]] = ("core_attn",),
    recompute_layers: int | None = None,
) -> int:
    """Activation bytes of one pipeline stage for one micro batch; a stage has up to ``pp`` micro batches in flight.

    A fully recomputed layer keeps its input, T H elements; its own backward pass temporarily needs :func:`layer_bytes`
    more, which are not counted here. Outside the layers: the rotary tables, the token ids of the embedding, the last
    norm, and the gradient of the hidden states of the loss tokens, which the loss computes in the forward pass.

    Arguments as of :func:`layer_bytes` and ``train.recompute*``; ``first``: has the embedding, ``last``: has the loss.
    """
    a = architecture
    outside = num_tokens // tp if sp else num_tokens
    full = (num_layers if recompute_layers is None else recompute_layers) if recompute == "full" else 0
    recomputed = recompute_modules if recompute == "selective" else ()
    each = layer_bytes(
        a, num_tokens=num_tokens, bytes_per_element=bytes_per_element, tp=tp, sp=sp, recomputed=recomputed
    )
    total = (num_layers - full) * each + full * outside * a.hidden_size * bytes_per_element
    if a.position == "rope":
        tables = 1 if a.window_rotary_base is None else 2
        total += tables * num_tokens * int(a.kv_channels * a.rotary_percent) * bytes_per_element
    if first:
        total += 8 * num_tokens
    if last:
        total += outside * (a.hidden_size * bytes_per_element + 4)
        total += loss_tokens * (a.hidden_size * bytes_per_element + 8)
    return total
