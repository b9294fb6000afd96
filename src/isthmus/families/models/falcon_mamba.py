"""Falcon Mamba: Mamba with norms of the low-rank time steps, B and C, which have no weights."""

from isthmus.families.family import Family
from isthmus.families.models import mamba
from isthmus.families.rules.decoder import number

FAMILY = Family(
    name="falcon_mamba",
    hf_architecture="FalconMambaForCausalLM",
    keys=dict(mamba.FAMILY.keys) | {"mamba.norm_epsilon": number("mixer_rms_eps", 1e-6)},
    fixed=mamba.FAMILY.fixed,
    dropout={},
    traits=dict(mamba.FAMILY.traits) | {"mamba.norms": True, "mamba.norm_weights": False},
    derived=mamba.FAMILY.derived,
    unadapted=mamba.FAMILY.unadapted,
    rules=mamba.FAMILY.rules,
)
