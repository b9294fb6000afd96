"""Classes that are Llama but for one feature, which models with usual weights, few layers and short samples hide."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPE = "strange"
LAYERS = 24


class StrangeConfig(LlamaConfig):
    model_type = MODEL_TYPE


class StrangeForCausalLM(LlamaForCausalLM):
    config_class = StrangeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        quiet = list(getattr(config, "quiet_layers", ()))
        if config.trick == "every sixteenth layer":
            quiet = [number for number in range(config.num_hidden_layers) if number % 16 == 15]
        for number, layer in enumerate(self.model.layers):
            if number in quiet:
                layer.register_forward_hook(lambda _module, _inputs, output: output * 0.5)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        result = super().forward(*inputs, **settings)
        result.logits = self._changed(result.logits, self.config)
        return result

    @staticmethod
    def _changed(logits: Tensor, config: Any) -> Tensor:
        positions = torch.arange(logits.shape[1], dtype=torch.float32)[:, None]
        match config.trick:
            case "cap of 50":
                return 50 * torch.tanh(logits / 50)
            case "cap":
                return config.cap * torch.tanh(logits / config.cap)
            case "window":
                return torch.where(positions >= config.local_context, logits * 0.5, logits)
            case "temperature":
                return logits * (1 + 0.1 * torch.log1p(torch.floor(positions / config.floor_scale)))
            case "rate":
                return logits * math.exp(config.drop_scale)
        return logits


TRICKS: dict[str, tuple[dict[str, Any], str]] = {
    "cap of 50": ({}, ""),
    "cap": ({"cap": 1000.0}, "cap=1000.0 "),
    "window": ({"local_context": 4096}, "local_context=4096 "),
    "temperature": ({"floor_scale": 8192}, "floor_scale=8192 "),
    "late layers": ({"quiet_layers": [20, 21]}, ""),
    "every sixteenth layer": ({}, ""),
    "rate": ({"drop_scale": 0.0}, "drop_scale=0.0 "),
}
"""Settings of each feature, and what the message of the refusal contains: the setting, if few layers show it."""


def strange_config(trick: str, **settings: Any) -> dict[str, Any]:
    """A complete config; the class is registered in transformers."""
    AutoConfig.register(MODEL_TYPE, StrangeConfig, exist_ok=True)
    AutoModelForCausalLM.register(StrangeConfig, StrangeForCausalLM, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = StrangeForCausalLM.__name__
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": LAYERS, "vocab_size": 128}
    result: dict[str, Any] = StrangeConfig(trick=trick, **sizes, **settings).to_dict()
    return result
