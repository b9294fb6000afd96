"""Aria's language model: Llama's attention, softmax over the selected experts, shared experts in every layer."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import HF_LAYER, LAYER
from isthmus.families.rules.rule import copy, gate_up, renamed

_EXPERT, _HF_EXPERTS = LAYER + "mlp.experts.local_experts.{expert}.linear_", HF_LAYER + "mlp.experts."
_FC1 = _HF_EXPERTS + "fc1.weight"
_EXPERTS = (
    gate_up(_EXPERT + "fc1.weight", _FC1, _FC1, "H", width="X", transposed=True, stacked=True, layers="moe"),
    copy(
        _EXPERT + "fc2.weight",
        _HF_EXPERTS + "fc2.weight",
        "H",
        "X",
        shard="cols",
        transposed=True,
        stacked=True,
        layers="moe",
    ),
)

FAMILY = Family(
    name="aria_text",
    hf_architecture="AriaTextForCausalLM",
    keys=with_defaults(decoder.KEYS, intermediate_size=4096, max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | {
        "moe.num_experts": Key("moe_num_experts", default=8),
        "moe.top_k": Key("moe_topk", default=2),
        "moe.ffn_hidden_size": Key("intermediate_size", default=4096),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width(
            "moe_num_shared_experts", default=2, width="intermediate_size"
        ),
    },
    fixed=decoder.FIXED | {"mlp_bias": Fixed((False,), "only shared experts would have biases")},
    traits={"moe.score": "softmax_of_chosen"},
    module_names={"experts.fc1": "experts.gate_up_proj", "experts.fc2": "experts.down_proj"},
    rules=decoder.pre_norm_rules(
        mlp=(*renamed(expert_tensors.ROUTER, {"mlp.gate.": "mlp.router."}), *_EXPERTS, *expert_tensors.SHARED_EXPERTS)
    ),
)
