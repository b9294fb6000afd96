"""Model FLOPs of a batch: the operations of the model, without recomputation or padding."""

from __future__ import annotations

from isthmus.families.architecture import Architecture


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
    layers = mixing = selection = 0.0
    for layer in architecture.all_layers:
        layers += 2.0 * layer.matmul_weights * num_tokens
        mixing += sum(mixer.mixing_flops(num_tokens, sum_squared_lengths) for mixer in layer.mixers)
        selection += sum(mixer.selection_flops(num_tokens, sum_squared_lengths) for mixer in layer.mixers)
    rows = 1 if architecture.head.score_head else architecture.vocab_size
    head = 2.0 * architecture.hidden_size * rows * (num_tokens if loss_tokens is None else loss_tokens)
    return selection + 3.0 * (layers + mixing + (1 + len(architecture.mtp)) * head)
