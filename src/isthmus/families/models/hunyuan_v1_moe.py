"""Hunyuan with experts: QK norms after the rotation, a shared expert as wide as a routed one."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.family import Derived, Family, Key
from isthmus.families.models import hunyuan_v1_dense
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.rule import renamed

_NAMES = {
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "mlp.gate.weight": "mlp.gate.wg.weight",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}


def _top_k(hf: Mapping[str, Any]) -> int:
    """A number, or a list with that of each layer."""
    listed = hf.get("moe_topk", hf.get("num_experts_per_tok", 1))
    if isinstance(listed, list) and len(set(map(str, listed))) > 1:
        raise UsageError("config.json: moe_topk differs by layer, which is not supported; every layer must have one.")
    top_k: int = Key("moe_topk").read({"moe_topk": listed[0] if isinstance(listed, list) and listed else listed})
    return top_k


FAMILY = Family(
    name="hunyuan_v1_moe",
    hf_architecture="HunYuanMoEV1ForCausalLM",
    keys={
        **hunyuan_v1_dense.FAMILY.keys,
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.shared_ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_experts", default=1, aliases=("num_local_experts",)),
    },
    fixed=decoder.FIXED,
    traits={**hunyuan_v1_dense.FAMILY.traits, "moe.normalize": True},
    derived={"moe.top_k": Derived(_top_k, lambda top_k, arch: {"moe_topk": top_k})},
    rope_defaults=hunyuan_v1_dense.FAMILY.rope_defaults,
    rules=renamed(expert_tensors.RULES, _NAMES),
)
