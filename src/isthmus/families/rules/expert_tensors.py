"""Rules and config keys shared by mixture-of-experts families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import HF_LAYER, LAYER, in_layer
from isthmus.families.rules.rule import renamed, where

DENSE = tuple(replace(rule, layers="dense") for rule in decoder.MLP)
ROUTER = (in_layer("mlp.router.weight", "mlp.gate.weight", "E", "H", layers="moe"),)
EXPERT_BIAS = where(
    "moe.expert_bias",
    in_layer(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias",
        "E",
        layers="moe",
        init="zeros",
        dtype="float32",
        trained=False,
    ),
)
EXPERTS = decoder.mlp(
    LAYER + "mlp.experts.local_experts.{expert}.",
    HF_LAYER + "mlp.experts.{expert}.",
    "X",
    bias="moe.expert_mlp_bias",
    layers="moe",
)
LATENT_EXPERTS = (
    *where(
        "moe.latent_size",
        in_layer("mlp.fc1_latent_proj.weight", "mlp.fc1_latent_proj.weight", "Hx", "H", layers="moe"),
        in_layer("mlp.fc2_latent_proj.weight", "mlp.fc2_latent_proj.weight", "H", "Hx", layers="moe"),
    ),
    *decoder.mlp(
        LAYER + "mlp.experts.local_experts.{expert}.",
        HF_LAYER + "mlp.experts.{expert}.",
        "X",
        hidden="Hx",
        layers="moe",
    ),
)
"""Experts whose inputs and outputs have another width than the hidden state."""
SHARED_EXPERTS = where(
    "moe.shared_ffn_hidden_size",
    *decoder.mlp(LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_experts.", "S", layers="moe"),
)
SHARED_GATE = in_layer(
    "mlp.shared_experts.gate_weight",
    "mlp.shared_expert_gate.weight",
    "1",
    "H",
    layers="moe",
    when="moe.shared_ffn_hidden_size and moe.shared_gate",
)
GATED_SHARED_MLP = (
    *DENSE,
    *ROUTER,
    *EXPERTS,
    *renamed(SHARED_EXPERTS, {"shared_experts": "shared_expert"}),
    SHARED_GATE,
)
"""Rules of Qwen: one shared expert with a gate."""
DENSE_AND_MOE = (*DENSE, *ROUTER, *EXPERT_BIAS, *EXPERTS, *SHARED_EXPERTS)
MLP = (*decoder.MLP_NORM, *DENSE_AND_MOE)
RULES = decoder.pre_norm_rules(mlp=DENSE_AND_MOE)


def _num_shared(total: int, arch: Architecture) -> int:
    assert arch.moe is not None
    number, rest = divmod(total, arch.moe.ffn_hidden_size)
    if rest:
        raise UsageError(
            f"{arch.family}: the shared experts' width {total} is not a multiple of the experts' width "
            f"{arch.moe.ffn_hidden_size}, so config.json cannot express it."
        )
    return number


def shared_width(key: str, *, default: int, width: str = "moe_intermediate_size") -> Key:
    """Total width of the shared experts; ``key`` is their number, each is as wide as a routed expert, ``width``."""
    return Key(
        key,
        least=0,
        default=default,
        null=lambda hf: 0,
        decode=lambda number, hf: number * _int(hf, width),
        encode=_num_shared,
    )


def shared_experts(key: str, width: str, *, default: int, aliases: tuple[str, ...] = ()) -> Derived:
    """:func:`shared_width` where the config repeats the width of a shared expert as ``width``."""
    number = shared_width(key, default=default)

    def read(hf: Mapping[str, Any]) -> int:
        values = [hf.get(name) for name in (key, *aliases)]
        total: int = number.read({**hf, key: next((value for value in values if value is not None), default)})
        routed = _int(hf, "moe_intermediate_size")
        if total and hf.get(width) not in (None, routed):
            raise UsageError(
                f"config.json: {width}={hf[width]!r:.60} is not supported; it must be moe_intermediate_size={routed}."
            )
        return total

    def write(total: int, arch: Architecture) -> dict[str, Any]:
        return {key: _num_shared(total, arch), width: arch.moe.ffn_hidden_size if arch.moe else None}

    return Derived(read, write)


KEYS = {
    "moe.num_experts": Key("num_experts", aliases=("num_local_experts",)),
    "moe.top_k": Key("num_experts_per_tok"),
    "moe.ffn_hidden_size": Key("moe_intermediate_size"),
}
"""The keys of Qwen's experts, which most families have with other defaults."""
DEEPSEEK_KEYS = KEYS | {
    "moe.num_experts": Key("n_routed_experts", aliases=("num_local_experts",)),
    "moe.shared_ffn_hidden_size": shared_width("n_shared_experts", default=1),
    "moe.scaling_factor": decoder.number("routed_scaling_factor", 1.0),
    "moe.normalize": decoder.flag("norm_topk_prob", default=True),
    "moe.num_groups": Key("n_group", default=1),
    "moe.group_top_k": Key("topk_group", default=1),
}


