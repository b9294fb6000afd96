"""Args of Megatron-LM before Megatron-Core, and of its fork for MegaBlocks, in terms of today's args.

They follow ``megatron/model`` and ``megatron/arguments.py`` of NVIDIA/Megatron-LM from 2020 to 2024, and
stanford-futuredata/Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from isthmus.convert.legacy.model_from_args import ArgsReader, architecture_from_args, not_supported
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts

_RENAMED = {
    "model_parallel_size": "tensor_model_parallel_size",  # until 2020
    "moe_num_experts": "num_experts",
    "moe_top_k": "moe_router_topk",
}
_WITHOUT_EFFECT = ("use_legacy_models", "moe_router_load_balancing_type")


def current_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The args under the names of core_v0.16.1."""
    known = {name: value for name, value in args.items() if value is not None and name not in _WITHOUT_EFFECT}
    renamed = {_RENAMED.get(name, name): value for name, value in known.items()}
    if renamed.get("use_rotary_position_embeddings"):
        renamed["position_embedding_type"] = "rope"
    elif renamed.get("add_position_embedding") is False and renamed.get("position_embedding_type") != "rope":
        raise not_supported("add_position_embedding=False")
    if isinstance(hidden := renamed.get("hidden_size"), int):
        renamed.setdefault("ffn_hidden_size", 4 * hidden)
    if _has_megablocks(args):
        ranks, experts = 1, int(renamed["num_experts"])
        if shards_experts_over_dp(args):
            sizes = [int(renamed.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "pipeline")]
            ranks = int(renamed.get("data_parallel_size") or int(renamed["world_size"]) // (sizes[0] * sizes[1]))
        ep = min(ranks, experts)
        renamed |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": ranks // ep}
    return renamed


def shards_experts_over_dp(args: Mapping[str, Any]) -> bool:
    """Whether each data parallel rank has a file with its part of MegaBlocks' experts."""
    return _has_megablocks(args) and bool(args.get("moe_expert_model_parallelism"))


def pre_core_architecture(
    args: Mapping[str, Any], names: Collection[str], vocab_size: int | None = None
) -> tuple[Architecture, list[str]]:
    """The model that these args and tensor names describe, and notes for the user.

    The arguments and errors are those of :func:`isthmus.convert.legacy.model_from_args.architecture_from_args`;
    ``names`` are the tensors in a file.
    """
    arch, notes = architecture_from_args(current_args(args), vocab_size)
    known = ArgsReader(args)
    if arch.moe is None:
        # ``--openai-gelu`` wins over every other activation.
        openai_gelu = {"activation": "gelu_tanh", "gated": False}
        return (arch.with_settings(openai_gelu) if known.get("openai_gelu", False) else arch), notes
    if any(".router.layer." in name for name in names):
        capacity = known.get("moe_capacity_factor", 0)
        if capacity > 0:
            notes = [
                *notes,
                f"training dropped tokens beyond moe_capacity_factor={capacity}; the converted model drops none.",
            ]
        gated = any(name.endswith(".v1") for name in names)
        experts = _megablocks(arch.moe, known, names)
        return arch.with_settings({"activation": "gelu_tanh", "gated": gated, "moe": experts}), notes
    tanh = not arch.mlp.gated and arch.attention.proj_bias and known.get("bias_gelu_fusion", True)
    moe = replace(
        arch.moe,
        top_k=1,
        score="sigmoid" if any(".local_experts." in name for name in names) else "softmax",  # since 2023-10
        normalize=False,
        router_bias=any(name.endswith(".router.bias") for name in names),
    )
    return arch.with_settings({"activation": "gelu_tanh" if tanh else arch.mlp.activation, "moe": moe}), notes


def _megablocks(moe: Experts, args: ArgsReader, names: Collection[str]) -> Experts:
    norm = args.get("moe_normalize_expert_weights")
    if norm not in (None, 1):
        raise not_supported(f"moe_normalize_expert_weights={norm:g}")
    return replace(
        moe,
        top_k=args.number("moe_top_k", 1),
        score="softmax",
        normalize=norm is not None,
        router_bias=False,
        expert_mlp_bias=False,
        output_bias=any(name.endswith(".bias") and ".mlp." in name for name in names),
    )


def _has_megablocks(args: Mapping[str, Any]) -> bool:
    return bool(args.get("moe_num_experts")) and not args.get("moe_use_megatron_switch")
