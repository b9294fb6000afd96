"""Youtu-LLM: DeepSeek-V3's multi-head latent attention with dense feed-forward blocks."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, mla
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="youtu",
    hf_architecture="YoutuForCausalLM",
    keys=with_defaults(mla.KEYS, max_position_embeddings=131072, tie_word_embeddings=True)
    | {
        "rotary_interleaved": flag("rope_interleave", default=True),
        "init_std": Key(
            "initializer_range", kind=float, default=None, null=lambda hf: 2.0 / (5.0 * hf["hidden_size"]) ** 0.5
        ),
    },
    fixed=decoder.FIXED | {"attention_bias": mla.FIXED["attention_bias"]},
    derived=mla.DERIVED,
    rules=decoder.pre_norm_rules(attention=mla.ATTENTION),
)
