"""Step 3.5 and 3.7: the spelling of published configs, whose lists also have entries of MTP layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from isthmus.convert.transfer import convert
from isthmus.errors import DataError, UsageError
from isthmus.families.registry import all_families
from ranks.tiny import build_model_folder

FULL, SLIDING = "full_attention", "sliding_attention"
PUBLISHED: dict[str, Any] = {
    **{"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "vocab_size": 128896},
    **{"hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 5, "num_nextn_predict_layers": 3},
    **{"num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "max_position_embeddings": 262144},
    **{"moe_layers_enum": "3,4", "moe_num_experts": 288, "moe_top_k": 8, "share_expert_dim": 1280, "use_moe": True},
    **{"moe_intermediate_size": 1280, "norm_expert_weight": True, "moe_router_activation": "sigmoid"},
    **{"moe_router_scaling_factor": 3.0, "use_moe_router_bias": True, "use_head_wise_attn_gate": True},
    **{"att_impl_type": "GQA", "need_fp32_gate": True, "use_rope_layers": [], "zero_centered": True},
    **{"sliding_window": 512, "yarn_only_types": [FULL]},
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING],
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0, 5000000.0, 10000.0, 10000.0, 10000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
    "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.0, 16.0, 0.0, 0.0, 0.0],
    "attention_other_setting": {
        **{"attention_type": SLIDING, "num_attention_heads": 96, "num_attention_groups": 8},
        **{"head_dim": 128, "true_head_dim": 128},
    },
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072},
        **{"low_freq_factor": 1.0, "high_freq_factor": 32.0},
    },
}
FAMILY = all_families()["step3p5"]


def test_a_published_config_means_what_transformers_reads() -> None:
    result = FAMILY.to_architecture(PUBLISHED)
    assert result == FAMILY.to_architecture(AutoConfig.for_model(**PUBLISHED).to_dict())
    windowed = result.layers[1].attention
    assert windowed is not None and windowed.rotary is not None
    assert windowed.num_attention_heads == 96 and windowed.rotary.rotary_percent == 1.0
    assert (result.rotary.rotary_base, result.rotary.rotary_percent) == (5e6, 0.5)
    assert result.windows.window_rotary_base == 1e4
    assert result.rotary.rope_scaling is not None and result.rotary.rope_scaling.factor == 2.0
    assert result.moe is not None and result.moe.dense_layers == (0, 1, 2) and result.moe.swiglu_limits[4] == 7.0
    assert result.mlp.swiglu_limits == (None, None, None, None, 16.0)


def test_exports_keep_the_spelling_of_the_source() -> None:
    arch = FAMILY.to_architecture(PUBLISHED)
    assert FAMILY.to_hf_config(arch, PUBLISHED) == PUBLISHED
    padded = FAMILY.to_hf_config(replace(arch, vocab_size=128), PUBLISHED)
    assert padded == PUBLISHED | {"vocab_size": 128}


def test_other_rotary_settings_need_the_class_of_transformers() -> None:
    arch = FAMILY.to_architecture(PUBLISHED).with_settings({"rotary_base": 1e6})
    with pytest.raises(UsageError, match="rotary settings of step3p5 cannot be changed"):
        FAMILY.to_hf_config(arch, PUBLISHED)
    full = all_families()["step3p7"]
    nested = {"model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"], "text_config": PUBLISHED}
    export = full.to_hf_config(replace(arch, family="step3p7"), nested)
    assert "rope_theta" not in export["text_config"]
    assert export["text_config"]["rope_parameters"][FULL]["rope_theta"] == 1e6
    assert full.to_architecture(export) == replace(arch, family="step3p7")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rope_theta": [1.0] * 4}, "rope_theta has 4 entries for 5 layers and 3 MTP layers"),
        ({"rope_theta": [1.0, 2.0, 3.0, 3.0, 1.0]}, "differ among sliding_attention layers"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups=4 is not supported"),
        (
            {"per_layer_config": {"0": {"num_attention_heads": 32}}},
            "per_layer_config is supported for num_attention_heads of",
        ),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum must be numbers of layers"),
        ({"swiglu_limits": [-1.0] * 5}, "swiglu_limits must not be negative"),
        ({"zero_centered": False}, "zero_centered=False is not supported"),
    ],
)
def test_refused_settings(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((DataError, UsageError), match=problem):
        FAMILY.to_architecture(PUBLISHED | settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["step3p5", "step3p7"])
def test_mtp_layers_are_copied(family: str, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family)
    (file,) = model.glob("*.safetensors")
    extra = {f"model.layers.4.{name}.weight": torch.randn(3, 2) for name in ("eh_proj", "self_attn.q_proj")}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    convert(model, tmp_path / "megatron", to="megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    (back,) = (tmp_path / "back").glob("*.safetensors")
    result, source = load_file(back), load_file(file)
    assert result.keys() == source.keys()
    assert all(torch.equal(result[name], source[name]) for name in source)
