"""Configs: read as transformers reads them, refused by name, and written back with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import RopeScaling
from isthmus.families.registry import all_families, family_for

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 77,
}
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


def meaning(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": None}


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture_is_what_transformers_reads(name: str, tmp_path: Path) -> None:
    config = SIZES | CONFIGS[name]
    arch = family_for(config).to_architecture(config)
    hf = meaning(tmp_path / "source", config)
    assert arch.num_query_groups == hf["num_key_value_heads"]
    assert arch.kv_channels == (hf.get("head_dim") or 64 // 8)
    assert arch.max_position_embeddings == hf["max_position_embeddings"]
    assert arch.norm_epsilon == hf["rms_norm_eps"]
    assert arch.tie_embeddings == hf["tie_word_embeddings"]
    assert arch.rotary_base == hf["rope_parameters"]["rope_theta"]
    assert (arch.rope_scaling.kind if arch.rope_scaling else "default") == hf["rope_parameters"]["rope_type"]
    slides = "sliding_attention" in hf.get("layer_types", ["sliding_attention"] if name.startswith("mistral") else [])
    assert arch.sliding_window == (hf["sliding_window"] if slides else None)


@pytest.mark.parametrize("name", CONFIGS)
def test_export_means_the_same(name: str, tmp_path: Path) -> None:
    config = SIZES | CONFIGS[name]
    family = family_for(config)
    arch = family.to_architecture(config)
    export = family.to_hf_config(arch, config)
    assert export == family.to_hf_config(arch, export)
    source, written = meaning(tmp_path / "source", config), meaning(tmp_path / "export", export)
    assert written.pop("architectures") == [family.hf_architecture]
    source.pop("architectures")
    assert written == source
    assert {"rope_theta", "rope_scaling", "rope_parameters"} <= export.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_made_from_nothing_reads_back(name: str, tmp_path: Path) -> None:
    config = SIZES | CONFIGS[name]
    family = family_for(config)
    arch = family.to_architecture(config)
    fresh = family.to_hf_config(arch, dtype="bfloat16")
    assert family.to_architecture(fresh) == arch
    hf = AutoConfig.for_model(**fresh)
    assert (hf.num_hidden_layers, hf.num_key_value_heads) == (arch.num_layers, arch.num_query_groups)
    assert meaning(tmp_path / "fresh", fresh)["rope_parameters"]["rope_theta"] == arch.rotary_base


def test_changed_numbers_replace_those_of_the_base() -> None:
    base = SIZES | CONFIGS["qwen2-window"]
    family = family_for(base)
    longer = SIZES | CONFIGS["qwen2-bare"] | {"num_hidden_layers": 5, "vocab_size": 80, "rope_theta": 5e5}
    arch = family.to_architecture(longer)
    assert family.to_architecture(family.to_hf_config(arch, base | {"auto_map": {}})) == arch


def test_llama3_scaling_keeps_any_factor() -> None:
    arch = family_for({"model_type": "llama"}).to_architecture(SIZES | CONFIGS["llama-3.2"])
    assert arch.rope_scaling == RopeScaling(kind="llama3", **LLAMA3)
    assert arch.rotary_base == 500000.0


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'gpt2' is not a known family\. Known are llama, mistral, qwen2, qwen3"):
        family_for({"model_type": "gpt2"})
    with pytest.raises(UsageError, match="None"):
        family_for({})
    assert list(all_families()) == sorted(all_families())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported for llama"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are quantised"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "2 of 3 layers slide"),
        ({"model_type": "qwen3", "attention_bias": True}, "output projection"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = SIZES | {"model_type": "llama", "num_key_value_heads": 2} | change
    with pytest.raises(UsageError, match=message):
        family_for(config).to_architecture(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, got 0"),
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
    ],
)
def test_broken_numbers_are_named(change: dict[str, Any], message: str) -> None:
    config = SIZES | {"model_type": "llama"} | change
    with pytest.raises(DataError, match=message):
        family_for(config).to_architecture(config)
