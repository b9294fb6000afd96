"""The text model of Gemma 4's unified models: Gemma 4 without experts and without inputs of each layer."""

from dataclasses import replace

from isthmus.families.family import with_defaults, without
from isthmus.families.models.gemma4 import gemma4_text

_ABSENT = ("moe", "layer_input_size")

FAMILY = replace(
    gemma4_text.FAMILY,
    name="gemma4_unified_text",
    hf_architecture="Gemma4UnifiedForCausalLM",
    keys=with_defaults(gemma4_text.FAMILY.keys, max_position_embeddings=262144),
    derived=without(gemma4_text.FAMILY.derived, *_ABSENT),
    sliding_window_default=1024,
)
