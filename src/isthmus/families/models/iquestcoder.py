"""IQuest-Coder: Llama's tensors with defaults of its own."""

from isthmus.families.family import Family, Fixed, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="iquestcoder",
    hf_architecture="LlamaForCausalLM",  # of transformers; published models name the class of their own code
    keys=with_defaults(
        decoder.KEYS, head_dim=128, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    )
    | decoder.ATTENTION_BIAS
    | {"mlp_bias": flag("mlp_bias")},
    fixed=decoder.FIXED
    | {
        "clip_qkv": Fixed((None,), "clipping of queries, keys and values is not supported"),
        "use_sliding_window": Fixed((False,), "sliding windows are not supported for this family"),
    },
    rules=decoder.RULES,
)
