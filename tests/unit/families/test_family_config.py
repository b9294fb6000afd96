"""Configs: read as transformers reads them, refused by name, and written back with the same meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Dropout
from isthmus.families.blocks.delta_net import DeltaNet
from isthmus.families.blocks.rotary import RopeScaling
from isthmus.families.registry import all_families, family_for

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 77,
}
FULL = ["full_attention"] * 2
FACTORS: dict[str, Any] = {"short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (4.0, 5.0, 6.0, 7.0)}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-bare": {"model_type": "llama"},
    "llama-2": {"model_type": "llama", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "llama-3.2": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-new-keys": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3, "factor": 8.0},
    },
    "llama-yarn-by-default": {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "yarn", "factor": 32, "truncate": False, "beta_fast": 20, "mscale": 0.707}
        | {"original_max_position_embeddings": 1024, "mscale_all_dim": 0.5, "attention_factor": 0.9},
    },
    "llama-linear-old-key": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral-bare": {"model_type": "mistral"},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0, "head_dim": 32},
    "qwen2-bare": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-unused-window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1000000},
    "qwen3-bare": {"model_type": "qwen3", "num_key_value_heads": 4},
}


NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0]}
# Settings with names or defaults of one family, and the fields that they set.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-biases": (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "proj_bias": True, "mlp_bias": True},
    ),
    "qwen2-window-some-layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        {"sliding_window": 9, "full_attention_layers": (0, 1)},
    ),
    "qwen3-window-by-list": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention", *FULL]},
        {"sliding_window": 4096, "full_attention_layers": (1, 2)},
    ),
    "internlm3": (
        {
            **{"model_type": "internlm3", "bias": False, "qkv_bias": False, "rope_theta": 5e7},
            **{"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "max_position_embeddings": 32768},
        },
        {
            **{"rope_scaling": RopeScaling(kind="dynamic", factor=6.0, original_max_position_embeddings=32768)},
            **{"rotary_base": 5e7, "qkv_bias": False, "mlp_bias": False},
        },
    ),
    "internlm3-biases": (
        {"model_type": "internlm3", "bias": True, "qkv_bias": True},
        {"qkv_bias": True, "proj_bias": True, "mlp_bias": True},
    ),
    "seed_oss": ({"model_type": "seed_oss"}, {"qkv_bias": True, "proj_bias": False, "kv_channels": 128}),
    "smollm3": ({"model_type": "smollm3", "num_hidden_layers": 9}, {"unrotated_layers": (3, 7), "rotary_base": 2e6}),
    "smollm3-listed": ({"model_type": "smollm3", "no_rope_layers": [0, 1, 0]}, {"unrotated_layers": (0, 2)}),
    "granite": (
        {"model_type": "granite", "embedding_multiplier": 12, "logits_scaling": 8.0, "attention_multiplier": 0.1},
        {"embedding_multiplier": 12.0, "logits_multiplier": 0.125, "attention_scale": 0.1, "residual_multiplier": 1.0},
    ),
    "phi3": ({"model_type": "phi3"}, {"sliding_window": None, "rope_scaling": None}),
    "phi3-longrope": (
        {"model_type": "phi3", "rope_scaling": LONGROPE, "max_position_embeddings": 16384},
        {"rope_scaling": RopeScaling(kind="longrope", factor=4.0, original_max_position_embeddings=4096, **FACTORS)},
    ),
    "phi3-yarn": (
        {"model_type": "phi3", "rope_scaling": LONGROPE | {"type": "yarn"}, "max_position_embeddings": 16384},
        {"rope_scaling": RopeScaling(kind="longrope", factor=4.0, original_max_position_embeddings=4096, **FACTORS)},
    ),
    "phi3-half-a-head": ({"model_type": "phi3", "partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}),
    "starcoder2": (
        {"model_type": "starcoder2", "sliding_window": 7},
        {"sliding_window": 7, "normalization": "LayerNorm", "activation": "gelu_tanh", "gated": False},
    ),
    "gpt_neox": (
        {"model_type": "gpt_neox", "rotary_emb_base": 5000, "rotary_pct": 0.5},
        {"rotary_base": 5000.0, "rotary_percent": 0.5, "form": "parallel_two_norms", "activation": "gelu"},
    ),
    "gpt_neox-sequential": (
        {"model_type": "gpt_neox", "use_parallel_residual": False},
        {"form": "pre", "rotary_percent": 0.25},
    ),
    "olmo2": ({"model_type": "olmo2"}, {"form": "post", "qk_norm_over": "projection", "norm_epsilon": 1e-5}),
    # As in transformers, rope_theta counts only beside other rotary settings.
    "apertus": ({"model_type": "apertus", "rope_theta": 5e5}, {"rotary_base": 12e6}),
    "cwm": ({"model_type": "cwm", "rope_theta": 5e5, "head_dim": 8}, {"rotary_base": 1e6}),
    "glm4": ({"model_type": "glm4", "head_dim": 16}, {"rotary_percent": 0.5, "rotary_interleaved": True}),
    "cohere": ({"model_type": "cohere"}, {"logits_multiplier": 0.0625, "norm_bias": False, "rotary_base": 5e5}),
    "gemma": ({"model_type": "gemma", "hidden_act": "gelu"}, {"embedding_multiplier": 8.0, "activation": "gelu_tanh"}),
    "gemma2": (
        {"model_type": "gemma2", "query_pre_attn_scalar": 144},
        {"attention_scale": 1 / 12, "attention_softcap": 50.0, "sliding_window": 4096, "full_attention_layers": (1,)},
    ),
    "gemma2-uncapped": (
        {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attention_softcap": None, "logits_softcap": None},
    ),
    "gemma3_text": (
        {"model_type": "gemma3_text", "num_hidden_layers": 7},
        {"full_attention_layers": (5,), "rotary_base": 1e6, "window_rotary_base": 1e4, "rope_scaling": None},
    ),
    "gemma3_text-old-keys": (
        {
            "model_type": "gemma3_text",
            "rope_theta": 2e6,
            "rope_local_base_freq": 5000.0,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "full_attention_layers": (1,),
            "rotary_base": 2e6,
            "window_rotary_base": 5000.0,
            "rope_scaling": RopeScaling(kind="linear", factor=8.0),
        },
    ),
    "gemma3_text-new-keys": (
        {"model_type": "gemma3_text", "rope_parameters": NESTED, "layer_types": ["sliding_attention", *FULL]},
        {
            "full_attention_layers": (1, 2),
            "rotary_base": 1e6,
            "window_rotary_base": 5000.0,
            "rope_scaling": RopeScaling(kind="linear", factor=8.0),
        },
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8},
        {"kv_channels": 8, "ffn_hidden_size": 256, "num_query_groups": 8, "position": "learned"},
    ),
    "olmo_hybrid": (  # of Olmo-Hybrid-7B, whose attention has no positions
        {
            "model_type": "olmo_hybrid",
            "num_key_value_heads": None,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": None,
            "rope_theta": None,
        },
        {
            "num_query_groups": 8,
            "position": "none",
            "delta_net": DeltaNet(
                num_key_heads=8,
                num_value_heads=8,
                key_head_dim=6,
                value_head_dim=12,
                conv_kernel=4,
                norm_epsilon=1e-5,
                negative_eigenvalues=True,
            ),
        },
    ),
    "olmo_hybrid-rotated": (
        {
            "model_type": "olmo_hybrid",
            "num_key_value_heads": 4,
            "rope_parameters": None,
            "linear_allow_neg_eigval": False,
        },
        {"position": "rope", "mixers": (("gated_delta_net",), ("gated_delta_net",), ("attention",))},
    ),
}


def config_of(name: str) -> dict[str, Any]:
    if name in CONFIGS:
        return SIZES | CONFIGS[name]
    config = OTHERS[name][0]
    return (
        config | {"vocab_size": 77} if config["model_type"] == "gpt2" else SIZES | {"num_key_value_heads": 2} | config
    )


def meaning(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": None}


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture_is_what_transformers_reads(name: str, tmp_path: Path) -> None:
    config = SIZES | CONFIGS[name]
    arch = family_for(config).to_architecture(config)
    hf = meaning(tmp_path / "source", config)
    assert arch.attention.num_query_groups == hf["num_key_value_heads"]
    assert arch.attention.kv_channels == (hf.get("head_dim") or 64 // 8)
    assert arch.max_position_embeddings == hf["max_position_embeddings"]
    assert arch.norm.norm_epsilon == hf["rms_norm_eps"]
    assert arch.head.tie_embeddings == hf["tie_word_embeddings"]
    assert arch.rotary.rotary_base == hf["rope_parameters"]["rope_theta"]
    assert (arch.rotary.rope_scaling.kind if arch.rotary.rope_scaling else "default") == hf["rope_parameters"][
        "rope_type"
    ]
    slides = "sliding_attention" in hf.get("layer_types", ["sliding_attention"] if name.startswith("mistral") else [])
    assert arch.windows.sliding_window == (hf["sliding_window"] if slides else None)


@pytest.mark.parametrize("name", OTHERS)
def test_family_specific_keys(name: str) -> None:
    config, (_, expected) = config_of(name), OTHERS[name]
    arch = family_for(config).to_architecture(config)
    assert {name: arch.setting(name) for name in expected} == expected


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_export_means_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    family = family_for(config)
    arch = family.to_architecture(config)
    export = family.to_hf_config(arch, config)
    assert export == family.to_hf_config(arch, export)
    source, written = meaning(tmp_path / "source", config), meaning(tmp_path / "export", export)
    assert written.pop("architectures") == [family.hf_architecture]
    source.pop("architectures")
    assert written == source
    theta = family.rope_names.get("rope_theta", "rope_theta")
    assert arch.embedding.position != "rope" or {theta, "rope_scaling", "rope_parameters"} <= export.keys()


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_new_config_reads_back(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    family = family_for(config)
    arch = family.to_architecture(config)
    fresh = family.to_hf_config(arch, dtype="bfloat16")
    assert family.to_architecture(fresh) == arch
    hf = AutoConfig.for_model(**fresh)
    assert hf.num_hidden_layers == arch.num_layers
    assert getattr(hf, "num_key_value_heads", hf.num_attention_heads) == arch.attention.num_query_groups
    if arch.embedding.position == "rope":
        rope = meaning(tmp_path / "fresh", fresh)["rope_parameters"]
        assert rope.get("full_attention", rope)["rope_theta"] == arch.rotary.rotary_base


def test_changed_numbers_replace_the_base() -> None:
    base = SIZES | CONFIGS["qwen2-window"]
    family = family_for(base)
    longer = SIZES | CONFIGS["qwen2-bare"] | {"num_hidden_layers": 5, "vocab_size": 80, "rope_theta": 5e5}
    arch = family.to_architecture(longer)
    assert family.to_architecture(family.to_hf_config(arch, base | {"auto_map": {}})) == arch


def test_llama3_scaling_keeps_any_factor() -> None:
    arch = family_for({"model_type": "llama"}).to_architecture(SIZES | CONFIGS["llama-3.2"])
    assert arch.rotary.rope_scaling == RopeScaling(kind="llama3", **LLAMA3)
    assert arch.rotary.rotary_base == 500000.0


def test_an_unknown_family_has_the_three_nearest_names() -> None:
    with pytest.raises(UsageError) as caught:
        family_for({"model_type": "qwen4"})
    near = re.search(r"no family has the model_type 'qwen4'. The nearest are (.*); docs", str(caught.value))
    assert near is not None and near[1].split(", ")[0] in ("qwen2", "qwen3") and len(near[1].split(", ")) == 3
    assert "docs/reference/families.md" in str(caught.value)
    with pytest.raises(UsageError, match="None"):
        family_for({})
    assert list(all_families()) == sorted(all_families())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported for llama"),
        ({"rope_scaling": {"type": "xpos", "factor": 4.0}}, "rope type 'xpos' is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}},
            "original_max_position_embeddings=32 is not supported",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3},
            "3 of 3 layers have sliding_attention, but",
        ),
        (
            {"model_type": "gemma2", "sliding_window": None},
            "2 of 3 layers have sliding_attention, but",
        ),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "chunked_attention is not supported"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "starcoder2", "hidden_act": "mish"}, "hidden_act=mish is not supported; gelu"),
        ({"model_type": "starcoder2", "hidden_act": ["gelu"]}, "hidden_act=.'gelu'. is not supported; gelu"),
        ({"model_type": "falcon", "alibi": True}, "alibi=True"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "only causal attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 9.0}, "does not cap"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is not a kind of layer"),
        (
            {"model_type": "olmo3", "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5}},
            r'ignores .* write rope_parameters: \{"full_attention": \{"rope_type": "yarn", "factor": 8.0',
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope scaling is not supported in sliding_attention layers",
        ),
    ],
)
def test_unsupported_settings_are_rejected(change: dict[str, Any], message: str) -> None:
    config = SIZES | {"model_type": "llama", "num_key_value_heads": 2} | change
    with pytest.raises(UsageError, match=message):
        family_for(config).to_architecture(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be a boolean"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope type 'llama3' needs a positive low_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, "rope type 'yarn' needs a positive factor, got -1.0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number, got '1e4'"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 0}, "rope_local_base_freq must be a positive number"),
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.1},
            "partial_rotary_factor=0.1 of head_dim 8 must be an even number",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "'longrope' needs a positive short_factor, got None"),
        (
            {"model_type": "phi3", "rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "short_factor must have 4 numbers, got 1",
        ),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must not be 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must list all 3 layers"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types must list the kind of each of 3"),
        ({"model_type": "gemma2", "sliding_window_pattern": "6"}, "sliding_window_pattern must be a positive integer"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window must be a positive integer or null"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a positive integer or null, got 0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers must be an integer, got None",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type must be a name such as 'yarn', got \['yarn'\]"),
        ({"rope_scaling": {"type": None, "factor": 2.0}}, "rope_type must be a name such as 'yarn', got None"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": [32]}},
            r"beta_fast of rope type 'yarn' must be a number, got \[32\]",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": [1]},
            r"rope_parameters must have an object for each kind of layer, got \[1\]",
        ),
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers; at most 4,096"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers must be a positive integer, got 1000"),
        ({"num_attention_heads": 10**9, "num_key_value_heads": 1, "head_dim": 2}, "1,000,000,000 attention heads"),
        ({"vocab_size": 10**10}, "vocab_size must be a positive integer, got 10000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a non-negative number, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a non-negative number, got 1000"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "3,000,000,000 experts in all layers; at most 131,072"),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 10**9, "first_k_dense_replace": 10**9},
            "1,000,000,000 layers",
        ),
    ],
)
def test_invalid_numbers_are_named(change: dict[str, Any], message: str) -> None:
    config = SIZES | {"model_type": "llama", "num_key_value_heads": 2} | change
    with pytest.raises(DataError, match=message):
        family_for(config).to_architecture(config)


@pytest.mark.parametrize(
    ("config", "dropout"),
    [
        ({"model_type": "llama", "attention_dropout": 0.1}, Dropout(attention=0.1)),
        ({"model_type": "llama", "attention_dropout": None}, Dropout()),
        ({"model_type": "gpt2", "attn_pdrop": 0.0}, Dropout(hidden=0.1, embedding=0.1)),
        ({"model_type": "seed_oss"}, Dropout(attention=0.1, hidden=0.1)),
        ({"model_type": "starcoder2", "residual_dropout": 0.2}, Dropout(hidden=0.2)),
        ({"model_type": "gpt_neox", "hidden_dropout": 0.2}, Dropout(hidden=0.2, embedding=0.2)),
        ({"model_type": "phi3", "resid_pdrop": 0.2, "embd_pdrop": 0.3}, Dropout(hidden=0.2)),
    ],
)
def test_dropout_is_read_and_written(config: dict[str, Any], dropout: Dropout) -> None:
    family = family_for(config)
    more = {"n_embd": 64, "n_layer": 3, "n_head": 8} if family.name == "gpt2" else {"num_key_value_heads": 2}
    full = SIZES | more | config
    assert family.read_dropout(full) == dropout
    arch = family.to_architecture(full)
    assert family.read_dropout(family.to_hf_config(arch, full)) == dropout
    assert family.to_hf_config(arch, full, dropout=dropout) == family.to_hf_config(arch, full)
    assert family.read_dropout(family.to_hf_config(arch)) == Dropout()
    other = Dropout(**{name: 0.25 for name in family.dropout})
    assert family.read_dropout(family.to_hf_config(arch, full, dropout=other)) == other


def test_a_dropout_rate_is_below_one() -> None:
    config = {"model_type": "llama", "attention_dropout": 1.0}
    with pytest.raises(DataError, match="attention_dropout must be below 1, got 1"):
        family_for(config).read_dropout(config)
