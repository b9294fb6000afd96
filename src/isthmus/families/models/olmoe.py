"""OLMoE: QK norms over the whole projection, 64 small experts."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="olmoe",
    hf_architecture="OlmoeForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=4096, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | {
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_experts", default=64),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.normalize": flag("norm_topk_prob"),
    },
    fixed=decoder.FIXED | {"clip_qkv": Fixed((None,), "clipping of queries, keys and values is not supported")},
    traits={"qk_norm": True, "qk_norm_over": "projection"},
    rules=expert_tensors.RULES,
)
