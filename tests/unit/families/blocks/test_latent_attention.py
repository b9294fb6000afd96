"""Weights of latent attention, counted by hand."""

from __future__ import annotations

from dataclasses import replace

from isthmus.families.architecture import from_settings
from isthmus.families.blocks.latent_attention import Latent

MLA = Latent(kv_lora_rank=9, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5, q_lora_rank=11)
LATENT = from_settings({
    "family": "llama", "num_layers": 3, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "vocab_size": 50, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "mla": MLA,
})  # fmt: skip


def test_weights_with_and_without_low_rank_queries() -> None:
    # queries 16 to 11 to 32, keys and values 16 to 9 + 2 and 9 to 4 (6 + 5), output 4 5 to 16
    attention = 16 * 11 + 11 * 32 + 16 * 11 + 9 * 44 + 20 * 16
    assert LATENT.layers[0].matmul_weights == attention + 1152
    direct = LATENT.with_settings({"mla": replace(MLA, q_lora_rank=None)})
    assert direct.layers[0].matmul_weights == attention - 11 * 48 + 16 * 32 + 1152
