"""Granite 3 with experts, which are stacked in one tensor: Granite's multipliers, softmax over the selected experts."""

from isthmus.families.family import Family, Key, without
from isthmus.families.models import granite
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import HF_LAYER, LAYER, in_layer, number
from isthmus.families.rules.rule import copy, gate_up

_EXPERT, _INPUT = (LAYER + "mlp.experts.local_experts.{expert}.", HF_LAYER + "block_sparse_moe.input_linear.weight")

KEYS = without(granite.FAMILY.keys, "mlp_bias") | {
    "norm_epsilon": number("rms_norm_eps", 1e-6),
    "moe.ffn_hidden_size": Key("intermediate_size"),
    "moe.num_experts": Key("num_local_experts", default=8),
    "moe.top_k": Key("num_experts_per_tok", default=2),
}
EXPERTS = (
    in_layer("mlp.router.weight", "block_sparse_moe.router.layer.weight", "E", "H", layers="moe"),
    gate_up(_EXPERT + "linear_fc1.weight", _INPUT, _INPUT, "H", width="X", stacked=True, layers="moe"),
    copy(
        _EXPERT + "linear_fc2.weight",
        HF_LAYER + "block_sparse_moe.output_linear.weight",
        "H",
        "X",
        shard="cols",
        stacked=True,
        layers="moe",
    ),
)
MODULE_NAMES = {
    "block_sparse_moe.input_linear": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer": "block_sparse_moe.router",
}

FAMILY = Family(
    name="granitemoe",
    hf_architecture="GraniteMoeForCausalLM",
    keys=KEYS,
    fixed=decoder.FIXED,
    traits={"moe.score": "softmax_of_chosen"},
    module_names=MODULE_NAMES,
    rules=decoder.pre_norm_rules(mlp=EXPERTS),
)
