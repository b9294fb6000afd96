"""Arcee AFM: Llama with a squared ReLU and without gate."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="arcee",
    hf_architecture="ArceeForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="relu2"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.PLAIN_FIXED,
    traits={"gated": False},
    rules=decoder.RULES,
)
