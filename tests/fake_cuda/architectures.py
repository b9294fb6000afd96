"""Small models that together have every trait of an architecture, and the layouts and precisions they are traced in."""

from __future__ import annotations

from typing import Any

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 77},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None},
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"qk_rope_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    **{"num_nextn_predict_layers": 0},
}

TRAITS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied, GQA, unrotated layers": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "tied, qk norm, window": (
        "qwen3", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "learned positions, LayerNorm, biases, MHA, dropout": ("gpt2", {"n_inner": 128}),
    "sandwich norms, softcap, GeGLU": ("gemma2", {"sliding_window": 5}),
    "zero-centered norms, two rotary bases": (
        "gemma3_text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "parallel block, multipliers": ("cohere", {}),
    "parallel block with two norms, partial rope": ("gpt_neox", {}),
    "post norms, qk norm over all heads": ("olmo2", {}),
    "experts with biases, sinks, YaRN": (
        "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_parameters": _YARN},
    ),
    "MLA, shared experts, groups, expert bias": ("deepseek_v3", _LATENT),
    "MTP": ("deepseek_v3", _LATENT | {"num_nextn_predict_layers": 1}),
    "gated shared expert, qkv biases": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64},
    ),
    "delta nets, gated attention": (
        "qwen3_next",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_key_heads": 2,
         "shared_expert_intermediate_size": 64, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "full_attention_interval": 2},
    ),
    "delta nets with decays of channels": (
        "kimi_linear",
        {"num_experts": 4, "num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4,
         "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
         "v_head_dim": 16, "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "delta nets with full-rank gates, gates of heads": (
        "bailing_hybrid",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_key_value_heads": 4, "kv_lora_rank": 32,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32,
         "layer_group_size": 2, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 0, "num_mtp_layers": 0,
         "eos_token_id": 2},
    ),
    "attention beside Mamba-2, multipliers": (
        "falcon_h1",
        {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_d_ssm": 128,
         "mlp_multipliers": [2.0, 0.6], "ssm_multipliers": [0.9, 1.1, 1.3, 0.7, 1.6]},
    ),
    "one block in each layer": (
        "nemotron_h",
        {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64},
    ),
    "Mamba-1": (
        "jamba",
        {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "mamba_dt_rank": 16, "mamba_d_state": 16},
    ),
    "short convolutions": (
        "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "selected keys": ("deepseek_v32", _LATENT | {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}),
    "xIELU": ("apertus", {}),
}  # fmt: skip
_WITHOUT_CP = {
    "qwen3_next",
    "kimi_linear",
    "bailing_hybrid",
    "falcon_h1",
    "nemotron_h",
    "jamba",
    "lfm2",
    "deepseek_v32",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"size": 2, "tp": 2, "sp": False},
    "tp, sp, last of pp": {"size": 4, "tp": 2, "pp": 2, "rank": 3},
    "cp, first of pp": {"size": 4, "cp": 2, "pp": 2, "rank": 0},
    "fsdp": {"size": 2, "fsdp": True},
    "ep": {"size": 2, "ep": 2},
    "ep, etp": {"size": 4, "tp": 2, "ep": 2, "etp": 1},
}
PRECISIONS = ("bf16", "fp32", "fp8", "fp16")


def config_of(trait: str, **changed: Any) -> dict[str, Any]:
    """The Hugging Face config of a model in :data:`TRAITS`; ``changed`` replaces settings."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family, settings = TRAITS[trait]
    known = CONFIG_MAPPING[family]().to_dict().keys() | CONFIG_MAPPING[family].attribute_map.keys()
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return AutoConfig.for_model(family, **sizes | settings | changed).to_dict()


def cases(trait: str, gpu: str) -> list[tuple[str, str]]:
    """(layout, precision): each layout with the model, and each precision with each layout and with each model.

    Half of the cases are for NVIDIA, half for AMD.
    """
    family, settings = TRAITS[trait]
    if settings.get("num_nextn_predict_layers"):  # a run refuses MTP layers with cp and fsdp
        layouts = ["tp, sp, last of pp", "ep"]
    else:
        has_experts = any("experts" in key for key in settings)
        layouts = [name for name in LAYOUTS if name != "tp" and (has_experts or "ep" not in LAYOUTS[name])]
        layouts = [name for name in layouts if family not in _WITHOUT_CP or "cp" not in LAYOUTS[name]]
        layouts += [] if has_experts else ["tp"]
    first = list(TRAITS).index(trait)
    results = []
    for number, layout in enumerate(layouts):
        choices = PRECISIONS[:2] if "fsdp" in LAYOUTS[layout] else PRECISIONS  # fsdp refuses fp8 and fp16
        results.append((layout, choices[(first + number) % len(choices)]))
    missing = [precision for precision in reversed(PRECISIONS) if precision not in {item for _, item in results}]
    results += [(layouts[-1 - number], precision) for number, precision in enumerate(missing)]
    return results[(first // 2 + gpu.startswith("gfx")) % 2 :: 2]
