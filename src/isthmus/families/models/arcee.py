"""Arcee AFM: Llama with a squared ReLU and without gate."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="arcee",
    hf_architecture="ArceeForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=4096, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | {"activation": decoder.activation("hidden_act", default="relu2"), "mlp_bias": flag("mlp_bias")},
    fixed=decoder.PLAIN_FIXED,
    traits={"gated": False},
    rules=decoder.RULES,
)
