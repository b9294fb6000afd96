"""Configs of published models with experts: read, counted, and written back with the same meaning."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.families.registry import family_for

_DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32}
_DEEPSEEK_YARN |= {"beta_slow": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "vocab_size": 32000,
        "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 21,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "vocab_size": 102400,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "ep_size": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 1,
        "vocab_size": 151552,
    },
    "ernie-4.5-21b-a3b": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "use_bias": False,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 103424,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
}
BILLIONS = {
    "mixtral-8x7b": 46.703,
    "qwen3-30b-a3b": 30.532,
    "qwen1.5-moe-a2.7b": 14.316,
    "olmoe-1b-7b": 6.919,
    "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.741,
    "deepseek-v3": 684.490,
    "glm-4.5-air": 110.469,
    "ernie-4.5-21b-a3b": 21.825,
    "gpt-oss-20b": 20.915,
}
"""Parameters of the published weights: including MTP layers, without the scales of quantized tensors."""


def architecture(name: str, **changes: Any) -> Architecture:
    config = CONFIGS[name] | changes
    return family_for(config).to_architecture(config)


@pytest.mark.slow_cases("qwen3-30b-a3b", "deepseek-v2", "deepseek-v3")
@pytest.mark.parametrize("name", CONFIGS)
def test_published_parameter_counts(name: str) -> None:
    config = CONFIGS[name]
    shapes = family_for(config).hf_shapes(architecture(name))
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(BILLIONS[name], abs=6e-4)


def test_routing_settings() -> None:
    assert architecture("mixtral-8x7b").setting("moe") == Experts(
        num_experts=8, top_k=2, ffn_hidden_size=14336, normalize=True
    )
    assert architecture("deepseek-v3").setting("moe") == Experts(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        dense_layers=(0, 1, 2),
        score="sigmoid",
        normalize=True,
        scaling_factor=2.5,
        expert_bias=True,
        num_groups=8,
        group_top_k=4,
    )
    assert architecture("deepseek-v2").setting("moe") == Experts(
        num_experts=160,
        top_k=6,
        ffn_hidden_size=1536,
        shared_ffn_hidden_size=3072,
        dense_layers=(0,),
        scaling_factor=16.0,
        num_groups=8,
        group_top_k=3,
        group_score="max",
    )
    assert architecture("deepseek-v2", topk_method="greedy").moe.num_groups == 1  # type: ignore[union-attr]


def test_other_names_of_settings_are_read() -> None:
    config = dict(CONFIGS["ernie-4.5-21b-a3b"])
    config |= {"num_experts": config.pop("moe_num_experts") // 2, "num_experts_per_tok": config.pop("moe_k") // 2}
    moe = family_for(config).to_architecture(config).moe
    assert moe is not None and (moe.num_experts, moe.top_k) == (32, 3)


def test_latent_attention_and_yarn() -> None:
    lite = architecture("deepseek-v2-lite")
    assert lite.setting("mla") == Latent(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert (lite.attention.kv_channels, lite.attention.num_query_groups, lite.rotary.rotary_interleaved) == (
        192,
        16,
        True,
    )
    assert lite.rotary.rope_scaling == RopeScaling(
        kind="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    )


def test_layers_without_experts() -> None:
    def dense(name: str, **changes: Any) -> tuple[int, ...]:
        moe = architecture(name, num_hidden_layers=6, layer_types=None, **changes).moe
        assert moe is not None
        return moe.dense_layers

    assert dense("qwen3-30b-a3b") == ()
    assert dense("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[3]) == (0, 2, 3, 4)
    assert dense("glm-4.5-air", first_k_dense_replace=9) == (0, 1, 2, 3, 4, 5)
    assert dense("ernie-4.5-21b-a3b", moe_layer_end_index=4, moe_layer_interval=2) == (0, 2, 4, 5)
    assert dense("ernie-4.5-21b-a3b", moe_layer_end_index=-1) == (0,)


def meaning(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": None, "architectures": None}


@pytest.mark.parametrize("name", CONFIGS)
def test_export_means_the_same(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    family, arch = family_for(config), architecture(name)
    export = family.to_hf_config(arch, config)
    assert export == family.to_hf_config(arch, export)
    assert meaning(tmp_path / "export", export) == meaning(tmp_path / "source", config)
    fresh = family.to_hf_config(arch)
    assert family.to_architecture(fresh) == arch
    theirs = meaning(tmp_path / "fresh", fresh)
    assert family.to_architecture(theirs) == arch


@pytest.mark.parametrize("name", CONFIGS)
def test_changed_numbers_replace_the_base(name: str) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 300, "num_experts_per_tok": 3, "moe_k": 3}
    changes |= {
        "first_k_dense_replace": 2,
        "mlp_only_layers": [2],
        "moe_layer_end_index": 2,
        "routed_scaling_factor": 3,
    }
    changes |= {"layer_types": None, "use_qk_norm": True, "norm_topk_prob": CONFIGS[name]["model_type"] == "qwen2_moe"}
    changes |= {"num_nextn_predict_layers": 0, "experts_per_token": 3}
    smaller = architecture(name, **changes)
    family = family_for(CONFIGS[name])
    assert smaller != architecture(name)
    assert family.to_architecture(family.to_hf_config(smaller, CONFIGS[name])) == smaller


def test_mtp_layers_without_tensors_are_not_counted() -> None:
    config = CONFIGS["deepseek-v3"] | {"num_hidden_layers": 4, "n_routed_experts": 16, "n_group": 2, "topk_group": 2}
    family = family_for(config)
    arch = family.to_architecture(config)
    assert arch.pattern.mtp_layers == 1
    names = set(family.hf_shapes(arch))
    assert {"model.layers.4.eh_proj.weight", "model.layers.4.shared_head.head.weight"} < names
    assert "model.layers.4.mlp.experts.15.down_proj.weight" in names
    placed = family.placements(arch)
    assert placed["mtp.layers.0.transformer_layer.mlp.router.expert_bias"].hf == (
        "model.layers.4.mlp.gate.e_score_correction_bias",
    )
    assert family.to_architecture(config, names) == arch
    without = family.to_architecture(config, {name for name in names if ".layers.4." not in name})
    assert without.pattern.mtp_layers == 0
    assert family.to_hf_config(without, config)["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc is not supported; greedy or group_limited"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func=softmax"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads=8 must equal"),
        ("ernie-4.5-21b-a3b", {"use_bias": True}, "use_bias=True"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    ],
)
def test_unsupported_settings_are_rejected(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        architecture(name, **change)


def test_router_noise_is_rejected_for_training_only() -> None:
    config = CONFIGS["mixtral-8x7b"] | {"router_jitter_noise": 0.1}
    family = family_for(config)
    family.to_architecture(config)
    with pytest.raises(UsageError, match=r"router_jitter_noise=0\.1 .* without noise"):
        family.check_training(config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "top_k=9 is more than the 8 experts"),
        ("deepseek-v3", {"n_group": 7}, "7 groups do not divide 256 experts"),
        ("ernie-4.5-21b-a3b", {"moe_num_experts": [64, 64]}, "moe_num_experts must be a positive integer"),
        ("ernie-4.5-21b-a3b", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index must be an integer"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
    ],
)
def test_invalid_numbers_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        architecture(name, **change)


def test_model_without_moe_layers_is_not_expressible() -> None:
    arch = architecture("ernie-4.5-21b-a3b")
    assert arch.moe is not None
    all_dense = arch.with_settings({"moe": replace(arch.moe, dense_layers=tuple(range(arch.num_layers)))})
    with pytest.raises(UsageError, match="cannot express these dense layers"):
        family_for(CONFIGS["ernie-4.5-21b-a3b"]).to_hf_config(all_dense)


def test_config_cannot_express_it() -> None:
    family = family_for(CONFIGS["deepseek-v3"])
    odd = architecture("qwen3-30b-a3b", mlp_only_layers=[5])
    with pytest.raises(UsageError, match=r"cannot express these dense layers: \[5\]"):
        family.keys["moe.dense_layers"].write((5,), odd)


def test_latent_attention_has_its_own_head_dim() -> None:
    """GLM-5.2 is published with 192, and the class of transformers overwrites it."""
    config = CONFIGS["deepseek-v3"]
    family = family_for(config)
    assert family.to_architecture(config | {"head_dim": 192}) == family.to_architecture(config)