def _num_first_dense(dense: Sequence[int], arch: Architecture) -> int:
    if tuple(dense) != tuple(range(len(dense))):
        raise _not_expressible(dense, arch)
    return len(dense)


def first_dense(*, default: int, key: str = "first_k_dense_replace") -> Key:
    """Number of dense layers before the first MoE layer."""
    return Key(
        key,
        least=0,
        default=default,
        decode=lambda number, hf: tuple(range(min(number, _int(hf, "num_hidden_layers")))),
        encode=_num_first_dense,
    )


def sparse_step(*, step: int = 1, dense: Sequence[int] = ()) -> Derived:
    """Every nth layer has experts, ``decoder_sparse_step``, except those listed in ``mlp_only_layers``.

    ``step`` and ``dense`` are their defaults.
    """

    def read(hf: Mapping[str, Any]) -> tuple[int, ...]:
        listed, every = hf.get("mlp_only_layers"), _int(hf, "decoder_sparse_step", step)
        listed = dense if listed is None else listed
        if not isinstance(listed, list | tuple) or every < 1:
            raise DataError("config.json: mlp_only_layers must be a list and decoder_sparse_step a positive integer.")
        return tuple(layer for layer in range(_int(hf, "num_hidden_layers")) if layer in listed or (layer + 1) % every)

    return Derived(read, lambda layers, _arch: {"decoder_sparse_step": 1, "mlp_only_layers": list(layers)})


def mlp_layer_types(dense: int, key: str | None = None) -> Derived:
    """``mlp_layer_types`` lists ``dense`` and ``sparse`` layers.

    Without it the first layers are dense: ``dense`` of them, or as many as another ``key`` says.
    """

    def read(hf: Mapping[str, Any]) -> tuple[int, ...]:
        layers = _int(hf, "num_hidden_layers")
        kinds = hf.get("mlp_layer_types")
        if kinds is None:
            return tuple(range(min(dense if key is None else Key(key, default=dense, least=0).read(hf), layers)))
        if not isinstance(kinds, Sequence) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
            raise DataError(
                f"config.json: mlp_layer_types must be a list of dense or sparse for {layers} layers, got {kinds!r}."
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")

    def write(dense: Sequence[int], arch: Architecture) -> dict[str, Any]:
        return {"mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(arch.num_layers)]}

    return Derived(read, write)


def _read_interval(hf: Mapping[str, Any]) -> tuple[int, ...]:
    layers, last = _int(hf, "num_hidden_layers"), _int(hf, "moe_layer_end_index", -1)
    first, step = _int(hf, "moe_layer_start_index", 1), _int(hf, "moe_layer_interval", 1)
    if step < 1:
        raise DataError(f"config.json: moe_layer_interval must be a positive integer, got {step}.")
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % step)


def _write_interval(dense: Sequence[int], arch: Architecture) -> dict[str, Any]:
    moe = [layer for layer in range(arch.num_layers) if layer not in dense]
    if not moe:
        raise _not_expressible(dense, arch)
    keys = {"num_hidden_layers": arch.num_layers, "moe_layer_start_index": moe[0], "moe_layer_end_index": moe[-1]}
    for step in range(1, arch.num_layers + 1):
        if _read_interval(keys | {"moe_layer_interval": step}) == tuple(dense):
            return {**keys, "moe_layer_interval": step}
    raise _not_expressible(dense, arch)


INTERVAL = Derived(read=_read_interval, write=_write_interval)
"""Every nth layer between a first and a last one has experts."""


def _not_expressible(dense: Sequence[int], arch: Architecture) -> UsageError:
    return UsageError(f"{arch.family}: config.json cannot express these dense layers: {list(dense)}.")


def _int(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"config.json: {key} must be an integer, got {value!r}.")
    return value
