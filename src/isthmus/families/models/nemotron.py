"""Nemotron-4 and Minitron: zero-centered LayerNorms, a squared ReLU without gate, partial rotary embedding."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="nemotron",
    hf_architecture="NemotronForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=4096, initializer_range=0.0134)
    | decoder.ATTENTION_BIAS
    | {
        "norm_epsilon": number("norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="relu2"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.PLAIN_FIXED,
    traits={"normalization": "LayerNorm", "norm_zero_centered": True, "gated": False},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=decoder.RULES,
)
