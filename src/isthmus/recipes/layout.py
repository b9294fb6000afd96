"""Whether a model fits the layout that was asked for; every refusal names sizes that would do."""

from __future__ import annotations

from isthmus.config.schema import MoeConfig
from isthmus.engine.groups import ParallelSizes
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.shard import check_expert_sizes, check_tp_size


def check_layout(architecture: Architecture, sizes: ParallelSizes) -> None:
    """Refuse a layout that the model cannot be cut into.

    Raises:
        UsageError: naming the size that does not fit, and those that would.
    """
    check_tp_size(architecture, sizes.tp)
    if architecture.moe is not None:
        check_expert_sizes(architecture, ep_size=sizes.ep, etp_size=sizes.expert_tp)
    elif sizes.ep > 1 or sizes.expert_tp != sizes.tp:
        raise UsageError(
            f"parallel.ep={sizes.ep} and parallel.etp={sizes.etp} spread experts, and this model has none "
            f"({architecture.family}). Leave them out."
        )
    spread_otherwise = sizes.ep > 1 or sizes.expert_tp != sizes.tp
    if spread_otherwise and sizes.tp > 1 and not sizes.sp:
        raise UsageError(
            f"parallel.ep={sizes.ep} and parallel.etp={sizes.expert_tp} with parallel.tp={sizes.tp} need "
            "parallel.sp=true: each rank sends tokens of its own to the experts. Set it."
        )
    check_stages(architecture, sizes.pp)
    if sizes.fsdp:
        check_fsdp(sizes)
    unbuilt = {
        "vpp": sizes.vpp > 1,
        "cp": sizes.cp > 1,
    }
    for name, asked in unbuilt.items():
        if asked:
            raise UsageError(f"parallel.{name} cannot be trained with yet. Leave it out.")


def check_experts(architecture: Architecture, moe: MoeConfig) -> None:
    """Refuse settings of experts that this model has no place for.

    Raises:
        UsageError: naming the setting.
    """
    if architecture.moe is None and moe != MoeConfig():
        given = ", ".join(f"moe.{name}" for name in sorted(moe.model_fields_set)) or "moe"
        raise UsageError(f"{given} is for mixtures of experts, and this model is none ({architecture.family}).")
    if moe.expert_bias_update_rate and not (architecture.moe is not None and architecture.moe.expert_bias):
        raise UsageError(
            f"moe.expert_bias_update_rate={moe.expert_bias_update_rate:g} moves a bias of the router's choice, and "
            f"{architecture.family} has none. Use moe.aux_loss to balance its experts."
        )


def check_fsdp(sizes: ParallelSizes) -> None:
    """Refuse what fully sharded data parallelism does not go together with.

    Raises:
        UsageError: naming the setting in question.
    """
    if sizes.pp > 1:
        raise UsageError(
            f"parallel.fsdp=true with parallel.pp={sizes.pp}: a stage would gather its weights anew for every micro "
            "batch. Set parallel.pp=1, or leave parallel.fsdp out."
        )
    if sizes.ep > 1 or sizes.expert_tp != sizes.tp:
        raise UsageError(
            f"parallel.fsdp=true with parallel.ep={sizes.ep} and parallel.etp={sizes.expert_tp}: weights are cut over "
            f"the data parallel ranks, among which experts would be dealt out already. Set parallel.ep=1 and leave "
            "parallel.etp out, or leave parallel.fsdp out."
        )


def check_fsdp_precision(sizes: ParallelSizes, precision: str) -> None:
    """Refuse numbers that sharded weights are not gathered in.

    Raises:
        UsageError: ``precision`` scales its loss or its weights.
    """
    if sizes.fsdp and precision not in ("fp32", "bf16"):
        raise UsageError(
            f"parallel.fsdp=true with train.precision={precision}: sharded weights are float32 and are gathered as "
            "fp32 or bf16. Set train.precision to one of these, or leave parallel.fsdp out."
        )


def check_stages(architecture: Architecture, pp: int) -> None:
    """Refuse a number of pipeline stages that the layers cannot be dealt out to evenly.

    Raises:
        UsageError: naming the numbers that would do.
    """
    layers = architecture.num_layers
    if layers % pp:
        good = [str(n) for n in range(1, layers + 1) if layers % n == 0]
        choice = f"{', '.join(good[:-1])} or {good[-1]}" if len(good) > 1 else good[0]
        what = f"is more than the {layers} layers" if pp > layers else f"does not divide num_layers={layers}"
        raise UsageError(f"pp={pp} {what} ({architecture.family}). Use {choice}.")
