"""IQuest-Coder: Llama's tensors with defaults of its own."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="iquestcoder",
    hf_architecture="LlamaForCausalLM",  # of transformers; published models name the class of their own code
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=8),
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED
    | {
        "clip_qkv": Fixed((None,), "clipping of queries, keys and values is not supported"),
        "use_sliding_window": Fixed((False,), "sliding windows are not supported for this family"),
    },
    rules=decoder.RULES,
)
