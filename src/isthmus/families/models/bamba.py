"""Bamba: Mamba-2 in most layers, attention with partial rotary embeddings in some, dense feed-forward blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import in_layers, renamed


def _read_mixers(hf: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    attention = Key("attn_layer_indices", kind=list, default=None, null=lambda _: []).read(hf)
    layers = range(Key("num_hidden_layers", default=32).read(hf))
    return tuple(("attention",) if layer in attention else ("mamba2",) for layer in layers)


def _write_mixers(_mixers: Sequence[tuple[str, ...]], arch: Architecture) -> dict[str, Any]:
    kinds = state_space.single_mixers(arch, "attention", "mamba2")
    return {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == "attention"]}


FAMILY = Family(
    name="bamba",
    hf_architecture="BambaForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | state_space.KEYS
    | {"mlp_bias": flag("mlp_bias")},
    fixed=decoder.FIXED
    | {"z_loss_coefficient": Fixed((0.0,), "a loss on the size of the logits is not supported", training=True)},
    derived=state_space.DERIVED | {"mixers": Derived(_read_mixers, _write_mixers)},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=renamed(
        decoder.pre_norm_rules(attention=(*in_layers("attention", *decoder.ATTENTION), *state_space.MAMBA2)),
        state_space.FEED_FORWARD_NAMES,
    ),
)
