"""Bytes of activations that a rank keeps between the forward and the backward pass of a micro batch.

Sums the tensors that autograd saves, with the method of arXiv 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from isthmus.families.architecture import Architecture, Mixer
from isthmus.train.mixer_memory import mixer_terms

Recomputed = Literal["core_attn", "mlp", "layernorm", "mlp_act", "rope"]
_NORMS = {"pre": (4, 2), "post": (4, 2), "sandwich": (6, 4), "parallel": (2, 1), "parallel_two_norms": (3, 2)}
"""[T, H] tensors by form of the layer, saved by a layer's norms and the projections after them; number of norms."""
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
    mixers: Sequence[Mixer] = ("attention",),
    has_mlp: bool = True,
) -> dict[str, int]:
    """Activation bytes of one dense decoder layer for T = ``num_tokens`` tokens, by part.

    With hidden size H, feed-forward width F, N query heads, G key/value heads, D channels (of values V), in elements:

    - norms and the projections after them (divided by tp only with sequence parallelism): a norm saves its input and a
      float32 number per token (LayerNorm: two), the projection its input; 4 T H for ``pre``;
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
        mixers: of the layer, see :func:`mixer_terms`; ``has_mlp``: it has a feed-forward block.
    """
    a = architecture
    if a.mla is not None or (a.moe is not None and len(a.moe.dense_layers) == 0):
        raise ValueError(f"{a.family} has no layer with plain attention and a dense feed-forward block")
    outside = num_tokens // tp if sp else num_tokens
    feed_forward = _feed_forward_tensors(a, recomputed, fused=fused) if has_mlp else 0
    tensors, norms = _norm_tensors(a, recomputed, mixers, has_mlp=has_mlp)
    float32 = outside * norms * (2 if a.normalization == "LayerNorm" else 1)
    if "attention" in mixers:
        float32 += num_tokens * _head_statistics(a) // tp
    sizes = {"num_tokens": num_tokens, "bytes_per_element": bytes_per_element, "tp": tp}
    terms = {
        f"{tensors} T H of norms and the inputs of projections": outside * tensors * a.hidden_size * bytes_per_element,
        ATTENTION: num_tokens * _attention_channels(a, recomputed) // tp * bytes_per_element,
        f"{feed_forward} T F of the feed-forward block": (
            num_tokens * feed_forward * a.ffn_hidden_size // tp * bytes_per_element
        ),
        "float32 statistics of norms": 4 * float32,
    }
    if "attention" not in mixers:
        del terms[ATTENTION]
    if inputs_bytes := (2 * a.hidden_size + 4 * a.layer_input_size) * bool(a.layer_input_size):
        terms["the layer's own input and its gate"] = outside * (inputs_bytes * bytes_per_element + 4)
    for mixer in set(mixers) - {"attention"}:
        terms |= mixer_terms(a, mixer, **sizes, recomputed="core_attn" in recomputed)
    return terms


def _head_statistics(a: Architecture) -> int:
    """Float32 numbers of a token that norms of heads save: one for each head, or copies if they are over all heads."""
    numbers = a.num_query_groups if a.value_norm else 0
    if a.qk_norm:
        heads = a.num_attention_heads + a.num_query_groups
        numbers += heads * (1 if a.qk_norm_over == "head" else 2 * a.kv_channels)
    return numbers


def _feed_forward_tensors(a: Architecture, recomputed: Sequence[Recomputed], *, fused: bool) -> int:
    """[T, F] tensors that a feed-forward block saves."""
    multiplied = a.mlp_multipliers[0] != 1 or any(a.swiglu_limits)
    activation = "gelu" if a.activation in ("gelu_tanh", "clamped_swiglu") or multiplied else a.activation
    return 0 if "mlp" in recomputed else _MLP["silu" if fused else activation, a.gated] - ("mlp_act" in recomputed)


def _norm_tensors(
    a: Architecture, recomputed: Sequence[Recomputed], mixers: Sequence[Mixer], *, has_mlp: bool
) -> tuple[int, int]:
    """[T, H] tensors that norms and the projections after them save, and the number of norms."""
    form = a.form_with(mixers)
    tensors, norms = _NORMS[form]
    tensors -= _NORMED[form] if "layernorm" in recomputed else 0
    if not (mixers and has_mlp):  # the layer is one block
        tensors, norms = tensors // 2, norms // 2
    inputs = {a.attention_multipliers[0], 1.0 if a.mamba2 is None else a.mamba2.multipliers[0]}
    return tensors + (len(mixers) > 1 and inputs != {1.0}), norms


def _attention_channels(a: Architecture, recomputed: Sequence[Recomputed]) -> int:
    """Elements that attention saves for a token."""
    query_width = a.num_attention_heads * a.kv_channels
    key_width = a.num_query_groups * a.kv_channels
    if a.position == "rope":
        rotated = 0 if "rope" in recomputed else query_width + key_width
    else:  # queries are copied only where several share a key head
        rotated = query_width if key_width < query_width else 0
    # Norms after the rotation save their inputs, and a clamp its input.
    inputs = query_width + key_width if (a.qk_norm and a.qk_norm_after_rotation) or a.qk_rms else 0
    inputs += query_width + key_width + a.num_query_groups * a.value_width if a.clip_qkv is not None else 0
    # A gate saves its projection, its sigmoid and what it multiplies.
    inputs += 3 * query_width if a.attention_gate else 0
    inputs += a.num_attention_heads * (1 + a.value_width) if a.head_gate else 0
    values_and_output = (a.num_attention_heads + a.num_query_groups) * a.value_width
    if a.value_norm and not a.values_are_keys:  # also its input
        values_and_output += a.num_query_groups * a.value_width
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
    layer_size = layer_bytes(
        a, num_tokens=num_tokens, bytes_per_element=bytes_per_element, tp=tp, sp=sp, recomputed=recomputed
    )
    total = (num_layers - full) * layer_size + full * outside * a.hidden_size * bytes_per_element
    if a.position == "rope":
        channels = sum(int(kind.kv_channels * kind.rotary_percent) for kind in a.rotary_kinds)
        total += num_tokens * channels * bytes_per_element
    if first:
        total += 8 * num_tokens
        channels = a.num_layers * a.layer_input_size  # inputs of the norm of layer inputs, and a number for each layer
        total += outside * (channels * bytes_per_element + (4 * a.num_layers if channels else 0))
    if last:
        total += outside * (a.hidden_size * bytes_per_element + 4)
        total += loss_tokens * (a.hidden_size * bytes_per_element + 8)
    return total
