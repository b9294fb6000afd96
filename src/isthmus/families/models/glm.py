"""GLM-4, dense, and GLM-Edge: partial interleaved rotary embedding, a fused gate and up projection."""

from isthmus.families.family import Family
from isthmus.families.models import glm4
from isthmus.families.rules import decoder

FAMILY = Family(
    name="glm",
    hf_architecture="GlmForCausalLM",
    keys=glm4.FAMILY.keys,
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    rope_defaults=glm4.FAMILY.rope_defaults,
    rules=decoder.pre_norm_rules(mlp=decoder.FUSED_MLP),
)
