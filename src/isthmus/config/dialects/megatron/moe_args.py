"""Mixture-of-experts arguments, also those of MegaBlocks' Megatron-LM."""

from __future__ import annotations

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.translation import Translation

_LOSSES = {"aux_loss": "moe.aux_loss", "seq_aux_loss": "moe.seq_aux_loss"}


def take_megablocks(args: Arguments) -> None:
    """MegaBlocks divides the load-balancing loss by the number of layers, applies softmax over all experts, and its
    default top-k is 1.
    """
    megablocks_args = [name for name in ("moe_top_k", "moe_loss_weight", "moe_capacity_factor") if args.has(name)]
    if not megablocks_args and not args.source("num_experts").startswith("--moe-num-experts"):
        return
    source = args.source("num_experts")
    for name in ("moe_top_k", "moe_loss_weight"):
        if args.has(name):
            source = f"{source} {args.source(name)}"
    args.set("moe_router_topk", args.get("moe_top_k"), source)
    args.set("moe_router_pre_softmax", not args.has("moe_normalize_expert_weights"), source)
    layers = args.get("num_layers") or 1
    args.set("moe_aux_loss_coeff", [args.get("moe_loss_weight") / layers], source)
    if args.has("moe_capacity_factor") and args.get("moe_capacity_factor"):
        args.set("moe_expert_capacity_factor", args.get("moe_capacity_factor"), args.source("moe_capacity_factor"))


def take_shared_experts(args: Arguments) -> None:
    """The DeepSeek scripts of ROCm's fork count shared experts, which are one block of their joined width."""
    if args.has("num_shared_experts"):
        width = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size") or 0
        joined = args.get("num_shared_experts") * width
        args.set("moe_shared_expert_intermediate_size", joined or None, args.source("num_shared_experts"))


def put_moe(args: Arguments, translation: Translation) -> None:
    if args.get("moe_expert_model_parallelism"):
        why = "parallel.ep is the number of expert parallel ranks: 1 without --expert-model-parallel-size."
        translation.remark(args.source("moe_expert_model_parallelism"), "different", why)
    if not args.get("num_experts"):
        return
    dispatcher = args.get("moe_token_dispatcher_type")
    source = args.source("moe_token_dispatcher_type")
    if dispatcher not in ("alltoall", "allgather"):
        translation.remark(source, "different", "The dispatcher is alltoall.")
        dispatcher = "alltoall"
    translation.put("moe.dispatcher", dispatcher, source)
    if args.get("moe_expert_capacity_factor"):
        args.put(translation, "moe.capacity_factor")
    if args.get("moe_z_loss_coeff"):
        args.put(translation, "moe.z_loss")
    if args.get("moe_router_enable_expert_bias"):
        args.put(translation, "moe.expert_bias_update_rate")
    _put_losses(args, translation)


def write_moe(written: WrittenArguments, *, expert_bias: bool) -> None:
    """Options of a model with experts."""
    moe = written.config.moe
    written.put("moe.dispatcher", "moe.capacity_factor")
    written.set("moe_z_loss_coeff", moe.z_loss or None, "moe.z_loss")
    weights = {kind: getattr(moe, kind) for kind in _LOSSES if getattr(moe, kind)}
    if weights:
        written.set("moe_router_load_balancing_type", [*weights], *_LOSSES.values())
        written.set("moe_aux_loss_coeff", [*weights.values()])
    if expert_bias:
        written.put("moe.expert_bias_update_rate")


def _put_losses(args: Arguments, translation: Translation) -> None:
    kinds, weights = args.get("moe_router_load_balancing_type"), args.get("moe_aux_loss_coeff")
    source = args.source("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    try:
        numbers = [float(weight) for weight in weights]
        losses = list(zip(kinds, numbers * len(kinds) if len(numbers) == 1 else numbers, strict=True))
    except (TypeError, ValueError):
        args.errors.append(f"{source}  must be one number for each type of loss")
        return
    for kind, weight in losses:
        if not weight or kind == "none":
            continue
        if kind in _LOSSES:
            translation.put(_LOSSES[kind], weight, source)
        elif kind != "sinkhorn":  # refused when the model is read
            why = "Losses balance the load of a micro batch (moe.aux_loss) or of a sample (moe.seq_aux_loss)."
            translation.remark(source, "unsupported", why)
