"""EXAONE 4: post-norms, QK norms, and layers without a window or rotary embedding, by default every fourth."""

from isthmus.families.family import Family, Key
from isthmus.families.models import olmo2
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number
from isthmus.families.rules.unrotated import unrotated_full_layers

FAMILY = Family(
    name="exaone4",
    hf_architecture="Exaone4ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=32),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
    },
    derived={"unrotated_layers": unrotated_full_layers(window=4096, pattern=4, null_rotates=True)},
    fixed=decoder.FIXED,
    traits={"form": "post", "qk_norm": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=4,
    rules=olmo2.RULES,
)
