"""LFM2: gated short convolutions in most layers, attention in some, dense feed-forward blocks."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key
from isthmus.families.rules import decoder, short_convolution
from isthmus.families.rules.decoder import flag, number


def _read_width(hf: Mapping[str, Any]) -> int:
    """Two thirds of the setting, times a factor, rounded up to a multiple, unless this is switched off."""
    width = int(Key("block_ff_dim" if "block_ff_dim" in hf else "intermediate_size", default=12288).read(hf))
    if not flag("block_auto_adjust_ff_dim", default=True).read(hf):
        return width
    width = int(2 * width / 3)
    factor = (
        number("block_ffn_dim_multiplier", 1.0, optional=True).read(hf) if "block_ffn_dim_multiplier" in hf else 1.0
    )
    if factor is None:
        return width
    multiple = Key("block_multiple_of", default=256).read(hf)
    return int(multiple * ((int(factor * width) + multiple - 1) // multiple))


def _write_width(width: int, _arch: Architecture) -> dict[str, Any]:
    return {"intermediate_size": width, "block_ff_dim": width, "block_auto_adjust_ff_dim": False}


FAMILY = Family(
    name="lfm2",
    hf_architecture="Lfm2ForCausalLM",
    keys=short_convolution.KEYS,
    derived=short_convolution.DERIVED | {"ffn_hidden_size": Derived(_read_width, _write_width)},
    rules=short_convolution.rules(decoder.MLP),
    **short_convolution.SHARED,
)
