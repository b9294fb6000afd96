"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that selects the keys of each query."""

from dataclasses import replace

from isthmus.families.family import Family, Fixed, Key, without
from isthmus.families.models import deepseek_v3
from isthmus.families.rules import decoder, expert_tensors, key_indexer, mla, mtp

_LAYER = (*decoder.INPUT_NORM, *mla.ATTENTION, *key_indexer.INDEXER, *expert_tensors.MLP)
_OTHERS = ("moe.dense_layers", "rotary_interleaved")

KEYS = without(deepseek_v3.FAMILY.keys, *_OTHERS) | {
    "mla.q_lora_rank": Key("q_lora_rank", default=1536),
    "mtp_layers": replace(mtp.KEY, default=0),
}
FIXED = {**deepseek_v3.FAMILY.fixed, "mlp_bias": Fixed((False,), "biases of linear layers are not supported")}
RULES = (*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD)

FAMILY = Family(
    name="deepseek_v32",
    hf_architecture="DeepseekV32ForCausalLM",
    keys=KEYS
    | key_indexer.keys(heads=64)
    | {"max_position_embeddings": Key("max_position_embeddings", default=163840)},
    fixed=FIXED,
    traits={**deepseek_v3.FAMILY.traits, "rotary_interleaved": True},
    derived=mla.DERIVED | {"moe.dense_layers": expert_tensors.mlp_layer_types(dense=3, key="first_k_dense_replace")},
    sliding_window="unread",
    rules=RULES,
)
