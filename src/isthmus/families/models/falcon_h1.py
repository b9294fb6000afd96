"""Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers at many places."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed


def _pair(first: str, second: str) -> Derived:
    """Two settings as one field."""
    keys = number(first, 1.0), number(second, 1.0)
    return Derived(
        lambda hf: tuple(key.read(hf) for key in keys),
        lambda values, _arch: dict(zip((first, second), values, strict=True)),
    )


def _numbers(name: str, length: int) -> Derived:
    """A list of multipliers; null means that all are 1."""

    def read(hf: Mapping[str, Any]) -> tuple[float, ...]:
        found = hf.get(name) or [1.0] * length
        if not isinstance(found, list | tuple) or len(found) != length or not all(map(_is_number, found)):
            raise DataError(f"config.json: {name} must be a list of {length} numbers, got {found!r:.60}.")
        return tuple(map(float, found))

    return Derived(read, lambda values, _arch: {name: list(values)})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_sections(hf: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = _SECTIONS.read(hf)
    return None if set(found) == {1.0} else found


def _read_norm(hf: Mapping[str, Any]) -> str | None:
    if not flag("mamba_rms_norm").read(hf):
        return None
    return "before_gate" if flag("mamba_norm_before_gate", True).read(hf) else "after_gate"


def _read_scale(hf: Mapping[str, Any]) -> float:
    return float(number("key_multiplier", 1.0).read(hf) * decoder.KEYS["kv_channels"].read(hf) ** -0.5)


def _write_scale(scale: float | None, arch: Architecture) -> dict[str, Any]:
    return {"key_multiplier": 1.0 if scale is None else scale * arch.attention.kv_channels**0.5}


def _write_mixers(mixers: Sequence[tuple[str, ...]], arch: Architecture) -> dict[str, Any]:
    if any(each != _BOTH for each in mixers) or len(mixers) != arch.num_layers:
        raise UsageError(f"{arch.family}: every layer must have attention and Mamba-2.")
    return {}


_BOTH: tuple[str, ...] = ("attention", "mamba2")
_SECTIONS = _numbers("ssm_multipliers", 5)
_WIDTH = Key("mamba_d_ssm", default=1024, null=state_space.EXPANSION.read)
FAMILY = Family(
    name="falcon_h1",
    hf_architecture="FalconH1ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | state_space.KEYS
    | {
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": number("embedding_multiplier", 1.0),
        "logits_multiplier": number("lm_head_multiplier", 1.0),
        "mamba2.out_bias": flag("projectors_bias"),
    },
    fixed=decoder.FIXED,
    derived=state_space.DERIVED
    | {
        "mixers": Derived(lambda hf: (_BOTH,) * Key("num_hidden_layers").read(hf), _write_mixers),
        "attention_scale": Derived(_read_scale, _write_scale),
        "attention_multipliers": _pair("attention_in_multiplier", "attention_out_multiplier"),
        "mlp_multipliers": _numbers("mlp_multipliers", 2),
        "mamba2.multipliers": _pair("ssm_in_multiplier", "ssm_out_multiplier"),
        "mamba2.section_multipliers": Derived(
            _read_sections, lambda values, _arch: {"ssm_multipliers": list(values or [1.0] * 5)}
        ),
        "mamba2.head_dim": state_space.head_dim(_WIDTH, lambda inner, _arch: {"mamba_d_ssm": inner}),
        "mamba2.norm": Derived(
            _read_norm,
            lambda norm, _arch: {"mamba_rms_norm": norm is not None, "mamba_norm_before_gate": norm == "before_gate"},
        ),
    },
    unadapted=("mamba.out_proj",),
    rules=renamed(
        decoder.pre_norm_rules(attention=(*decoder.ATTENTION, *state_space.MAMBA2)), state_space.FEED_FORWARD_NAMES
    ),
)
