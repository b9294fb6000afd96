"""Decoders whose attention selects keys."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_SIZES: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "v_head_dim": 6},
    **{"qk_rope_head_dim": 8, "head_dim": 8, "n_shared_experts": 2, "n_routed_experts": 6, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    **{"index_topk": 8, "index_n_heads": 6, "index_head_dim": 12},
}
_ALL = {"index_topk": 128}
"""No sample has more keys."""

FAMILIES: dict[str, TinyFamily] = {
    "deepseek_v32": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_SIZES,
        logits={"deepseek_v32": ({}, _ALL), "deepseek_v32-dense": (_ALL, {"index_topk": 8})},
    ),
    "glm_moe_dsa": TinyFamily(
        sizes=_SIZES,
        logits={
            "glm_moe_dsa": ({}, _ALL),
            "glm_moe_dsa-shared": (
                _ALL | {"indexer_types": ["full", "full", "shared", "shared"]},
                {"index_topk": 8},
            ),
        },
    ),
}
