"""Every setting of a family's config class in transformers is read, has one supported value, or has no effect."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.families.architecture import Architecture
from isthmus.families.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.families.registry import all_families
from ranks.tiny import VOCAB, tiny_config
from sweep import swept

# Those of a multimodal model's language model are tested with the language model.
FAMILIES = sorted(name for name, family in all_families().items() if name in CONFIG_MAPPING and family.nested is None)
READ_IN_OTHER_CONFIGS = {
    "deepseek_v2": {"n_group", "topk_group"},  # with grouped experts
    "phi3": {"original_max_position_embeddings"},  # with rope scaling
}
WITHOUT_EFFECT: dict[str, Any] = {
    "attention_softmax_in_fp32": False,  # of float32
    "block_ffn_dim_multiplier": 3.0,  # without block_auto_adjust_ff_dim
    "block_multiple_of": 64,  # without block_auto_adjust_ff_dim
    "classifier_dropout": 0.9,
    "embd_pdrop": 0.9,
    "embedding_initializer_range": 0.5,
    "enable_moe_fp32_combine": False,  # of float32
    "expand": 3,
    "head_dim": 4,  # overwritten in classes with latent attention
    "hidden_dropout": 0.5,
    "is_decoder": True,
    "layer_norm_eps": 0.5,
    "linear_a_log_max": 8.0,
    "linear_a_log_min": 1.0,
    "linear_dt_init_floor": 0.01,
    "linear_dt_max": 0.5,
    "linear_dt_min": 0.01,
    "mamba_expand": 3,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": True,
    "mamba_ssm_cache_dtype": "bfloat16",
    "moe_shared_expert_overlap": False,
    "mtp_layer_types": ["full_attention"],
    "mtp_layers_block_type": ["moe"],
    "mtp_mlp_layer_types": ["dense"],
    "n_ctx": 64,
    "n_shared_experts": 3,
    "num_logits_to_keep": 3,
    "num_mtp_layers": 1,
    "pretraining_tp": 2,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,  # of float32
    "router_jitter_noise": 0.5,
    "scale_attention_softmax_in_fp32": False,
    "time_step_floor": 0.01,
    "time_step_init_scheme": "constant",
    "time_step_limit": (0.0, 0.01),
    "time_step_max": 0.5,
    "time_step_min": 0.01,
    "time_step_rank": 3,
    "time_step_scale": 2.0,
}
"""Another value of settings that classes have and do not use, or not for logits."""


def unread_settings(name: str) -> set[str]:
    family, config = all_families()[name], tiny_config(name).to_dict()
    # A list by layer, or sizes of single layers, take the place of other settings.
    lists = {key for key, value in config.items() if isinstance(value, list) and len(value) > 1}
    unlisted = {key: value for key, value in config.items() if key not in lists | {"per_layer_config"}}
    read = keys_read(family, config) | keys_read(family, unlisted)
    read |= READ_IN_OTHER_CONFIGS.get(name, set())
    read |= {alias for key in family.keys.values() for alias in key.aliases if key.hf in read}
    settings = {field.name for field in fields(CONFIG_MAPPING[name]) if not is_metadata(field.name)}
    return settings - read - {*IGNORED_KEYS}


@pytest.mark.parametrize("name", swept(FAMILIES))
def test_settings_that_are_not_read_do_not_change_the_logits(name: str) -> None:
    unread = unread_settings(name)
    assert unread <= WITHOUT_EFFECT.keys()
    if not unread:
        return

    def network(**settings: Any) -> Any:
        return AutoModelForCausalLM.from_config(tiny_config(name, **settings)).eval()

    plain, other = network(), network(**{key: WITHOUT_EFFECT[key] for key in unread})
    assert all(getattr(plain.config, key) != WITHOUT_EFFECT[key] for key in unread)
    other.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.arange(20)[None] % VOCAB
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, other(tokens).logits)


SIZES = {
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("n_layer", "n_embd", "n_head", "num_layers", "num_heads", "ffn_dim", "moe_intermediate_size"),
    *("n_routed_experts", "num_experts_per_tok", "max_position_embeddings"),
}
OWN_SIZES = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
}


@pytest.mark.parametrize("name", swept(FAMILIES))
def test_absent_settings_are_what_the_class_assumes(name: str) -> None:
    family, kind = all_families()[name], CONFIG_MAPPING[name]
    sizes = {key: value for key, value in kind().to_dict().items() if key in SIZES and value is not None}
    config = {"model_type": name} | sizes | OWN_SIZES.get(name, {})

    def meaning(hf: dict[str, Any]) -> Architecture:
        result = family.to_architecture(hf)
        return result.with_settings(
            {"attention_scale": result.attention.attention_scale or result.attention.kv_channels**-0.5}
        )

    assert meaning(config) == meaning(kind.from_dict(config).to_dict())
