"""OLMoE: queries and keys are normalised over all heads together, 64 small experts."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy

_ATTENTION = "decoder.layers.{layer}.self_attention."
_HF_ATTENTION = "model.layers.{layer}.self_attn."

FAMILY = Family(
    name="olmoe",
    hf_architecture="OlmoeForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-5),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_experts", default=64),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.normalize": flag("norm_topk_prob"),
    },
    fixed=decoder.FIXED
    | {
        "clip_qkv": Fixed((None,), "queries, keys and values are not clipped"),
    },
    traits={"qk_norm": True, "qk_norm_over": "projection"},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        copy(_ATTENTION + "q_layernorm.weight", _HF_ATTENTION + "q_norm.weight", "N*D", init="ones"),
        copy(_ATTENTION + "k_layernorm.weight", _HF_ATTENTION + "k_norm.weight", "G*D", init="ones"),
        *expert_tensors.NORM,
        *expert_tensors.ROUTER,
        *expert_tensors.EXPERTS,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
