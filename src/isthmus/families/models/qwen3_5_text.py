"""Qwen3.5: gated delta nets with separate projections, every fourth layer gated attention."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, delta_net

FAMILY = Family(
    name="qwen3_5_text",
    hf_architecture="Qwen3_5ForCausalLM",
    scored_class="Qwen3_5TextForSequenceClassification",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=4, max_position_embeddings=32768)
    | decoder.ATTENTION_BIAS
    | delta_net.KEYS
    | {"kv_channels": Key("head_dim", default=256)},
    fixed=decoder.FIXED | delta_net.QWEN_FIXED,
    traits=delta_net.QWEN_TRAITS,
    derived={"mixers": delta_net.mixers("gated_delta_net")},
    rope_defaults=delta_net.QWEN_ROPE,
    rules=decoder.pre_norm_rules(attention=delta_net.qwen_mixers(delta_net.SEPARATE)),
)
