"""Weights of feed-forward blocks, counted by hand."""

from __future__ import annotations

from isthmus.families.architecture import from_settings
from isthmus.families.blocks.feed_forward import Experts

SMALL = from_settings({
    "family": "llama", "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "vocab_size": 50, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
})  # fmt: skip
ATTENTION = 512 + 512 + 512


def test_an_mlp_without_a_gate_has_two_matrices() -> None:
    assert SMALL.with_settings({"gated": False}).layers[0].matmul_weights == ATTENTION + 768


def test_weights_of_a_layer_with_experts() -> None:
    moe = Experts(
        num_experts=6, top_k=2, ffn_hidden_size=5, shared_ffn_hidden_size=7, shared_gate=True, dense_layers=(0,)
    )
    dense, sparse, _ = SMALL.with_settings({"moe": moe}).layers
    assert dense.matmul_weights == SMALL.layers[0].matmul_weights
    # two experts 5 wide and one 7 wide, each of three matrices; scores of 6 experts and of the shared one
    assert sparse.matmul_weights == ATTENTION + 3 * 16 * (2 * 5 + 7) + 16 * 7
