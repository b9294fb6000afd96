"""Granite 4: Mamba-2 in most layers, attention in some, and shared feed-forward blocks with or without experts."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.family import Derived, Family, Key, without
from isthmus.families.models import granite, granitemoe, granitemoeshared
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import HF_LAYER, LAYER, in_layer
from isthmus.families.rules.rule import gate_up, in_layers

_INPUT = HF_LAYER + "shared_mlp.input_linear.weight"
_DENSE = in_layers(
    "dense",
    gate_up(LAYER + "mlp.linear_fc1.weight", _INPUT, _INPUT, "H"),
    in_layer("mlp.linear_fc2.weight", "shared_mlp.output_linear.weight", "H", "F", shard="cols"),
)
_WIDTH = Key("shared_intermediate_size", default=1024)


def _read_moe(hf: Mapping[str, Any]) -> Experts | None:
    if not (experts := Key("num_local_experts", default=8, least=0).read(hf)):
        return None
    top_k, width = Key("num_experts_per_tok", default=2).read(hf), Key("intermediate_size").read(hf)
    return Experts(
        num_experts=experts,
        top_k=top_k,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=_WIDTH.read(hf),
        score="softmax_of_chosen",
    )


def _write_moe(moe: Experts | None, arch: Architecture) -> dict[str, Any]:
    if moe is None:
        return {"num_local_experts": 0, "intermediate_size": arch.mlp.ffn_hidden_size}
    keys = {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    return keys | {"intermediate_size": moe.ffn_hidden_size, "shared_intermediate_size": moe.shared_ffn_hidden_size}


FAMILY = Family(
    name="granitemoehybrid",
    hf_architecture="GraniteMoeHybridForCausalLM",
    keys=without(granite.FAMILY.keys, "mlp_bias") | state_space.KEYS | {"ffn_hidden_size": _WIDTH},
    fixed=decoder.FIXED,
    derived=state_space.DERIVED
    | {
        "mixers": state_space.mixers_by_type(
            {"linear_attention": "mamba2", "full_attention": "attention", "mamba": "mamba2", "attention": "attention"},
            lambda hf: ["linear_attention"] * Key("num_hidden_layers").read(hf),
        ),
        "moe": Derived(_read_moe, _write_moe),
        "position": Derived(
            lambda hf: "rope" if hf.get("position_embedding_type") == "rope" else "none",
            lambda position, _: {"position_embedding_type": "rope" if position == "rope" else None},
        ),
    },
    module_names=granitemoe.MODULE_NAMES,
    rules=decoder.pre_norm_rules(
        attention=(*in_layers("attention", *decoder.ATTENTION), *state_space.MAMBA2),
        mlp=(*_DENSE, *granitemoe.EXPERTS, *granitemoeshared.SHARED_EXPERTS),
    ),
)
