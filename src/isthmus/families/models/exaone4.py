"""EXAONE 4: post-norms, QK norms, and layers without a window or rotary embedding, by default every fourth."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.models import olmo2
from isthmus.families.rules import decoder
from isthmus.families.rules.unrotated import unrotated_full_layers

FAMILY = Family(
    name="exaone4",
    hf_architecture="Exaone4ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5),
    derived={"unrotated_layers": unrotated_full_layers(window=4096, pattern=4, null_rotates=True)},
    fixed=decoder.FIXED,
    traits={"form": "post", "qk_norm": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=4,
    rules=olmo2.RULES,
)
