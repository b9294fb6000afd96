"""Model FLOPs of a batch: the operations of the model, without recomputation or padding."""

from __future__ import annotations

from isthmus.families.architecture import Architecture


def matmul_parameters(architecture: Architecture, layer: int) -> int:
    """Weights of decoder layer ``layer`` in a token's matmuls, without norms and biases."""
    a, moe = architecture, architecture.moe
    attention = _attention_parameters(a.attention_of(layer))
    matrices = 3 if a.gated else 2
    if moe is None or not a.is_moe(layer):
        return attention + matrices * a.hidden_size * a.ffn_hidden_size
    expert_width = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    router_width = moe.num_experts + moe.shared_gate
    return attention + a.hidden_size * (matrices * expert_width + router_width)


def _attention_parameters(a: Architecture) -> int:
    """``a`` has the attention of the layer."""
    width = a.num_attention_heads * a.kv_channels
    if (mla := a.mla) is None:
        values = (a.num_attention_heads + a.num_query_groups) * a.value_width
        return a.hidden_size * (width + a.num_query_groups * a.kv_channels + values)
    queries = a.hidden_size * width if mla.q_lora_rank is None else mla.q_lora_rank * (a.hidden_size + width)
    down = a.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * a.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + down + up + a.hidden_size * a.num_attention_heads * mla.v_head_dim


def flops_per_batch(
    architecture: Architecture, num_tokens: int, sum_squared_lengths: int, loss_tokens: int | None = None
) -> float:
    """FLOPs of one forward and backward pass.

    A matmul is 2 FLOPs per weight and token; the backward pass is twice the forward pass (Kaplan et al. 2020, section
    2.1; Chowdhery et al. 2022, appendix B). Only routed experts count. Attention is causal within each sample: L tokens
    are L^2 / 2 pairs, each 2 D FLOPs for the score and 2 D for the value, per head. An indexer has only a forward pass,
    and attention then the selected pairs. Softmax, norms and the optimizer are not counted.

    Args:
        num_tokens: without padding.
        sum_squared_lengths: sum of the squared sample lengths.
        loss_tokens: tokens whose logits are computed; None: all of them.
    """
    a = architecture
    layers = attention = selection = 0.0
    for layer in range(a.num_layers + a.mtp_layers):  # MTP layers come last
        window = a.window(layer)
        pairs = sum_squared_lengths / 2
        pairs = pairs if window is None else min(pairs, float(window) * num_tokens)
        if a.indexer is not None:
            selection += _selection(a, num_tokens, pairs) if a.is_indexed(layer) else 0.0
            pairs = min(pairs, float(a.indexer.top_k) * num_tokens)
        layers += 2.0 * matmul_parameters(a, layer) * num_tokens
        own = a.attention_of(layer)
        attention += 2.0 * own.num_attention_heads * (own.kv_channels + own.value_width) * pairs
    rows = 1 if a.score_head else a.vocab_size
    head = 2.0 * a.hidden_size * rows * (num_tokens if loss_tokens is None else loss_tokens)
    mtp_projection = 2.0 * 2 * a.hidden_size**2 * num_tokens
    return selection + 3.0 * (layers + attention + head + a.mtp_layers * (mtp_projection + head))


def _selection(a: Architecture, num_tokens: int, pairs: float) -> float:
    """FLOPs of an indexer, which runs if samples have more keys than it selects."""
    indexer, mla = a.indexer, a.mla
    assert indexer is not None and mla is not None
    if 2 * pairs <= indexer.top_k * num_tokens:
        return 0.0
    width = indexer.num_heads * indexer.head_dim
    weights = (mla.q_lora_rank or 0) * width + a.hidden_size * (indexer.head_dim + indexer.num_heads)
    return 2.0 * (weights * num_tokens + width * pairs)
