"""Granite with attention sinks, sliding windows, and experts with or without a shared one."""

from isthmus.families.family import Family
from isthmus.families.models import granite_swa, granitemoe, granitemoeshared
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import renamed

_NAMES = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer": "router",
}

FAMILY = Family(
    name="granitemoe_swa",
    hf_architecture="GraniteMoeSWAForCausalLM",
    keys=granitemoeshared.FAMILY.keys,
    derived=granite_swa.FAMILY.derived,
    fixed=decoder.FIXED,
    traits={"moe.score": "softmax_of_chosen", "attention_sinks": True},
    sliding_window="pattern",
    sliding_window_default=granite_swa.FAMILY.sliding_window_default,
    sliding_window_pattern=granite_swa.FAMILY.sliding_window_pattern,
    rules=decoder.pre_norm_rules(
        attention=(*decoder.ATTENTION, granite_swa.SINKS),
        mlp=(*renamed(granitemoe.EXPERTS, _NAMES), *granitemoeshared.SHARED_EXPERTS),
    ),
)
