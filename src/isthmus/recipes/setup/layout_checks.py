"""Whether a model fits the layout that was asked for; every refusal names sizes that would do."""

from __future__ import annotations

from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.shard import check_expert_sizes, check_tp_size


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Refuse a layout that the model cannot be cut into.

    Raises:
        UsageError: naming the size that does not fit, and those that would.
    """
    check_tp_size(architecture, parallel.tp)
    if architecture.moe is not None:
        check_expert_sizes(architecture, ep_size=parallel.ep, etp_size=parallel.expert_tp)
    elif parallel.ep > 1 or parallel.expert_tp != parallel.tp:
        raise UsageError(
            f"parallel.ep={parallel.ep} and parallel.etp={parallel.etp} spread experts, and this model has none "
            f"({architecture.family}). Leave them out."
        )
    spread_otherwise = parallel.ep > 1 or parallel.expert_tp != parallel.tp
    if spread_otherwise and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UsageError(
            f"parallel.ep={parallel.ep} and parallel.etp={parallel.expert_tp} with parallel.tp={parallel.tp} need "
            "parallel.sp=true: each rank sends tokens of its own to the experts. Set it."
        )
    check_stages(architecture, parallel.pp, parallel.vpp)
    without_mtp = {
        "parallel.cp": parallel.cp > 1,
        "parallel.fsdp": parallel.fsdp,
        "tied embeddings under parallel.pp": architecture.tie_embeddings and parallel.pp > 1,
    }
    what = next((name for name, used in without_mtp.items() if used), None)
    if architecture.mtp_layers and what is not None:
        raise UsageError(
            f"layers that predict ahead (num_nextn_predict_layers={architecture.mtp_layers}) cannot be trained with "
            f"{what} ({architecture.family}). Leave it out, or the tensors of these layers out of the folder."
        )
    if parallel.fsdp:
        check_fsdp(parallel)


def check_experts(architecture: Architecture, moe: MoeConfig) -> None:
    """Refuse settings of experts that this model has no place for.

    Raises:
        UsageError: naming the setting.
    """
    if architecture.moe is None and moe != MoeConfig():
        given = ", ".join(f"moe.{name}" for name in sorted(moe.model_fields_set)) or "moe"
        raise UsageError(
            f"{given} is for mixtures of experts, and this model is none ({architecture.family}). Leave it out."
        )
    if moe.expert_bias_update_rate and not (architecture.moe is not None and architecture.moe.expert_bias):
        raise UsageError(
            f"moe.expert_bias_update_rate={moe.expert_bias_update_rate:g} moves a bias of the router's choice, and "
            f"{architecture.family} has none. Use moe.aux_loss to balance its experts."
        )


def check_fsdp(parallel: ParallelConfig) -> None:
    """Refuse what fully sharded data parallelism does not go together with.

    Raises:
        UsageError: naming the setting in question.
    """
    if parallel.pp > 1:
        raise UsageError(
            f"parallel.fsdp=true with parallel.pp={parallel.pp}: a stage would gather its weights anew for every micro "
            "batch. Set parallel.pp=1, or leave parallel.fsdp out."
        )
    if parallel.ep > 1 or parallel.expert_tp != parallel.tp:
        raise UsageError(
            f"parallel.fsdp=true with parallel.ep={parallel.ep} and parallel.etp={parallel.expert_tp}: weights are cut "
            "over the data parallel ranks, among which experts would be dealt out already. Set parallel.ep=1 and leave "
            "parallel.etp out, or leave parallel.fsdp out."
        )


def check_fsdp_precision(parallel: ParallelConfig, precision: str) -> None:
    """Refuse numbers that sharded weights are not gathered in.

    Raises:
        UsageError: ``precision`` scales its loss or its weights.
    """
    if parallel.fsdp and precision not in ("fp32", "bf16"):
        raise UsageError(
            f"parallel.fsdp=true with train.precision={precision}: sharded weights are float32 and are gathered as "
            "fp32 or bf16. Set train.precision to one of these, or leave parallel.fsdp out."
        )


def check_stages(architecture: Architecture, pp: int, vpp: int = 1) -> None:
    """Refuse a pipeline that the layers cannot be dealt out to: see :mod:`isthmus.engine.parallel.pipeline_layout`.

    Every stage has a layer. With ``vpp`` above 1 all stages have as many, since they take turns.

    Raises:
        UsageError: naming the numbers that would do.
    """
    layers = architecture.num_layers
    if pp > layers:
        mend = f"{layers} or less" if layers > 1 else "1"
        raise UsageError(f"pp={pp} is more than the {layers} layers ({architecture.family}). Use {mend}.")
    if vpp > 1 and layers % (pp * vpp):
        good = [str(n) for n in range(2, layers // pp + 1) if layers % (pp * n) == 0]
        mend = f"Use vpp={' or '.join(good)}, or leave it out" if good else "Leave vpp out"
        raise UsageError(
            f"pp={pp} x vpp={vpp} = {pp * vpp} stages do not divide num_layers={layers} ({architecture.family}). "
            f"{mend}."
        )


def check_offload(optim: OptimConfig, parallel: ParallelConfig, device_type: str) -> None:
    """Refuse to move optimizer state out of a memory that it is not in.

    Raises:
        UsageError: on a CPU, or with fsdp.
    """
    if optim.offload and device_type == "cpu":
        raise UsageError(
            "optim.offload=true takes optimizer state out of a GPU's memory, and this run is on a CPU. Leave it out."
        )
    if optim.offload and parallel.fsdp:
        raise UsageError(
            "optim.offload=true is for the distributed optimizer, and parallel.fsdp=true has none. Leave one out."
        )


def check_micro_batches(train: TrainConfig, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a batch whose micro batches cannot take turns in a pipeline of virtual stages (arXiv 2104.04473).

    Raises:
        UsageError: naming the batch sizes that would do.
    """
    if parallel.vpp == 1:
        return
    dp = parallel.dp(world_size)
    round_of = train.micro_batch_size * dp * parallel.pp
    if train.global_batch_size % round_of:
        below = train.global_batch_size // round_of * round_of
        near = " or ".join(str(size) for size in (below, below + round_of) if size)
        raise UsageError(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of micro_batch_size="
            f"{train.micro_batch_size} x data-parallel ranks={dp} x pp={parallel.pp}, as parallel.vpp={parallel.vpp} "
            f"needs it. Use {near}, or leave parallel.vpp out."
        )
