"""Ministral 3: Mistral with YaRN, and queries that grow with their position beyond the original context."""

from dataclasses import replace

from isthmus.families.family import Key
from isthmus.families.models import mistral
from isthmus.families.rules.decoder import number

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
    keys={
        **mistral.FAMILY.keys,
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": Key("max_position_embeddings", default=262144),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
    },
    rope_defaults={"rope_parameters": _ROPE, "llama_4_scaling_beta": 0.1},
    sliding_window_default=None,
)
