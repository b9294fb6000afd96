"""SmolLM3: Llama with layers without rotary embedding, by default every fourth."""

from isthmus.families.family import Derived, Family, Fixed, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.unrotated import read_unrotated, write_unrotated

FAMILY = Family(
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True)
    | decoder.ATTENTION_BIAS
    | {"mlp_bias": flag("mlp_bias")},
    derived={
        "unrotated_layers": Derived(
            read=read_unrotated, write=lambda layers, arch: write_unrotated(layers, arch.num_layers)
        )
    },
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    rope_defaults={"rope_theta": 2000000.0},
    rules=decoder.RULES,
)
