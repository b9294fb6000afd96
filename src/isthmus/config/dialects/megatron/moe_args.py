"""How experts are trained, with the arguments of MegaBlocks' Megatron-LM too."""

from __future__ import annotations

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.translation import Translation

_LOSSES = {"aux_loss": "moe.aux_loss", "seq_aux_loss": "moe.seq_aux_loss"}


def take_megablocks(args: Arguments) -> None:
    """Say what MegaBlocks' own arguments mean in Megatron-LM's.

    Its load-balancing loss is divided by the number of layers; its softmax is over all experts, one of which is chosen
    unless told otherwise.
    """
    said = [name for name in ("moe_top_k", "moe_loss_weight", "moe_capacity_factor") if args.said(name)]
    if not said and not args.words("num_experts").startswith("--moe-num-experts"):
        return
    words = args.words("num_experts")
    for name in ("moe_top_k", "moe_loss_weight"):
        if args.said(name):
            words = f"{words} {args.words(name)}"
    args.say("moe_router_topk", args.get("moe_top_k"), words)
    args.say("moe_router_pre_softmax", not args.said("moe_normalize_expert_weights"), words)
    layers = args.get("num_layers") or 1
    args.say("moe_aux_loss_coeff", [args.get("moe_loss_weight") / layers], words)
    if args.said("moe_capacity_factor") and args.get("moe_capacity_factor"):
        args.say("moe_expert_capacity_factor", args.get("moe_capacity_factor"), args.words("moe_capacity_factor"))


def put_moe(args: Arguments, translation: Translation) -> None:
    """Dispatch, capacity and losses."""
    if args.get("moe_expert_model_parallelism"):
        why = "Experts are dealt out over parallel.ep ranks; it is 1 unless --expert-model-parallel-size says more."
        translation.remark(args.words("moe_expert_model_parallelism"), "otherwise", why)
    if not args.get("num_experts"):
        return
    dispatcher = args.get("moe_token_dispatcher_type")
    words = args.words("moe_token_dispatcher_type")
    if dispatcher not in ("alltoall", "allgather"):
        translation.remark(words, "otherwise", "Tokens are sent to the ranks of their experts by alltoall.")
        dispatcher = "alltoall"
    translation.put("moe.dispatcher", dispatcher, words)
    if args.get("moe_expert_capacity_factor"):
        factor = args.get("moe_expert_capacity_factor")
        translation.put("moe.capacity_factor", factor, args.words("moe_expert_capacity_factor"))
    if args.get("moe_z_loss_coeff"):
        translation.put("moe.z_loss", args.get("moe_z_loss_coeff"), args.words("moe_z_loss_coeff"))
    if args.get("moe_router_enable_expert_bias"):
        words = args.words("moe_router_bias_update_rate")
        translation.put("moe.expert_bias_update_rate", args.get("moe_router_bias_update_rate"), words)
    _put_losses(args, translation)


def _put_losses(args: Arguments, translation: Translation) -> None:
    kinds, weights = args.get("moe_router_load_balancing_type"), args.get("moe_aux_loss_coeff")
    words = args.words("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        args.complaints.append(f"{words}  is not a number for each kind of loss")
        return
    if len(numbers) == 1:
        numbers *= len(kinds)
    for kind, weight in zip(kinds, numbers, strict=False):
        if not weight or kind == "none":
            continue
        if kind in _LOSSES:
            translation.put(_LOSSES[kind], weight, words)
        elif kind != "sinkhorn":  # which the model is refused for
            why = "The load is balanced within a micro batch (moe.aux_loss) or a sample (moe.seq_aux_loss)."
            translation.remark(words, "not at all", why)
