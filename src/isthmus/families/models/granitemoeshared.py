"""Granite 4 without Mamba layers: GraniteMoE with a shared expert."""

from isthmus.families.family import Family, Key
from isthmus.families.models import granitemoe
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import HF_LAYER, LAYER, in_layer
from isthmus.families.rules.rule import gate_up, where

_INPUT = HF_LAYER + "shared_mlp.input_linear.weight"
SHARED_EXPERTS = where(
    "moe.shared_ffn_hidden_size",
    gate_up(LAYER + "mlp.shared_experts.linear_fc1.weight", _INPUT, _INPUT, "H", width="S", layers="moe"),
    in_layer(
        "mlp.shared_experts.linear_fc2.weight", "shared_mlp.output_linear.weight", "H", "S", shard="cols", layers="moe"
    ),
)

FAMILY = Family(
    name="granitemoeshared",
    hf_architecture="GraniteMoeSharedForCausalLM",
    keys=granitemoe.KEYS | {"moe.shared_ffn_hidden_size": Key("shared_intermediate_size", default=0, least=0)},
    fixed=decoder.FIXED,
    traits={"moe.score": "softmax_of_chosen"},
    module_names=granitemoe.MODULE_NAMES,
    rules=decoder.pre_norm_rules(mlp=(*granitemoe.EXPERTS, *SHARED_EXPERTS)),
)
