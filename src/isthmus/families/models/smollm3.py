"""SmolLM3: Llama with layers without rotary embedding, by default every fourth."""

from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.unrotated import read_unrotated, write_unrotated

FAMILY = Family(
    name="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=4),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "mlp_bias": flag("mlp_bias"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    derived={
        "unrotated_layers": Derived(
            read=read_unrotated, write=lambda layers, arch: write_unrotated(layers, arch.num_layers)
        )
    },
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    rope_defaults={"rope_theta": 2000000.0},
    rules=decoder.RULES,
)
