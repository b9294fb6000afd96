"""Model FLOPs of a batch: the operations of the model, without recomputation or padding."""

from __future__ import annotations

from isthmus.families.architecture import Architecture, Mixer


def matmul_parameters(architecture: Architecture, layer: int) -> int:
    """Weights of decoder layer ``layer`` in a token's matmuls and convolutions, without norms and biases."""
    a, moe = architecture, architecture.moe
    mixers = sum(_mixer_parameters(a.attention_of(layer), mixer) for mixer in a.mixers_of(layer))
    if a.key_source(layer) is not None:  # its queries only
        attention = a.attention_of(layer)
        mixers = a.hidden_size * attention.num_attention_heads * (attention.kv_channels + attention.value_width)
    mixers += 3 * a.hidden_size * a.layer_input_size  # its part of the projection of embeddings, gate, projection
    matrices = 3 if a.gated else 2
    if layer in a.layers_without_mlp:
        return mixers
    if moe is None or not a.is_moe(layer):
        return mixers + matrices * a.hidden_size * a.mlp_width(layer)
    latent = 0 if moe.latent_size is None else 2 * a.hidden_size * moe.latent_size
    routed = matrices * moe.top_k * moe.ffn_hidden_size * (moe.latent_size or a.hidden_size)
    others = matrices * moe.shared_ffn_hidden_size + moe.num_experts + moe.shared_gate
    return mixers + latent + routed + a.hidden_size * others


def _mixer_parameters(a: Architecture, mixer: Mixer) -> int:
    """``a`` has the attention of the layer."""
    if mixer == "mamba2" and (two := a.mamba2) is not None:
        inner, groups = two.num_heads * two.head_dim, two.num_groups * two.state_size
        projections = a.hidden_size * (3 * inner + 2 * groups + two.num_heads)
        return projections + two.kernel * (inner + 2 * groups)
    if mixer == "mamba" and (mamba := a.mamba) is not None:
        selection = 2 * mamba.time_step_rank + 2 * mamba.state_size
        return mamba.inner_size * (3 * a.hidden_size + selection + mamba.kernel)
    if mixer == "short_convolution" and (short := a.short_convolution) is not None:
        return a.hidden_size * (4 * a.hidden_size + short.kernel)
    if mixer != "attention" and (delta := a.delta_net) is not None:
        inputs = 2 * delta.key_width + delta.value_width
        # Of Kimi delta attention, decays and gates have low-rank projections.
        low_rank = 2 * delta.value_head_dim * a.hidden_size + delta.value_head_dim * (
            delta.key_width + delta.value_width
        )
        gates = a.hidden_size * (delta.value_width + delta.num_value_heads)
        full_rank = a.hidden_size * (delta.key_width + delta.value_width)
        kimi = low_rank if delta.low_rank_gates else full_rank
        others = gates if mixer == "gated_delta_net" else kimi
        projections = a.hidden_size * (inputs + delta.num_value_heads + delta.value_width) + others
        return projections + delta.conv_kernel * inputs
    return _attention_parameters(a)


def _scan_operations(a: Architecture, mixer: Mixer) -> int:
    """FLOPs for each token of a recurrence: 7 for each element of the state, as Megatron-LM counts those of Mamba."""
    if mixer == "mamba2" and (two := a.mamba2) is not None:
        return 7 * two.num_heads * two.head_dim * two.state_size
    if mixer == "mamba" and (mamba := a.mamba) is not None:
        return 7 * mamba.inner_size * mamba.state_size
    if mixer != "attention" and (delta := a.delta_net) is not None:
        # Decay, readout of the key, correction of the value, update, readout of the query (arXiv 2412.06464, eq. 10).
        return 7 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    return 0


def _attention_parameters(a: Architecture) -> int:
    """``a`` has the attention of the layer."""
    width = a.num_attention_heads * a.kv_channels
    gate = a.hidden_size * a.num_attention_heads if a.head_gate else 0
    if (mla := a.mla) is None:
        values = (a.num_attention_heads + (0 if a.values_are_keys else a.num_query_groups)) * a.value_width
        width *= 2 if a.attention_gate else 1
        return gate + a.hidden_size * (width + a.num_query_groups * a.kv_channels + values)
    queries = a.hidden_size * width if mla.q_lora_rank is None else mla.q_lora_rank * (a.hidden_size + width)
    down = a.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * a.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return gate + queries + down + up + a.hidden_size * a.num_attention_heads * mla.v_head_dim


def flops_per_batch(
    architecture: Architecture, num_tokens: int, sum_squared_lengths: int, loss_tokens: int | None = None
) -> float:
    """FLOPs of one forward and backward pass.

    A matmul is 2 FLOPs per weight and token; the backward pass is twice the forward pass (Kaplan et al. 2020, section
    2.1; Chowdhery et al. 2022, appendix B). Only routed experts count. Attention is causal within each sample: L tokens
    are L^2 / 2 pairs, each 2 D FLOPs for the score and 2 D for the value, per head. A convolution is 2 FLOPs per
    weight and token, the recurrence of Mamba 7 per element of the state and token (``mamba_layer_flops`` in the
    training loop of Megatron-LM). An indexer has only a
    forward pass, and attention then the selected pairs. Softmax, norms and the optimizer are not counted.

    Args:
        num_tokens: without padding.
        sum_squared_lengths: sum of the squared sample lengths.
        loss_tokens: tokens whose logits are computed; None: all of them.
    """
    a = architecture
    layers = mixing = selection = 0.0
    for layer in range(a.num_layers + a.mtp_layers):  # MTP layers come last
        keys, pairs = a.mean_keys(layer), sum_squared_lengths / 2
        pairs = pairs if keys is None else min(pairs, keys * num_tokens)
        if a.indexer is not None:
            selection += _selection(a, num_tokens, pairs) if a.is_indexed(layer) else 0.0
            pairs = min(pairs, float(a.indexer.top_k) * num_tokens)
        layers += 2.0 * matmul_parameters(a, layer) * num_tokens
        attention, mixers = a.attention_of(layer), a.mixers_of(layer)
        if "attention" in mixers:
            mixing += 2.0 * attention.num_attention_heads * (attention.kv_channels + attention.value_width) * pairs
        mixing += sum(_scan_operations(a, mixer) for mixer in mixers) * float(num_tokens)
    rows = 1 if a.score_head else a.vocab_size
    head = 2.0 * a.hidden_size * rows * (num_tokens if loss_tokens is None else loss_tokens)
    mtp_projection = 2.0 * 2 * a.hidden_size**2 * num_tokens
    return selection + 3.0 * (layers + mixing + head + a.mtp_layers * (mtp_projection + head))


def _selection(a: Architecture, num_tokens: int, pairs: float) -> float:
    """FLOPs of an indexer, which runs if samples have more keys than it selects."""
    indexer, mla = a.indexer, a.mla
    assert indexer is not None and mla is not None
    if 2 * pairs <= indexer.top_k * num_tokens:
        return 0.0
    width = indexer.num_heads * indexer.head_dim
    weights = (mla.q_lora_rank or 0) * width + a.hidden_size * (indexer.head_dim + indexer.num_heads)
    return 2.0 * (weights * num_tokens + width * pairs)
