"""Gemma 4: sizes of single layers in both spellings, and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.convert.transfer import convert
from isthmus.errors import DataError, UsageError
from isthmus.families.registry import family_for
from isthmus.recipes.plan.layout_checks import check_stages
from ranks.tiny import build_model_folder
from ranks.tiny_families.gemma4 import SMALL

SIZES: dict[str, Any] = {
    **{
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0},
}
PUBLISHED: dict[str, Any] = {"attention_k_eq_v": True, "global_head_dim": 24, "num_global_key_value_heads": 1}
FULL = {"head_dim": 24, "num_key_value_heads": 1}


def test_both_spellings_of_layer_sizes_mean_the_same() -> None:
    published = SIZES | PUBLISHED
    family = family_for(published)
    arch = family.to_architecture(published)
    assert (arch.attention.kv_channels, arch.attention.num_query_groups) == (24, 1)
    windowed = arch.layers[0].attention
    assert windowed is not None and windowed.window is not None
    assert (windowed.kv_channels, windowed.num_query_groups) == (16, 2)
    by_layer = SIZES | {"attention_k_eq_v": True, "per_layer_config": {"1": FULL, "3": FULL}}
    assert family.to_architecture(by_layer) == arch
    assert family.to_hf_config(arch, by_layer)["per_layer_config"] == by_layer["per_layer_config"]
    written = family.to_hf_config(arch)
    assert PUBLISHED.items() <= written.items() and written["per_layer_config"] == by_layer["per_layer_config"]


def test_number_of_key_heads_without_a_window_counts_with_keys_as_values_only() -> None:
    config = SIZES | PUBLISHED | {"attention_k_eq_v": False}
    assert family_for(config).to_architecture(config).attention.num_query_groups == 2


def test_the_last_layer_has_no_window() -> None:
    config = SIZES | {"layer_types": ["full_attention", *["sliding_attention"] * 3]}
    assert family_for(config).to_architecture(config).windows.full_attention_layers == (0, 3)


def test_no_key_sets_the_period_of_layers_without_a_window() -> None:
    config = {name: value for name, value in SIZES.items() if name != "layer_types"}
    config |= {"num_hidden_layers": 12, "sliding_window_pattern": 4}
    assert family_for(config).to_architecture(config).windows.full_attention_layers == (5, 11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"per_layer_config": {"1": FULL}},
            "one num_key_value_heads for all layers without a",
        ),
        ({"per_layer_config": {"0": FULL, "1": FULL, "3": FULL}}, "and none for others"),
        ({"per_layer_config": {"1": FULL | {"intermediate_size": 8}}}, "with intermediate_size is not supported"),
        ({"use_bidirectional_attention": "all"}, "attention between all tokens"),
        ({"attention_bias": True}, "biases of attention"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input=100 is not supported; it must be vocab_size=262144",
        ),
        (
            {"enable_moe_block": True, "use_double_wide_mlp": True, "num_kv_shared_layers": 2},
            "use_double_wide_mlp with enable_moe_block",
        ),
        ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor=0.5"),
    ],
)
def test_unsupported_settings_are_rejected(change: dict[str, Any], message: str) -> None:
    config = SIZES | change
    with pytest.raises(UsageError, match=message):
        family_for(config).to_architecture(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 of 4 layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 of 4 layers"),
        ({"per_layer_config": {"7": FULL}}, "an object for layers from 0 to 3"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "at most 1",
        ),
    ],
)
def test_senseless_settings_are_rejected(change: dict[str, Any], message: str) -> None:
    config = SIZES | change
    with pytest.raises(DataError, match=message):
        family_for(config).to_architecture(config)


def test_layers_with_keys_or_inputs_of_others_have_one_pipeline_stage() -> None:
    config = SIZES | SMALL
    arch = family_for(config).to_architecture(config)
    assert [arch.key_source(layer) for layer in range(4)] == [None, None, 0, 1]
    check_stages(arch, 1)
    with pytest.raises(UsageError, match=r"pp=2 is not supported for this model, whose layers attend to keys of other"):
        check_stages(arch, 2)


@pytest.mark.slow
def test_unused_tensors_of_published_files_are_read_over(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "model", "gemma4")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    unused = {
        f"model.language_model.layers.{n}.self_attn.{name}.weight" for n in (2, 3) for name in ("k_proj", "v_proj")
    }
    assert not unused & tensors.keys()
    save_file({**tensors, **{name: torch.zeros(4, 4) for name in unused}}, file, {"format": "pt"})
    convert(folder, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", "hf")
    result = load_file(tmp_path / "back/model.safetensors")
    assert result.keys() == tensors.keys() and all(torch.equal(result[name], tensors[name]) for name in tensors)
    save_file({**tensors, "model.language_model.layers.1.self_attn.q_bias": torch.zeros(4)}, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"1 not expected: model\.language_model\.layers\.1\.self_attn\.q_bias"):
        convert(folder, tmp_path / "refused")
