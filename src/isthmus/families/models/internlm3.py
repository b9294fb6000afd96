"""InternLM3: Llama's tensors, with one switch for the biases of attention inputs and another one for all others."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number

_BIAS = Key("mlp_bias", kind=bool, default=False, aliases=("bias",))

FAMILY = Family(
    name="internlm3",
    hf_architecture="LlamaForCausalLM",  # of transformers; published models name the class of their own code
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "qkv_bias": Key("attention_bias", kind=bool, default=False, aliases=("qkv_bias",)),
        "proj_bias": _BIAS,
        "mlp_bias": _BIAS,
    },
    fixed=decoder.FIXED,
    rules=decoder.RULES,
)
