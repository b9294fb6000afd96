"""Jais 2: LayerNorms, biases in all linear layers, a squared ReLU without gate."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="jais2",
    hf_architecture="Jais2ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=8192)
    | {
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="relu2"),
        "qkv_bias": flag("attention_bias", default=True),
        "proj_bias": flag("attention_bias", default=True),
        "mlp_bias": flag("mlp_bias", default=True),
    },
    fixed=decoder.PLAIN_FIXED,
    traits={"normalization": "LayerNorm", "gated": False},
    rules=decoder.RULES,
)
