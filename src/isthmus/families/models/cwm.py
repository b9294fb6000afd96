"""Code World Model: Llama 3 with sliding-window layers; by default every fourth, from the first, has none."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="cwm",
    hf_architecture="CwmForCausalLM",
    keys=with_defaults(
        decoder.KEYS, head_dim=128, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    )
    | {"mlp_bias": flag("mlp_bias")},
    fixed=decoder.FIXED,
    sliding_window="pattern",
    sliding_window_default=8192,
    sliding_window_pattern=lambda _hf, layers: range(0, layers, 4),
    rope_defaults={
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rules=decoder.RULES,
)
