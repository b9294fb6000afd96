"""Kimi K2: DeepSeek-V3 under a model type of its own, with the same keys and tensors."""

from dataclasses import replace

from isthmus.families.models import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="kimi_k2")
