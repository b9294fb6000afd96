"""What families with experts share: the tensors of a mixture of experts, and the settings that say where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import copy, gate_up

_MLP = "decoder.layers.{layer}.mlp."
_HF_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.local_experts.{expert}."
_HF_EXPERT = _HF_MLP + "experts.{expert}."
_SHARED = _MLP + "shared_experts."
_HF_SHARED = _HF_MLP + "shared_experts."

NORM = decoder.GATED_MLP[:1]
DENSE = tuple(replace(rule, layers="dense") for rule in decoder.GATED_MLP[1:])
"""The feed-forward block of the layers that have no experts."""
ROUTER = (copy(_MLP + "router.weight", _HF_MLP + "gate.weight", "E", "H", layers="moe"),)
EXPERT_BIAS = (
    copy(
        _MLP + "router.expert_bias",
        _HF_MLP + "gate.e_score_correction_bias",
        "E",
        layers="moe",
        init="zeros",
        dtype="float32",
    ),
)
EXPERTS = (
    gate_up(
        _EXPERT + "linear_fc1.weight",
        _HF_EXPERT + "gate_proj.weight",
        _HF_EXPERT + "up_proj.weight",
        "H",
        width="X",
        layers="moe",
    ),
    copy(_EXPERT + "linear_fc2.weight", _HF_EXPERT + "down_proj.weight", "H", "X", shard="cols", layers="moe"),
)
SHARED_EXPERTS = (
    gate_up(
        _SHARED + "linear_fc1.weight",
        _HF_SHARED + "gate_proj.weight",
        _HF_SHARED + "up_proj.weight",
        "H",
        width="S",
        layers="moe",
        when="moe.shared_ffn_hidden_size",
    ),
    copy(
        _SHARED + "linear_fc2.weight",
        _HF_SHARED + "down_proj.weight",
        "H",
        "S",
        shard="cols",
        layers="moe",
        when="moe.shared_ffn_hidden_size",
    ),
)


def _times(total: int, arch: Architecture) -> int:
    assert arch.moe is not None
    number, rest = divmod(total, arch.moe.ffn_hidden_size)
    if rest:
        raise UsageError(f"shared experts {total} wide are no whole number of experts {arch.moe.ffn_hidden_size} wide.")
    return number


def shared_width(key: str, *, default: int) -> Key:
    """The shared experts, of which ``key`` is the number and each is as wide as the others."""
    return Key(
        key,
        least=0,
        default=default,
        null=lambda hf: 0,
        decode=lambda number, hf: number * _whole(hf, "moe_intermediate_size"),
        encode=_times,
    )


def _first_dense(dense: Sequence[int], arch: Architecture) -> int:
    if tuple(dense) != tuple(range(len(dense))):
        raise _unspeakable(dense, arch)
    return len(dense)


def first_dense(*, default: int) -> Key:
    """The first layers are dense, so many of them."""
    return Key(
        "first_k_dense_replace",
        least=0,
        default=default,
        decode=lambda number, hf: tuple(range(min(number, _whole(hf, "num_hidden_layers")))),
        encode=_first_dense,
    )


def _read_sparse_step(hf: Mapping[str, Any]) -> tuple[int, ...]:
    named, step = hf.get("mlp_only_layers") or (), _whole(hf, "decoder_sparse_step", 1)
    if not isinstance(named, list | tuple) or step < 1:
        raise DataError("config.json: mlp_only_layers must be a list and decoder_sparse_step a positive whole number.")
    return tuple(layer for layer in range(_whole(hf, "num_hidden_layers")) if layer in named or (layer + 1) % step)


SPARSE_STEP = Derived(
    read=_read_sparse_step,
    write=lambda dense, arch: {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)},
)
"""Every nth layer has experts, except those that are named."""


def _read_interval(hf: Mapping[str, Any]) -> tuple[int, ...]:
    layers, last = _whole(hf, "num_hidden_layers"), _whole(hf, "moe_layer_end_index", -1)
    first, step = _whole(hf, "moe_layer_start_index", 1), _whole(hf, "moe_layer_interval", 1)
    if step < 1:
        raise DataError(f"config.json: moe_layer_interval must be a positive whole number, got {step}.")
    last = layers - 1 if last == -1 else last
    return tuple(layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % step)


def _write_interval(dense: Sequence[int], arch: Architecture) -> dict[str, Any]:
    moe = [layer for layer in range(arch.num_layers) if layer not in dense]
    said = {"num_hidden_layers": arch.num_layers, "moe_layer_start_index": moe[0], "moe_layer_end_index": moe[-1]}
    for step in range(1, arch.num_layers + 1):
        if _read_interval(said | {"moe_layer_interval": step}) == tuple(dense):
            return {**said, "moe_layer_interval": step}
    raise _unspeakable(dense, arch)


INTERVAL = Derived(read=_read_interval, write=_write_interval)
"""Every nth layer between a first and a last one has experts."""


def _unspeakable(dense: Sequence[int], arch: Architecture) -> UsageError:
    return UsageError(f"{arch.family}: its config.json has no words for these dense layers: {list(dense)}.")


def _whole(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"config.json: {key} must be a whole number, got {value!r}.")
    return value
