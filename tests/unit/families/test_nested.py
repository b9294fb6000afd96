"""Configs of multimodal models: their language model, and what stays around it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from isthmus.errors import DataError, UsageError
from isthmus.families.registry import family_for, language_config
from ranks.tiny import tiny_config

HEAD = "language_model.lm_head.weight"


def mistral3(**changes: Any) -> dict[str, Any]:
    return {**tiny_config("mistral3").to_dict(), **changes}


def test_only_the_language_model_changes() -> None:
    config = mistral3(torch_dtype="bfloat16", image_token_index=7)
    family = family_for(config)
    arch = family.to_architecture(config)
    longer = family.to_hf_config(replace(arch, max_position_embeddings=256), config, dtype="float16")
    assert longer["text_config"]["max_position_embeddings"] == 256 and longer["text_config"]["dtype"] == "float16"
    assert longer["dtype"] == longer["torch_dtype"] == "float16"
    assert longer["vision_config"] == config["vision_config"] and longer["image_token_index"] == 7
    assert "max_position_embeddings" not in longer


def test_published_config_of_gemma_3_4b() -> None:
    section = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    section |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": section}
    arch = family_for(config).to_architecture(config)
    assert (arch.attention.num_attention_heads, arch.vocab_size) == (8, 262208)
    assert arch == family_for(config).to_architecture(AutoConfig.for_model(**config).to_dict())


def test_a_new_config_reads_back() -> None:
    family = family_for(mistral3())
    for tied in (True, False):
        arch = family.to_architecture(mistral3()).with_settings({"tie_embeddings": tied})
        assert family.to_architecture(family.to_hf_config(arch)) == arch


@pytest.mark.parametrize(
    ("key", "tensors", "tied"),
    [(True, {HEAD}, True), (False, (), False), (None, (), True), (None, None, True), (None, {HEAD}, False)],
)
def test_an_output_layer_in_the_file_is_not_tied_by_default(key: bool | None, tensors: Any, tied: bool) -> None:
    config = mistral3(tie_word_embeddings=key)
    family = family_for(config)
    arch = family.to_architecture(config, tensors)
    assert arch.head.tie_embeddings == tied
    assert family.to_architecture(family.to_hf_config(arch, config), () if tied else {HEAD}).head.tie_embeddings == tied
    assert family.to_hf_config(arch, config)["text_config"]["tie_word_embeddings"] is False  # as before


def test_the_language_model_selects_the_family() -> None:
    config = mistral3()
    del config["text_config"]["model_type"]
    assert family_for(config) is family_for(mistral3())
    config["text_config"]["model_type"] = "ministral3"
    assert family_for(config).language_model is family_for({"model_type": "ministral3"})
    config["text_config"]["model_type"] = "qwen3"
    with pytest.raises(UsageError, match="mistral3 around a language model of type 'qwen3' is not supported; around "):
        family_for(config)
    kimi = tiny_config("kimi_k25").to_dict()
    kimi["text_config"]["model_type"] = "kimi_k2"
    family = family_for(kimi)
    assert family.to_hf_config(family.to_architecture(kimi), kimi)["text_config"]["model_type"] == "kimi_k2"


def test_unusable_configs_are_refused() -> None:
    family = family_for(mistral3())
    with pytest.raises(DataError, match="text_config must be the object of the language model, got None"):
        family.to_architecture({"model_type": "mistral3"})
    with pytest.raises(UsageError, match=r"reward model \(Mistral3ForSequenceClassification\) is not supported"):
        family.to_architecture(mistral3(architectures=["Mistral3ForSequenceClassification"]))


def test_language_config_of_other_models_is_all_of_it() -> None:
    for config in ({"model_type": "llama"}, {"model_type": "unknown"}, {}):
        assert language_config(config) is config
    assert language_config(mistral3())["model_type"] == "mistral"


def test_published_config_of_qwen2_5_vl_has_no_section() -> None:
    """Export and transformers have the same section for it."""
    language: dict[str, Any] = {
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rope_theta": 1000000.0},
        **{"rms_norm_eps": 1e-6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        **{"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28, "eos_token_id": 151645},
    }
    around: dict[str, Any] = {
        **{"model_type": "qwen2_5_vl", "vision_config": {"depth": 32, "hidden_size": 1280}, "image_token_id": 151655},
        **{"vision_start_token_id": 151652, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    }
    config = around | language
    family = family_for(config)
    arch = family.to_architecture(config)
    theirs = AutoConfig.for_model(**config)
    assert arch == family.to_architecture(theirs.to_dict())
    assert (arch.rotary.rotary_base, arch.rotary.rope_scaling, arch.attention.qkv_bias, arch.attention.kv_channels) == (
        1e6,
        None,
        True,
        128,
    )
    longer = family.to_hf_config(replace(arch, max_position_embeddings=262144), config)
    assert longer.keys() == {*around, "text_config", "dtype", "architectures"}
    assert longer["vision_config"] == around["vision_config"]
    section = AutoConfig.for_model(**longer).text_config
    assert section.rope_parameters["mrope_section"] == [16, 24, 24] and section.max_position_embeddings == 262144
    assert section.rope_parameters | {"type": "mrope"} == theirs.text_config.rope_parameters
    assert section.eos_token_id == 151645


@pytest.mark.parametrize(("outside", "inside"), [(True, False), (False, True), (False, False)])
def test_either_place_ties_the_embeddings(outside: bool, inside: bool) -> None:
    config = tiny_config("llava_onevision").to_dict() | {"tie_word_embeddings": outside}
    config["text_config"]["tie_word_embeddings"] = inside
    family = family_for(config)
    arch = family.to_architecture(config)
    assert arch.head.tie_embeddings == (outside or inside)
    assert AutoConfig.for_model(**config).tie_word_embeddings == arch.head.tie_embeddings
    for tied in (True, False):
        written = family.to_hf_config(arch.with_settings({"tie_embeddings": tied}), config)
        assert family.to_architecture(written).head.tie_embeddings == tied
        assert AutoConfig.for_model(**written).tie_word_embeddings == tied


def test_square_experts_are_refused() -> None:
    config = tiny_config("qwen3_vl_moe").to_dict()
    config["text_config"]["moe_intermediate_size"] = config["text_config"]["hidden_size"] // 2
    with pytest.raises(UsageError, match="makes the experts' matrices square"):
        family_for(config).to_architecture(config)


@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize(
    "outside",
    [
        *({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, {"tie_embedding": False}),
        {"tie_embedding": True, "tie_word_embeddings": False},
    ],
)
def test_tie_embedding_of_lfm2_vl_counts_outside_of_the_section(outside: dict[str, bool], inside: bool | None) -> None:
    config = tiny_config("lfm2_vl").to_dict()
    del config["tie_word_embeddings"]
    config |= outside
    if inside is not None:
        config["text_config"]["tie_embedding"] = inside
    family = family_for(config)
    arch = family.to_architecture(config)
    assert arch.head.tie_embeddings == AutoConfig.for_model(**copy.deepcopy(config)).tie_word_embeddings
    for tied in (True, False):
        changed = family.to_hf_config(arch.with_settings({"tie_embeddings": tied}), config)
        assert changed["text_config"].get("tie_embedding") == inside
        assert family.to_architecture(changed).head.tie_embeddings == tied
        assert AutoConfig.for_model(**copy.deepcopy(changed)).tie_word_embeddings == tied
