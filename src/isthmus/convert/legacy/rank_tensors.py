"""The tensors in a rank's file under Megatron-Core's names, also in files of trainers older than Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from isthmus.hf.tensors.safetensors_format import TensorInfo

_PRE_CORE_NAMES = {
    r"^language_model\.(encoder|transformer)\.layers\.": "decoder.layers.",
    r"^language_model\.(encoder|transformer)\.final_(layer)?norm\.": "decoder.final_layernorm.",
    r"^language_model\.": "",
    r"^word_embeddings_for_head\.": "output_layer.",  # the copy of a tied embedding in the last stage
    r"\.attention\.": ".self_attention.",  # before 2021
    r"\.input_norm\.": ".input_layernorm.",  # since 2023-09
    r"\.post_attention_(layer)?norm\.": ".pre_mlp_layernorm.",
    r"\.self_attention\.query_key_value\.": ".self_attention.linear_qkv.",
    r"\.self_attention\.(dense|proj)\.": ".self_attention.linear_proj.",
    r"\.dense_h_to_4h\.": ".linear_fc1.",
    r"\.dense_4h_to_h\.": ".linear_fc2.",
    # Layers of TransformerEngine.
    r"\.self_attention\.layernorm_qkv\.layer_norm_": ".input_layernorm.",
    r"\.self_attention\.layernorm_qkv\.": ".self_attention.linear_qkv.",
    r"\.layernorm_mlp\.layer_norm_": ".pre_mlp_layernorm.",
    r"\.layernorm_mlp\.fc([12])_": r".mlp.linear_fc\1.",
    # Megatron-LM's SwitchMLP.
    r"\.mlp\.(local_)?experts\.(\d+)\.": r".mlp.experts.local_experts.\2.",
    # MegaBlocks; its first release had no module ``experts``.
    r"\.mlp\.moe\.": ".mlp.",
    r"\.mlp\.router\.layer\.": ".mlp.router.",
    r"\.mlp\.(experts\.)?bias$": ".mlp.output_bias",
    r"\.mlp\.(experts\.)?mlp\.": ".mlp.experts.",
}
"""Substitutions, applied in this order, for the names of ``megatron/model`` (until 2024) and of MegaBlocks' fork."""
_ALL_EXPERTS = re.compile(r"(.*mlp\.experts\.)(weight1|weight2|w1|w2|v1)")
"""One tensor for all experts: Megatron-Core's GroupedMLP, or MegaBlocks (``v1`` is the up projection of a GLU)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a file, or its transpose."""

    info: TensorInfo
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape[::-1] if self.transposed else self.info.shape


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One rank's shard of a tensor: the rows of its pieces, one after another."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].info.dtype


def is_pre_core(state: Any) -> bool:
    """Whether a chunk of layers has the names of trainers older than Megatron-Core."""
    return isinstance(state, Mapping) and "language_model" in state


def rank_tensors(state: Any, ep: int) -> dict[str, RankTensor]:
    """The tensors of a chunk of layers by Megatron-Core's name; experts in one tensor are split into ``ep`` shares."""
    infos = dict(flat_tensors(state))
    if is_pre_core(state):
        infos = {_core_name(name): info for name, info in infos.items()}
    tensors: dict[str, RankTensor] = {}
    for name, info in sorted(infos.items(), key=lambda item: item[0].endswith(".v1")):  # after w1
        if (all_experts := _ALL_EXPERTS.fullmatch(name)) is None:
            stored = replace(info, shape=info.shape[-1:]) if name.endswith("mlp.output_bias") else info  # [1, 1, H]
            tensors[name] = RankTensor((Piece(stored),))
            continue
        prefix, kind = all_experts.groups()
        router = infos.get(prefix.replace("experts.", "router.") + "weight")
        number = info.shape[0] if len(info.shape) == 3 else (router.shape[0] // ep if router is not None else 1)
        for expert, piece in enumerate(_expert_pieces(kind, info, number)):
            expert_name = f"{prefix}linear_fc{kind[-1]}.weight{expert}"
            tensors[expert_name] = RankTensor((*(tensors[expert_name].pieces if expert_name in tensors else ()), piece))
    return tensors


def flat_tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, TensorInfo]]:
    """All tensors of nested dictionaries, with names joined by dots."""
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if str(name).endswith("_extra_state"):
            continue
        if isinstance(value, TensorInfo):
            yield f"{prefix}{name}", value
        else:
            yield from flat_tensors(value, f"{prefix}{name}.")


def in_current_order(tensor: RankTensor, version: float, kv_channels: int) -> RankTensor:
    """QKV with the rows of a head together, ``q k v``, as since checkpoint version 2.

    Version 0 has all queries, then all keys, then all values; version 1 has q, k and v alternate row by row.
    """
    (info,) = (piece.info for piece in tensor.pieces)
    heads, rest = divmod(info.shape[0], 3 * kv_channels)
    if version >= 2 or rest:
        return tensor
    rows = torch.arange(info.shape[0])
    order = rows.view(3, heads, -1).transpose(0, 1) if version < 1 else rows.view(heads, -1, 3).transpose(1, 2)
    length = kv_channels if version < 1 else 1
    shape, row_bytes = (length, *info.shape[1:]), info.nbytes // info.shape[0]
    starts = order.reshape(-1, length)[:, 0].tolist()
    return RankTensor(
        tuple(Piece(TensorInfo(info.dtype, shape, info.file, info.offset + row * row_bytes)) for row in starts)
    )


def _core_name(name: str) -> str:
    for pattern, replacement in _PRE_CORE_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _expert_pieces(kind: str, info: TensorInfo, number: int) -> Iterator[Piece]:
    """The experts' weights in one tensor of all of them.

    GroupedMLP: ``weight1`` [H, E*F] stored as [E, H, F], ``weight2`` [E*F, H]. MegaBlocks' dMoE: ``w1``, ``v1`` and
    ``w2`` [E*F, H]; its MoE: ``w1`` [E, H, F] and ``w2`` [E, F, H].
    """
    rows, *columns = info.shape
    if len(info.shape) == 3:
        shape = tuple(columns)
    else:
        shape = (rows, columns[0] // number) if kind == "weight1" else (rows // number, columns[0])
    transposed = len(info.shape) == 3 or kind not in ("w1", "v1")
    for expert in range(number):
        offset = info.offset + expert * info.nbytes // number
        yield Piece(TensorInfo(info.dtype, shape, info.file, offset), transposed)
