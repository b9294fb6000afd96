"""Rules and config keys shared by families with a gated delta net or Kimi delta attention in some layers.

Names are those of Megatron-Core's gated delta net, except ``gated_norm``: Megatron-Core's ``out_norm`` is zero-centered
if the other norms are, and this one never is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.families.config_keys import Derived, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import HF_LAYER, LAYER
from isthmus.families.rules.rule import HfPart, Init, Rule, copy, in_layers
from isthmus.families.rules.state_space import mixers_by_type

MIXER = LAYER + "self_attention."
HF_MIXER = HF_LAYER + "linear_attn."
LINEAR, FULL = "linear_attention", "full_attention"


def in_proj(*parts: tuple[str, str], kind: str = "gated_delta_net", hf: str = HF_MIXER, **fields: Any) -> Rule:
    """The fused projection of the input; each part is a module of transformers and a symbol for its rows."""
    tensors = tuple(HfPart(f"{hf}{module}.weight", (rows, "H")) for module, rows in parts)
    return Rule(canonical=f"{MIXER}in_proj.weight", parts=tensors, shard="parts", layers=kind, **fields)


def mixer_rules(
    projection: Rule,
    *,
    norm: str,
    out: str,
    time_step: Init,
    kind: str = "gated_delta_net",
    hf: str = HF_MIXER,
    convolutions: tuple[str, str, str] = ("conv1d",) * 3,
    low_rank: bool = True,
) -> tuple[Rule, ...]:
    """All rules of a mixer; ``norm``, ``out`` and ``convolutions`` are transformers' names, relative to ``hf``.

    ``low_rank``: Kimi delta attention has low-rank projections of decays and gates.
    """
    channel_decay = kind == "kimi_delta_attention"
    has_low_rank = channel_decay and low_rank
    time_steps = "Lk" if channel_decay else "Ln"
    sizes = zip(convolutions, ("Lk", "Lk", "Lv"), strict=True)
    sections = tuple(HfPart(f"{hf}{name}.weight", (rows, "1", "Lc")) for name, rows in sizes)
    heads, axis = (("1", "1", "Ln", "1"), "third") if has_low_rank else (("Ln",), "rows")
    projections = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj") if has_low_rank else ()
    separate = len({*convolutions}) == len(convolutions)
    return (
        projection,
        Rule(canonical=f"{MIXER}conv1d.weight", parts=sections, shard="parts", layers=kind, recut=separate),
        copy(f"{MIXER}dt_bias", f"{hf}dt_bias", time_steps, shard="rows", init=time_step, dtype="float32", layers=kind),
        copy(f"{MIXER}A_log", f"{hf}A_log", *heads, shard=axis, init="log_decay", dtype="float32", layers=kind),
        *in_layers(
            kind,
            *(
                copy(f"{MIXER}linear_{way}_proj.weight", f"{hf}{name}.weight", *shape, shard=shard)
                for name, (way, shape, shard) in zip(projections, _LOW_RANK, strict=False)
            ),
        ),
        copy(f"{MIXER}gated_norm.weight", f"{hf}{norm}.weight", "Ld", init="plain_ones", layers=kind),
        copy(f"{MIXER}out_proj.weight", f"{hf}{out}.weight", "H", "Lv", shard="cols", layers=kind),
    )


_LOW_RANK: tuple[tuple[str, tuple[str, str], str], ...] = (
    ("decay_down", ("Ld", "H"), "whole"),
    ("decay_up", ("Lk", "Ld"), "rows"),
    ("gate_down", ("Ld", "H"), "whole"),
    ("gate_up", ("Lv", "Ld"), "rows"),
)
"""Projections of Kimi delta attention: names, shapes and shards."""


def qwen_mixers(projection: Rule) -> tuple[Rule, ...]:
    """Rules of Qwen3-Next and Qwen3.5: gated attention, or a gated delta net with this projection."""
    return (
        *in_layers("attention", *decoder.GATED_ATTENTION),
        *mixer_rules(projection, norm="norm", out="out_proj", time_step="plain_ones"),
    )


QWEN_TRAITS = {"qk_norm": True, "norm_zero_centered": True, "attention_gate": True}
QWEN_FIXED = {"attn_output_gate": Fixed((True,), "attention of this family has a gate")}
QWEN_ROPE: dict[str, Any] = {"partial_rotary_factor": 0.25, "mrope_section": None}
SEPARATE = in_proj(
    *(("in_proj_qkv", rows) for rows in ("Lk", "Lk", "Lv")),
    ("in_proj_z", "Lv"),
    ("in_proj_b", "Ln"),
    ("in_proj_a", "Ln"),
)
"""The projection of Qwen3.5."""
KEYS = {
    "delta_net.num_key_heads": Key("linear_num_key_heads", default=16),
    "delta_net.num_value_heads": Key("linear_num_value_heads", default=32),
    "delta_net.key_head_dim": Key("linear_key_head_dim", default=128),
    "delta_net.value_head_dim": Key("linear_value_head_dim", default=128),
    "delta_net.conv_kernel": Key("linear_conv_kernel_dim", default=4),
    "delta_net.norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-6),
}
"""Defaults are those of Qwen3-Next in transformers."""


def every_nth(hf: Mapping[str, Any]) -> list[str]:
    """Every fourth layer has full attention, or every ``full_attention_interval``-th."""
    interval, layers = Key("full_attention_interval", default=4).read(hf), range(Key("num_hidden_layers").read(hf))
    return [LINEAR if (layer + 1) % interval else FULL for layer in layers]


def mixers(kind: str, default: Callable[[Mapping[str, Any]], list[str]] = every_nth) -> Derived:
    """Attention, or a delta net of this kind, by ``layer_types``, or by ``default`` of a config that has none."""
    return mixers_by_type({LINEAR: kind, FULL: "attention"}, default)
