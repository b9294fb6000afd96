"""The classes of Kimi K2: published models have their own copy of DeepSeek-V3's, and transformers has none."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping


class KimiK2Config(DeepseekV3Config):
    model_type = "kimi_k2"


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    config_class = KimiK2Config


KimiK2ForCausalLM.__name__ = DeepseekV3ForCausalLM.__name__  # in the ``architectures`` of configs


def register() -> None:
    AutoConfig.register("kimi_k2", KimiK2Config)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM)
    register_checkpoint_conversion_mapping("kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3"))
