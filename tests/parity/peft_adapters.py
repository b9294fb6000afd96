"""PEFT's adapters on a transformers model, with the initial values of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from isthmus.config.schema import TrainConfig
from isthmus.config.schema.lora import LoraConfig
from isthmus.engine.lora.adapter import Adapter
from isthmus.engine.lora.attach import InitialAdapters
from isthmus.families.adapted_linears import HfLinear, adapted_linears
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder


def network_with_adapters(model: str, lora: dict[str, Any]) -> Any:
    """The model with the adapters of section ``lora`` of the config; their targets are names, not patterns."""
    import peft

    settings = LoraConfig(**lora)
    assert settings.rank is not None
    linears = linears_of(Path(model), settings)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale(settings.rank) * settings.rank,
        target_modules=sorted({linear.module for linear in linears if linear.expert is None}),
        target_parameters=sorted({linear.module for linear in linears if linear.expert is not None}) or None,
    )
    network = peft.get_peft_model(base(model), config)
    initial = InitialAdapters("kaiming", TrainConfig().seed)
    adapted = peft_layers(network)
    for linear in linears:
        a = initial(Adapter(linear, settings.rank, 1.0), "lora_A")
        rows = slice(None) if linear.expert is None else slice(linear.expert * settings.rank, None)
        with torch.no_grad():
            adapted[linear.module].lora_A["default"].weight[rows][: settings.rank].copy_(a)
    return network


def base(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def linears_of(model: Path, settings: LoraConfig) -> list[HfLinear]:
    config = ModelFolder.open(model).config
    family = family_for(config)
    of_weights = adapted_linears(family, family.to_architecture(config), settings.targets)
    return [linear for linears in of_weights.values() for linear in linears]


def peft_layers(network: Any) -> dict[str, Any]:
    """PEFT's layers by the path of the linear layer or parameter that they adapt."""
    found = {}
    for path, layer in network.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            owner = path.replace(".base_layer", "")
            name = getattr(layer, "parameter_name", None)
            found[owner if name is None else f"{owner}.{name}"] = layer
    return found
