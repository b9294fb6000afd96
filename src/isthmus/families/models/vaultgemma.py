"""VaultGemma: Gemma 2 without norms after attention and MLP."""

from isthmus.families.family import Family
from isthmus.families.models import gemma, gemma2
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import layer_norm

FAMILY = Family(
    name="vaultgemma",
    hf_architecture="VaultGemmaForCausalLM",
    keys=gemma2.FAMILY.keys,
    derived={"embedding_multiplier": gemma.EMBEDDING_SCALE},
    fixed=decoder.PLAIN_FIXED,
    traits={"norm_zero_centered": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=lambda _hf, layers: range(1, layers, 2),
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *layer_norm("pre_mlp_layernorm", "pre_feedforward_layernorm"),
        *decoder.MLP,
        *decoder.HEAD,
    ),
)
