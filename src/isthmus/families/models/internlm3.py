"""InternLM3: Llama's tensors, with one switch for the biases of attention inputs and another one for all others."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder

_BIAS = Key("mlp_bias", kind=bool, default=False, aliases=("bias",))

FAMILY = Family(
    name="internlm3",
    hf_architecture="LlamaForCausalLM",  # of transformers; published models name the class of their own code
    keys=with_defaults(
        decoder.KEYS, head_dim=128, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5
    )
    | {
        "qkv_bias": Key("attention_bias", kind=bool, default=False, aliases=("qkv_bias",)),
        "proj_bias": _BIAS,
        "mlp_bias": _BIAS,
    },
    fixed=decoder.FIXED,
    rules=decoder.RULES,
)
