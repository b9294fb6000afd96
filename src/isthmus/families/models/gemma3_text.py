"""Gemma 3, the text model: Gemma 2 with QK norms and a different rotary base in sliding-window layers."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.models import gemma, gemma2
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number

FAMILY = Family(
    name="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    scored_class="Gemma3TextForSequenceClassification",
    keys=gemma2.KEYS
    | {
        # Published multimodal models lack these two.
        "num_attention_heads": Key("num_attention_heads", default=8),
        "vocab_size": Key("vocab_size", default=262208),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "logits_softcap": number("final_logit_softcapping", None, optional=True),
    },
    derived={"embedding_multiplier": gemma.EMBEDDING_SCALE},
    fixed=decoder.PLAIN_FIXED
    | {
        "use_bidirectional_attention": gemma.CAUSAL,
        "attn_logit_softcapping": Fixed((None,), "transformers reads it and does not cap the scores"),
    },
    traits={"form": "sandwich", "norm_zero_centered": True, "qk_norm": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=6,
    rope_defaults={"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    rules=gemma2.RULES,
)
