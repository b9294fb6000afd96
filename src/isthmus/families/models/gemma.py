"""Gemma: norms that multiply by one plus their weight, scaled embeddings, a gated GELU."""

from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

EMBEDDING_SCALE = Derived(lambda hf: hf["hidden_size"] ** 0.5, lambda _scale, _arch: {})
CAUSAL = Fixed((None, False), "only causal attention is supported")
KEYS = (
    decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "kv_channels": Key("head_dim", default=256),
        "max_position_embeddings": Key("max_position_embeddings", default=8192),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    }
)

FAMILY = Family(
    name="gemma",
    hf_architecture="GemmaForCausalLM",
    keys=KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=16),
        # Published configs have gelu, but mean its tanh approximation, as transformers does.
        "activation": Key(
            "hidden_act",
            default="gelu_pytorch_tanh",
            choices={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh", "gelu_new": "gelu_tanh"},
        ),
    },
    derived={"embedding_multiplier": EMBEDDING_SCALE},
    fixed=decoder.PLAIN_FIXED | {"use_bidirectional_attention": CAUSAL},
    traits={"norm_zero_centered": True},
    rules=decoder.RULES,
)
