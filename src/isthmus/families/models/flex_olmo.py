"""FlexOlmo: OLMo 2's attention and norms, experts of OLMoE."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, layer_norm

FAMILY = Family(
    name="flex_olmo",
    hf_architecture="FlexOlmoForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=4096)
    | decoder.ATTENTION_BIAS
    | {
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_experts", default=7, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=5),
        "moe.normalize": flag("norm_topk_prob"),
    },
    fixed=decoder.FIXED,
    traits={"form": "post", "qk_norm": True, "qk_norm_over": "projection"},
    rope_defaults={"rope_theta": 500000.0},
    rules=(
        *decoder.EMBEDDING,
        *decoder.ATTENTION,
        *layer_norm("post_self_attn_layernorm", "post_attention_layernorm"),
        *expert_tensors.ROUTER,
        *expert_tensors.EXPERTS,
        *layer_norm("post_mlp_layernorm", "post_feedforward_layernorm"),
        *decoder.HEAD,
    ),
)
