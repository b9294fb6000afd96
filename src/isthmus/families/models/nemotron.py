"""Nemotron-4 and Minitron: zero-centered LayerNorms, a squared ReLU without gate, partial rotary embedding."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="nemotron",
    hf_architecture="NemotronForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": number("norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="relu2"),
        "mlp_bias": flag("mlp_bias"),
        "init_std": number("initializer_range", 0.0134),
    },
    fixed=decoder.PLAIN_FIXED,
    traits={"normalization": "LayerNorm", "norm_zero_centered": True, "gated": False},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=decoder.RULES,
)
