"""How many floating-point operations the model needs for a batch, as opposed to what a kernel happens to do."""

from __future__ import annotations

from isthmus.families.architecture import Architecture


def matmul_parameters_per_layer(architecture: Architecture) -> int:
    """Weights of one decoder layer that a token is multiplied with; norms and biases are left out."""
    a = architecture
    heads_width = a.num_attention_heads * a.kv_channels
    qkv = a.hidden_size * (heads_width + 2 * a.num_query_groups * a.kv_channels)
    matrices = 3 if a.gated else 2  # gate, up and down, or up and down
    return qkv + heads_width * a.hidden_size + matrices * a.hidden_size * a.ffn_hidden_size


def flops_per_batch(
    architecture: Architecture, num_tokens: int, sum_squared_lengths: int, learned_tokens: int | None = None
) -> float:
    """Floating-point operations of one forward and backward pass.

    A matrix product of a token with P weights is 2 P operations; the backward pass is twice the forward pass
    (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B). Attention is counted causal: a sample of
    L tokens has L^2 / 2 query-key pairs, each 2 D operations for the score and 2 D for the value, per head; samples
    packed into one sequence do not attend to each other. What recomputation does again is not counted, nor are
    padding, softmax, norms and the optimizer.

    Args:
        architecture: the model's shape.
        num_tokens: tokens that run through the layers, padding left out.
        sum_squared_lengths: sum over the samples of their squared token count.
        learned_tokens: tokens whose logits are computed; None: all of them.
    """
    a = architecture
    layers = 2.0 * a.num_layers * matmul_parameters_per_layer(a) * num_tokens
    full = sum_squared_lengths / 2
    windows = (a.window(layer) for layer in range(a.num_layers))
    pairs = sum(full if window is None else min(full, float(window) * num_tokens) for window in windows)
    attention = 4.0 * a.num_attention_heads * a.kv_channels * pairs
    head = 2.0 * a.hidden_size * a.vocab_size * (num_tokens if learned_tokens is None else learned_tokens)
    return 3.0 * (layers + attention + head)
