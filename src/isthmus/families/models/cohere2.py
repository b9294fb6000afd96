"""Cohere Command R7B and Command A: Command R with layers without a window or rotary embedding, every fourth."""

from isthmus.families.family import Family, without
from isthmus.families.models import cohere
from isthmus.families.rules import decoder
from isthmus.families.rules.unrotated import unrotated_full_layers

FAMILY = Family(
    name="cohere2",
    hf_architecture="Cohere2ForCausalLM",
    keys=without(cohere.FAMILY.keys, "kv_channels", "qk_norm"),
    derived={
        "kv_channels": decoder.HEAD_DIM,
        "unrotated_layers": unrotated_full_layers(window=4096, pattern=4, null_rotates=False),
    },
    fixed=decoder.FIXED,
    traits=cohere.FAMILY.traits,
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=4,
    rules=cohere.FAMILY.rules,
)
