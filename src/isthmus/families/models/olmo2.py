"""OLMo 2: post-norms, and QK norms over the whole projection."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import layer_norm

RULES = (
    *decoder.EMBEDDING,
    *decoder.ATTENTION,
    *layer_norm("post_self_attn_layernorm", "post_attention_layernorm"),
    *decoder.MLP,
    *layer_norm("post_mlp_layernorm", "post_feedforward_layernorm"),
    *decoder.HEAD,
)

FAMILY = Family(
    name="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048, rms_norm_eps=1e-5) | decoder.ATTENTION_BIAS,
    fixed=decoder.FIXED,
    traits={"form": "post", "qk_norm": True, "qk_norm_over": "projection"},
    rules=RULES,
)
