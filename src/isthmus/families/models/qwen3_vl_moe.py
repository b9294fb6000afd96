"""The language model of Qwen3-VL with experts, which are stacked in one tensor and transposed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.family import Fixed, Key, without
from isthmus.families.models import qwen3_moe
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.rule import copy, gate_up

_FC1, _FC2 = (f"{decoder.LAYER}mlp.experts.local_experts.{{expert}}.linear_{name}.weight" for name in ("fc1", "fc2"))
_GATE_UP, _DOWN = (f"{decoder.HF_LAYER}mlp.experts.{name}_proj" for name in ("gate_up", "down"))
_STACKED: dict[str, Any] = {"layers": "moe", "stacked": True, "transposed": True}


def _decode_width(width: int, hf: Mapping[str, Any]) -> int:
    """transformers transposes the published tensors unless their shape is already that in its memory."""
    if hf["hidden_size"] in (width, 2 * width):
        raise UsageError(
            f"moe_intermediate_size={width} with hidden_size={hf['hidden_size']} makes the experts' matrices square, "
            "and transformers then takes outputs for inputs. Use another width."
        )
    return width


TEXT = replace(
    qwen3_moe.FAMILY,
    keys=without(qwen3_moe.FAMILY.keys, "moe.normalize")
    | {
        "num_query_groups": decoder.kv_heads(default=16),
        "max_position_embeddings": Key("max_position_embeddings", default=128000),
        "moe.num_experts": Key("num_experts", default=60, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=4),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408, decode=_decode_width),
    },
    fixed={**qwen3_moe.FAMILY.fixed, "norm_topk_prob": Fixed((True,), "the weights of a token's experts add up to 1")},
    traits={**qwen3_moe.FAMILY.traits, "moe.normalize": True},
    rope_defaults={"rope_theta": 500000.0, "mrope_section": None},
    rules=decoder.pre_norm_rules(
        mlp=(
            *expert_tensors.DENSE,
            *expert_tensors.ROUTER,
            gate_up(_FC1, _GATE_UP, _GATE_UP, "H", width="X", **_STACKED),
            copy(_FC2, _DOWN, "H", "X", shard="cols", **_STACKED),
        )
    ),
)
