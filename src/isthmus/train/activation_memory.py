"""How many bytes of activations a rank keeps between the forward and the backward pass of a micro batch.

After arXiv 2205.05198 ("Reducing Activation Recomputation in Large Transformer Models"), section 4: what autograd keeps
of a layer is added up by hand. Its layer is not this one, so the sum is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from isthmus.families.architecture import Architecture

_NORMS = {"pre": (4, 2), "post": (4, 2), "sandwich": (6, 4), "parallel": (2, 1), "parallel_two_norms": (3, 2)}
"""By form: tensors of [T, H] that the norms of a layer and the projections behind them keep; norms."""
_MLP = {("silu", True): 3, ("silu", False): 2, ("gelu", True): 4, ("gelu", False): 2}
"""Tensors of [T, F] that a feed-forward block keeps, by activation and gating."""


def layer_bytes(
    architecture: Architecture,
    *,
    num_tokens: int,
    bytes_per_element: int,
    tp: int = 1,
    sp: bool = False,
    recomputed: Sequence[Literal["core_attn", "mlp"]] = (),
) -> int:
    """What one dense decoder layer keeps of a micro batch of T tokens.

    With H the hidden size, F the feed-forward width, N query heads and G key/value heads of D channels, in elements:

    - norms and what reads them, over tp only under sequence parallelism: a norm keeps its input and a float32 number a
      token (two for LayerNorm), the projection behind it keeps its output; of the form ``pre`` that is 4 T H;
    - attention, over tp: the projection's output T (N + 2G) D, of which values are a view; queries and keys after their
      rotation, T (N + G) D; and its own output T N D, which the next projection reads. Scores are taken block by block
      and never kept, so the paper's 5 a s / h is nothing here. A norm of queries and keys reads what is there already
      and keeps a float32 number a head, or two float32 copies if it is over all heads;
    - feed-forward, over tp: the first projection's output T 2F (gated; else T F) and the activation's T F, which the
      second one reads; gated GELU, which is put together of two operations, keeps half of itself once more.

    Recomputing ``core_attn`` saves nothing: its inputs are all it keeps anyhow. Recomputing ``mlp`` leaves of the
    feed-forward block what it reads.

    This is what is measured on a CPU, without context parallelism and layers that predict ahead. The attention kernels
    of GPUs keep their output, and a number a head, beside the copy of it that is counted here.

    Args:
        architecture: of the model; a layer with neither experts nor latent attention.
        num_tokens: T, of the whole line.
        bytes_per_element: of the activations; FP8 products keep theirs in bfloat16.
        tp: tensor-parallel ranks.
        sp: whether what is not inside attention or feed-forward is cut over tp.
        recomputed: parts that are computed again.

    Raises:
        ValueError: there is no such layer in the model.
    """
    a = architecture
    if a.mla is not None or (a.moe is not None and len(a.moe.dense_layers) == 0):
        raise ValueError(f"{a.family} has no layer with plain attention and a dense feed-forward block")
    outside = num_tokens // tp if sp else num_tokens
    activation = "silu" if a.activation == "silu" else "gelu"
    feed_forward = 0 if "mlp" in recomputed else _MLP[activation, a.gated] * a.ffn_hidden_size
    width = a.num_attention_heads * a.kv_channels
    narrow = a.num_query_groups * a.kv_channels
    if a.position == "rope":
        moved = width + narrow
    else:  # queries are copied only where several share a key head
        moved = width if narrow < width else 0
    attention = (width + 2 * narrow) + moved + width
    tensors, norms = _NORMS[a.form]
    kept = outside * tensors * a.hidden_size + num_tokens * (attention + feed_forward) // tp
    numbers = outside * norms * (2 if a.normalization == "LayerNorm" else 1)
    if a.qk_norm:
        of_heads = a.num_attention_heads + a.num_query_groups
        numbers += num_tokens * (of_heads if a.qk_norm_over == "head" else 2 * (width + narrow)) // tp
    return kept * bytes_per_element + 4 * numbers


def stage_bytes(
    architecture: Architecture,
    *,
    num_layers: int,
    num_tokens: int,
    learned_tokens: int,
    bytes_per_element: int,
    tp: int = 1,
    sp: bool = False,
    first: bool = True,
    last: bool = True,
    recompute: Literal["none", "selective", "full"] = "none",
    recompute_modules: Sequence[Literal["core_attn", "mlp"]] = ("core_attn",),
    recompute_layers: int | None = None,
) -> int:
    """What one pipeline stage keeps of one micro batch; a stage has up to ``pp`` of them under way.

    A layer that is recomputed in full keeps what it reads, T H elements, and for the while of its own backward pass
    takes :func:`layer_bytes` on top, which is not counted here. Outside the layers there are the table of angles, the
    tokens' rows in the embedding, the last norm, and the gradient of the learned tokens' hidden states, which the loss
    takes on the way.

    Args:
        architecture: see :func:`layer_bytes`, as for all that is not named here.
        num_layers: of the stage.
        num_tokens: T.
        learned_tokens: those whose label counts.
        bytes_per_element: of the activations.
        tp: tensor-parallel ranks.
        sp: whether sequence parallelism is on.
        first: whether the stage has the embedding.
        last: whether it has the loss.
        recompute: as ``train.recompute``.
        recompute_modules: as ``train.recompute_modules``.
        recompute_layers: as ``train.recompute_layers``.
    """
    a = architecture
    outside = num_tokens // tp if sp else num_tokens
    full = (num_layers if recompute_layers is None else recompute_layers) if recompute == "full" else 0
    each = layer_bytes(
        a,
        num_tokens=num_tokens,
        bytes_per_element=bytes_per_element,
        tp=tp,
        sp=sp,
        recomputed=recompute_modules if recompute == "selective" else (),
    )
    total = (num_layers - full) * each + full * outside * a.hidden_size * bytes_per_element
    if a.position == "rope":
        tables = 1 if a.window_rotary_base is None else 2
        total += tables * num_tokens * int(a.kv_channels * a.rotary_percent) * bytes_per_element
    if first:
        total += 8 * num_tokens
    if last:
        total += outside * (a.hidden_size * bytes_per_element + 4)
        total += learned_tokens * (a.hidden_size * bytes_per_element + 8)
    return total
