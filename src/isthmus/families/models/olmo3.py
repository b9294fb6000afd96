"""OLMo 3: OLMo 2 with sliding-window layers, by default three of four, which have no rope scaling."""

from isthmus.families.family import Family
from isthmus.families.models import olmo2
from isthmus.families.rules import decoder

FAMILY = Family(
    name="olmo3",
    hf_architecture="Olmo3ForCausalLM",
    keys=olmo2.FAMILY.keys,
    fixed=decoder.FIXED,
    traits=olmo2.FAMILY.traits,
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=lambda _hf, layers: range(3, layers, 4),
    rope_defaults={"rope_theta": 500000.0, "rope_local_base_freq": None},
    rules=olmo2.RULES,
)
