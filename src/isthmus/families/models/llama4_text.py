"""Llama 4, the language model: attention in chunks, layers without rotation, experts with weighted inputs."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.rotary import QueryScaling
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rule import copy, gate_up, renamed
from isthmus.families.rules.unrotated import read_unrotated, write_unrotated

_FC1, _FC2 = (f"{decoder.LAYER}mlp.experts.local_experts.{{expert}}.linear_{name}.weight" for name in ("fc1", "fc2"))
_GATE_UP, _DOWN = (f"{decoder.HF_LAYER}feed_forward.experts.{name}_proj" for name in ("gate_up", "down"))
_STACKED: dict[str, Any] = {"layers": "moe", "stacked": True, "transposed": True}
_MLP = (
    *renamed(expert_tensors.DENSE, {".mlp.": ".feed_forward."}),
    in_layer("mlp.router.weight", "feed_forward.router.weight", "E", "H", layers="moe"),
    gate_up(_FC1, _GATE_UP, _GATE_UP, "H", width="X", **_STACKED),
    copy(_FC2, _DOWN, "H", "X", shard="cols", **_STACKED),
    *renamed(expert_tensors.SHARED_EXPERTS, {".mlp.shared_experts.": ".feed_forward.shared_expert."}),
)


def _read_dense(hf: Mapping[str, Any]) -> tuple[int, ...]:
    layers, listed = range(hf["num_hidden_layers"]), hf.get("moe_layers")
    step = Key("interleave_moe_layer_step", default=1).read(hf)
    if not isinstance(listed, list | None):
        raise DataError(f"config.json: moe_layers must be a list or null, got {listed!r}.")
    return tuple(layer for layer in layers if ((layer + 1) % step if listed is None else layer not in listed))


def _write_dense(dense: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    return {"moe_layers": [layer for layer in range(arch.num_layers) if layer not in dense]}


def _read_scaling(hf: Mapping[str, Any]) -> QueryScaling | None:
    if not hf.get("attn_temperature_tuning", True):
        return None
    rate, period = number("attn_scale", 0.1).read(hf), Key("floor_scale", default=8192).read(hf)
    return QueryScaling(rate=rate, period=period, first=1, unrotated_only=True)


def _write_scaling(scaling: QueryScaling | None, arch: Architecture) -> dict[str, Any]:
    if scaling is None:
        return {"attn_temperature_tuning": False}
    return {"attn_temperature_tuning": True, "attn_scale": scaling.rate, "floor_scale": scaling.period}


FAMILY = Family(
    name="llama4_text",
    hf_architecture="Llama4ForCausalLM",
    keys=with_defaults(
        decoder.KEYS, head_dim=128, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
    )
    | decoder.ATTENTION_BIAS
    | {
        "ffn_hidden_size": Key("intermediate_size_mlp", default=16384),
        "qk_rms": flag("use_qk_norm", default=True),
        "moe.ffn_hidden_size": Key("intermediate_size", default=8192),
        "moe.shared_ffn_hidden_size": Key("intermediate_size", default=8192),
        "moe.num_experts": Key("num_local_experts", default=16),
        "moe.top_k": Key("num_experts_per_tok", default=1),
    },
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True, "window_kind": "chunks", "moe.score": "sigmoid", "moe.weighs_inputs": True},
    derived={
        "unrotated_layers": Derived(
            read=read_unrotated, write=lambda layers, arch: write_unrotated(layers, arch.num_layers)
        ),
        "moe.dense_layers": Derived(read=_read_dense, write=_write_dense),
        "query_scaling": Derived(read=_read_scaling, write=_write_scaling),
    },
    sliding_window="chunks",
    sliding_window_default=8192,
    sliding_window_pattern=lambda hf, _layers: read_unrotated(hf),
    rope_defaults={"rope_theta": 500000.0},
    swapped_experts=True,
    rules=decoder.pre_norm_rules(mlp=_MLP),
)
