"""Ministral 3: Mistral with YaRN, and queries that grow with their position beyond the original context."""

from dataclasses import replace

from isthmus.families.family import with_defaults
from isthmus.families.models import mistral

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

FAMILY = replace(
    mistral.FAMILY,
    name="ministral3",
    hf_architecture="Ministral3ForCausalLM",
    keys=with_defaults(mistral.FAMILY.keys, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5),
    rope_defaults={"rope_parameters": _ROPE, "llama_4_scaling_beta": 0.1},
    sliding_window_default=None,
)
