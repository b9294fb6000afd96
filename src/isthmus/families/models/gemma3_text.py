"""Gemma 3, its text model: Gemma 2 with norms on queries and keys, and rotary bases that differ by layer."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.models import gemma, gemma2
from isthmus.families.rules import decoder

FAMILY = Family(
    name="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    keys=gemma2.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "logits_softcap": Key("final_logit_softcapping", kind=float, default=None, optional=True),
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
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *decoder.QK_NORM,
        *gemma2.NORMS,
        *decoder.GATED_MLP[1:],
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
