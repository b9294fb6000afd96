"""Every setting of a family's config class in transformers is read, has one supported value, or has no effect."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isthmus.families.registry import all_families
from isthmus.families.rules.known_keys import IGNORED_KEYS, is_metadata, keys_read
from ranks.tiny import VOCAB, tiny_config

# Those of a multimodal model's language model are tested with the language model.
FAMILIES = sorted(name for name, family in all_families().items() if name in CONFIG_MAPPING and family.nested is None)
READ_IN_OTHER_CONFIGS = {
    "deepseek_v2": {"n_group", "topk_group"},  # with grouped experts
    "deepseek_v32": {"first_k_dense_replace"},  # without mlp_layer_types
    "exaone4": {"sliding_window_pattern"},  # without layer_types
    "glm_moe_dsa": {"first_k_dense_replace"},  # without mlp_layer_types
    "phi3": {"original_max_position_embeddings"},  # with rope scaling
    "smollm3": {"no_rope_layer_interval"},  # without no_rope_layers
}
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "biogpt": {"layer_norm_eps": 0.5},
    "cwm": {"pretraining_tp": 2},
    "deepseek_v3": {"num_mtp_layers": 1},
    "glm4_moe": {"num_mtp_layers": 1},
    "gpt_bigcode": {"attention_softmax_in_fp32": False, "scale_attention_softmax_in_fp32": False},  # of float32
    "gpt_neo": {"classifier_dropout": 0.9},
    "gpt_neox": {"classifier_dropout": 0.9, "is_decoder": True},
    "hunyuan_v1_dense": {"pretraining_tp": 2},
    "hy_v3": {"enable_moe_fp32_combine": False},  # of float32
    "kimi_k2": {"num_mtp_layers": 1},
    "llama": {"pretraining_tp": 2},
    "minicpm3": {"pretraining_tp": 2},
    "phi3": {"embd_pdrop": 0.9},
    "seed_oss": {"pretraining_tp": 2},
    "youtu": {"embedding_initializer_range": 0.5},  # of given weights
}
"""Another value of each."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_is_known(name: str) -> None:
    read = keys_read(all_families()[name], tiny_config(name).to_dict())
    settings = [field.name for field in fields(CONFIG_MAPPING[name]) if not is_metadata(field.name)]
    unread = {setting for setting in settings if setting not in read and setting not in IGNORED_KEYS}
    assert unread == {*WITHOUT_EFFECT.get(name, ()), *READ_IN_OTHER_CONFIGS.get(name, ())}


@pytest.mark.parametrize(("name", "changed"), WITHOUT_EFFECT.items())
def test_other_settings_do_not_change_the_logits(name: str, changed: dict[str, Any]) -> None:
    def network(**settings: Any) -> Any:
        return AutoModelForCausalLM.from_config(tiny_config(name, **settings)).eval()

    plain, other = network(), network(**changed)
    assert all(getattr(plain.config, key) != value for key, value in changed.items())
    other.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.arange(20)[None] % VOCAB
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, other(tokens).logits)
