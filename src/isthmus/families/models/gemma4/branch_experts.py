"""Experts beside a dense block, each with norms of its own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import HF_LAYER, LAYER, flag, in_layer, layer_norm
from isthmus.families.rules.rule import copy, gate_up, in_layers


def _read(hf: Mapping[str, Any]) -> Experts | None:
    if not flag("enable_moe_block").read(hf):
        return None
    if flag("use_double_wide_mlp").read(hf) and Key("num_kv_shared_layers", default=0, least=0).read(hf):
        raise UsageError("config.json: use_double_wide_mlp with enable_moe_block is not supported. Set one of them.")
    keys = {"num_experts": "num_experts", "top_k": "top_k_experts", "ffn_hidden_size": "moe_intermediate_size"}
    sizes = {name: Key(key).read(hf) for name, key in keys.items()}
    sizes["shared_ffn_hidden_size"] = Key("intermediate_size", default=9216).read(hf)
    return Experts(**sizes, normalize=True, router_norm=True, expert_gains=True, branch_norms=True)


def _write(moe: Experts | None, _arch: Architecture) -> dict[str, Any]:
    if moe is None:
        return {"enable_moe_block": False}
    sizes = {"num_experts": moe.num_experts, "top_k_experts": moe.top_k, "moe_intermediate_size": moe.ffn_hidden_size}
    return {"enable_moe_block": True, **sizes}


MOE = Derived(_read, _write)
"""The dense block is a shared expert."""
_EXPERT, _GATE_UP = LAYER + "mlp.experts.local_experts.{expert}.", HF_LAYER + "experts.gate_up_proj"
RULES = in_layers(
    "moe",
    *layer_norm("mlp.pre_shared_layernorm", "pre_feedforward_layernorm"),
    *layer_norm("mlp.post_shared_layernorm", "post_feedforward_layernorm_1"),
    *layer_norm("mlp.pre_routed_layernorm", "pre_feedforward_layernorm_2"),
    *layer_norm("mlp.post_routed_layernorm", "post_feedforward_layernorm_2"),
    *decoder.mlp(LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.", "S"),
    in_layer("mlp.router.weight", "router.proj.weight", "E", "H"),
    in_layer("mlp.router.scale", "router.scale", "H", init="plain_ones"),
    in_layer("mlp.router.per_expert_scale", "router.per_expert_scale", "E", init="plain_ones"),
    gate_up(_EXPERT + "linear_fc1.weight", _GATE_UP, _GATE_UP, "H", width="X", stacked=True),
    copy(_EXPERT + "linear_fc2.weight", HF_LAYER + "experts.down_proj", "H", "X", shard="cols", stacked=True),
)
