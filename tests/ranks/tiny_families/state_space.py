"""Hybrid decoders with state spaces or short convolutions."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_head": 8,
    "mamba_chunk_size": 16,
    "mamba_d_conv": 3,
}
_BIASES = {"mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True}
_LIMIT = {"time_step_limit": (2.0, 2.5)}


def _kinds(letters: str) -> list[str]:
    return [{"a": "full_attention", "m": "linear_attention", "c": "conv"}[letter] for letter in letters]


_TWO = {"num_hidden_layers": 2, "layer_types": _kinds("ma")}
_CONVOLUTION = {"num_hidden_layers": 2, "layer_types": _kinds("ca"), "block_auto_adjust_ff_dim": False}
_PAIRS = ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
_MULTIPLIERS: dict[str, Any] = {
    **dict(zip(_PAIRS, (1.5, 0.7, 1.2, 0.8), strict=True)),
    **{"key_multiplier": 3.0, "lm_head_multiplier": 0.5, "embedding_multiplier": 4.0},
    **{"mlp_multipliers": [2.0, 0.6], "ssm_multipliers": [0.9, 1.1, 1.3, 0.7, 1.6]},
}
_ONE_BLOCK: dict[str, Any] = {
    **{"num_hidden_layers": 2, "conv_kernel": 3, "state_size": 6, "time_step_rank": 5},
    "residual_in_fp32": False,
}
FAMILIES: dict[str, TinyFamily] = {
    "mamba": TinyFamily(
        sizes=_ONE_BLOCK,
        logits={
            "mamba": ({"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}, None),
            "mamba-rank": ({"time_step_rank": "auto", "layer_norm_epsilon": 0.1}, {"layer_norm_epsilon": 1e-5}),
        },
    ),
    "falcon_mamba": TinyFamily(
        sizes=_ONE_BLOCK,
        logits={"falcon_mamba": ({"mixer_rms_eps": 0.5}, {"mixer_rms_eps": 1e-6})},
    ),
    "mamba2": TinyFamily(
        sizes=_ONE_BLOCK | {"num_heads": 8, "head_dim": 8, "n_groups": 2},
        logits={
            "mamba2": ({"use_bias": True, "use_conv_bias": False}, {"n_groups": 4}),
            "mamba2-limit": (_LIMIT, {"time_step_limit": (0.0, 10.0)}),
        },
    ),
    "bamba": TinyFamily(
        sizes=_MAMBA2 | {"attn_layer_indices": [1]},
        logits={
            "bamba": (_BIASES | {"mlp_bias": True, "tie_word_embeddings": True}, None),
            "bamba-limit": (_LIMIT, {"time_step_limit": (0.0, 10.0)}),
        },
    ),
    "granitemoehybrid": TinyFamily(
        sizes=_MAMBA2
        | _TWO
        | {
            "num_local_experts": 6,
            "shared_intermediate_size": 20,
            "intermediate_size": 12,
            "attention_multiplier": 0.3,
        },
        layouts=({"tp": 2}, {"pp": 2}),
        logits={
            "granitemoehybrid": (
                {"position_embedding_type": "rope", "logits_scaling": 4.0, "residual_multiplier": 0.4},
                {"position_embedding_type": None},
            ),
            "granitemoehybrid-dense": (_BIASES | {"num_local_experts": 0, "tie_word_embeddings": True}, None),
        },
        training={"mamba_n_groups": 1},
    ),
    "falcon_h1": TinyFamily(
        sizes=_MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
        logits={
            "falcon_h1": (_MULTIPLIERS, dict.fromkeys(_PAIRS, 1.0)),
            "falcon_h1-norm": (
                _BIASES | {"mamba_rms_norm": True, "projectors_bias": True, "mamba_norm_before_gate": False},
                {"mamba_norm_before_gate": True},
            ),
            "falcon_h1-norm-first": (
                {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
                {"mamba_norm_before_gate": False},
            ),
        },
        training=_MULTIPLIERS,
    ),
    "nemotron_h": TinyFamily(
        sizes={"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 6}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_intermediate_size": 12}
        | {"moe_shared_expert_intermediate_size": 20},
        layouts=({"tp": 2}, {"pp": 2}, {"ep": 2}),
        logits={
            "nemotron_h": (
                {"moe_latent_size": 16, "n_group": 2, "routed_scaling_factor": 2.5, "time_step_min": 2.0},
                {"time_step_min": 0.001},
            ),
            "nemotron_h-dense": (
                {
                    "use_bias": True,
                    "use_conv_bias": False,
                    "layers_block_type": ["mlp", "full_attention", "mlp", "linear_attention"],
                },
                None,
            ),
        },
        training={"moe_latent_size": 16},
    ),
    "jamba": TinyFamily(
        sizes={"num_experts": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 5}
        | {"mamba_d_state": 6, "num_hidden_layers": 2},
        layouts=({"tp": 2}, {"ep": 2}),
        logits={
            "jamba": ({"mamba_conv_bias": False, "mamba_proj_bias": True, "num_hidden_layers": 4}, None),
            "jamba-dense": ({"num_experts": 1, "mamba_dt_rank": "auto", "tie_word_embeddings": True}, None),
        },
    ),
    "lfm2": TinyFamily(
        sizes=_CONVOLUTION,
        layouts=({"tp": 2}, {"pp": 2}),
        logits={
            "lfm2": ({"conv_bias": True, "conv_L_cache": 4}, None),
            "lfm2-width": (
                {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "tie_word_embeddings": False},
                {"intermediate_size": 96},
            ),
        },
    ),
    "lfm2_moe": TinyFamily(
        sizes=_CONVOLUTION
        | {"num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1, "moe_intermediate_size": 12},
        layouts=({"tp": 2}, {"ep": 2}),
        logits={
            "lfm2_moe": ({"routed_scaling_factor": 2.5}, {"norm_topk_prob": False}),
            "lfm2_moe-no-bias": ({"use_expert_bias": False, "num_dense_layers": 0}, None),
        },
    ),
}
