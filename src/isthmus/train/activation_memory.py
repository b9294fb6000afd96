"""Bytes of activations that a rank keeps between the forward and the backward pass of a micro batch.

Sums the tensors that autograd saves, with the method of arXiv 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from isthmus.families.architecture import Architecture

Recomputed = Literal["core_attn", "mlp", "layernorm", "mlp_act", "rope"]
_NORMS = {"pre": (4, 2), "post": (4, 2), "sandwich": (6, 4), "parallel": (2, 1), "parallel_two_norms": (3, 2)}
"""By form: [T, H] tensors saved by a layer's norms and the projections after them; number of norms."""
_NORMED = {"pre": 2, "post": 0, "sandwich": 2, "parallel": 1, "parallel_two_norms": 2}
"""Outputs of norms among them."""
ATTENTION = "attention: T (queries, keys, values, rotated queries and keys, output)"
"""Name of the part of :func:`layer_terms` that latent attention replaces."""
_MLP = {
    ("silu", True): 3, ("gelu", True): 4, ("relu", True): 4, ("relu2", True): 5,
    ("silu", False): 2, ("gelu", False): 2, ("relu", False): 1, ("relu2", False): 2, ("xielu", False): 2,
}  # fmt: skip
"""[T, F] tensors saved by a feed-forward block, by activation and gating."""


def layer_terms(
    architecture: Architecture,
    *,
    num_tokens: int,
    bytes_per_element: int,
    tp: int = 1,
    sp: bool = False,
    recomputed: Sequence[Recomputed] = (),
    fused: bool = False,
) -> dict[str, int]:
    """Activation bytes of one dense decoder layer for T = ``num_tokens`` tokens, by part.

    With hidden size H, feed-forward width F, N query heads, G key/value heads, D channels (of values V), in elements:

    - norms and the projections after them (divided by tp only with sequence parallelism): a norm saves its input and
      one float32 number per token (LayerNorm: two), the projection its input; 4 T H for the form ``pre``;
    - attention (divided by tp): QKV output T ((N + G) D + G V), rotated queries and keys T (N + G) D, output T N V, no
      scores. QK norm saves one float32 number per head, or two float32 copies if it is over all heads;
    - feed-forward (divided by tp): output of the first projection T F (gated: T 2F) and activation T F; gated GELU
      saves another T F. A squared ReLU saves the ReLU in place of its input, and a ReLU its output only.

    Recomputing ``core_attn`` saves no memory; recomputing ``mlp`` keeps only the input of the block. ``mlp_act`` keeps
    no activation, ``layernorm`` no input of a projection after a norm, ``rope`` no rotated queries and keys.

    Measured on a CPU without CP and MTP layers. GPU attention kernels also save one number per head, and ``sdpa`` a
    second copy of its output.

    Args:
        architecture: has no MLA and at least one dense layer.
        bytes_per_element: FP8 matmuls save bfloat16.
        fused: activations are compiled, so that any of them saves only its input.
    """
    a = architecture
    if a.mla is not None or (a.moe is not None and len(a.moe.dense_layers) == 0):
        raise ValueError(f"{a.family} has no layer with plain attention and a dense feed-forward block")
    outside = num_tokens // tp if sp else num_tokens
    activation = "gelu" if a.activation in ("gelu_tanh", "clamped_swiglu") else a.activation
    tensors_of_mlp = _MLP["silu" if fused else activation, a.gated] - ("mlp_act" in recomputed)
    feed_forward = 0 if "mlp" in recomputed else tensors_of_mlp
    tensors, norms = _NORMS[a.form]
    tensors -= _NORMED[a.form] if "layernorm" in recomputed else 0
    float32 = outside * norms * (2 if a.normalization == "LayerNorm" else 1)
    if a.qk_norm:
        heads = a.num_attention_heads + a.num_query_groups
        float32 += num_tokens * heads * (1 if a.qk_norm_over == "head" else 2 * a.kv_channels) // tp
    return {
        f"{tensors} T H of norms and the inputs of projections": outside * tensors * a.hidden_size * bytes_per_element,
        ATTENTION: num_tokens * _attention_channels(a, recomputed) // tp * bytes_per_element,
        f"{feed_forward} T F of the feed-forward block": (
            num_tokens * feed_forward * a.ffn_hidden_size // tp * bytes_per_element
        ),
        "float32 statistics of norms": 4 * float32,
    }


def _attention_channels(a: Architecture, recomputed: Sequence[Recomputed]) -> int:
    """Elements that attention saves for a token."""
    query_width = a.num_attention_heads * a.kv_channels
    key_width = a.num_query_groups * a.kv_channels
    if a.position == "rope":
        rotated = 0 if "rope" in recomputed else query_width + key_width
    else:  # queries are copied only where several share a key head
        rotated = query_width if key_width < query_width else 0
    # Norms after the rotation save their inputs, and a clamp its input.
    inputs = query_width + key_width if a.qk_norm and a.qk_norm_after_rotation else 0
    inputs += query_width + key_width + a.num_query_groups * a.value_width if a.clip_qkv is not None else 0
    values_and_output = (a.num_attention_heads + a.num_query_groups) * a.value_width
    return query_width + key_width + inputs + rotated + values_and_output


def layer_bytes(architecture: Architecture, **settings: Any) -> int:
    """The sum of :func:`layer_terms`, with its arguments."""
    return sum(layer_terms(architecture, **settings).values())


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
    recompute_modules: Sequence[Recomputed] = ("core_attn",),
    recompute_layers: int | None = None,
) -> int:
    """Activation bytes of one pipeline stage for one micro batch; up to ``pp`` micro batches are in flight.

    A fully recomputed layer keeps its input, T H elements; the :func:`layer_bytes` of its backward pass are not
    counted. Outside the layers: rotary tables, token ids, the last norm, and the gradient of the hidden states of the
    loss tokens, which the loss computes in the forward pass. ``first``: has the embedding, ``last``: has the loss.
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
        channels = sum(int(kind.kv_channels * kind.rotary_percent) for kind in a.rotary_kinds)
        total += num_tokens * channels * bytes_per_element
    if first:
        total += 8 * num_tokens
    if last:
        total += outside * (a.hidden_size * bytes_per_element + 4)
        total += loss_tokens * (a.hidden_size * bytes_per_element + 8)
    return total
