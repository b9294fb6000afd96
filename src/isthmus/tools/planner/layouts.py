"""The layouts of a model over a number of ranks, and the settings of a run that change its memory and speed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.recipes.plan.layout_checks import check_layout, check_micro_batches
from isthmus.recipes.plan.model_plan import recomputable_modules

_MOST_STAGES = 64
_LEAST_TOKENS = 2048
"""Fewest tokens of a context parallel rank: with fewer, splitting the tokens of a sequence costs more than it saves."""
_MOST_TOKENS = 1 << 16
"""Most tokens of a micro batch on a rank: GEMMs do not get faster with more."""
_CHEAP = ("layernorm", "mlp_act", "moe_act", "rope")
"""Recomputed without matmuls."""


def layouts(
    arch: Architecture, config: RunConfig, *, world_size: int, gpus_per_node: int, fixed: Collection[str]
) -> Iterator[ParallelConfig]:
    """Layouts that a run with ``config`` accepts; settings in ``fixed`` (``parallel.tp``) keep the value of ``config``.

    Tensor parallelism stays within a node, sequence parallelism is on with it: it needs less memory at the same
    communication.

    Raises:
        UsageError: no layout is possible; that of the first one that is not.
    """
    fixed_sizes = {
        name.removeprefix("parallel."): getattr(config.parallel, name.removeprefix("parallel."))
        for name in fixed
        if name.startswith("parallel.")
    }
    refused: UsageError | None = None
    has_layout = False
    for sizes in _sizes(arch, config, world_size, gpus_per_node, fixed_sizes):
        try:
            layout = config.parallel.model_copy(update={"sp": fixed_sizes.get("sp")} | sizes)
            check_layout(arch, layout)
            layout.check_world_size(world_size)
        except UsageError as error:
            refused = refused or error
            continue
        has_layout = True
        yield layout
    if not has_layout:
        raise refused or UsageError(
            f"no layout of {world_size:,} ranks is possible with {', '.join(sorted(fixed))}. Leave one of them out."
        )


def _sizes(
    arch: Architecture, config: RunConfig, world_size: int, gpus_per_node: int, fixed_sizes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    def choices(name: str, of: int, most: int) -> list[int]:
        return [fixed_sizes[name]] if name in fixed_sizes else [n for n in range(1, min(of, most) + 1) if of % n == 0]

    experts = 1 if arch.moe is None else arch.moe.num_experts
    for tp in choices("tp", gpus_per_node, gpus_per_node):
        for pp in choices("pp", max(1, world_size // tp), min(arch.num_layers, _MOST_STAGES)):
            remaining = max(1, world_size // (tp * pp))
            for cp in choices("cp", remaining, max(1, config.data.seq_length // _LEAST_TOKENS)):
                for vpp in choices("vpp", max(1, arch.num_layers // pp), 4 if pp > 1 else 1):
                    for etp in (
                        [fixed_sizes["etp"]] if "etp" in fixed_sizes else [tp, 1] if experts > 1 and tp > 1 else [None]
                    ):
                        for ep in choices("ep", experts, max(1, world_size // (pp * (etp or tp)))):
                            sizes = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep, "etp": etp}
                            yield from _sharded(sizes, config, remaining // cp * cp, gpus_per_node, fixed_sizes)


def _sharded(
    sizes: dict[str, Any], config: RunConfig, replicas: int, gpus_per_node: int, fixed_sizes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The settings with and without fsdp, where it is possible; over the ranks of 1, 2, 4, ... nodes or over all."""
    sizes["etp"] = None if sizes["etp"] == sizes["tp"] else sizes["etp"]
    if "fsdp" in fixed_sizes:
        yield {**sizes, "fsdp": fixed_sizes["fsdp"]}
        return
    yield {**sizes, "fsdp": False}
    alone = sizes["pp"] == sizes["ep"] == 1 and sizes["etp"] is None and replicas > 1
    alone = alone and not config.lora.enabled and not config.optim.offload
    if alone and config.train.precision in (None, "fp32", "bf16"):
        yield {**sizes, "fsdp": True}
        shards = gpus_per_node // sizes["tp"]
        while 1 < shards < replicas:
            if replicas % shards == 0:
                yield {**sizes, "fsdp": shards}
            shards *= 2


def micro_batch_sizes(
    config: RunConfig, parallel: ParallelConfig, world_size: int, fixed: Collection[str]
) -> list[int]:
    """Powers of two that the batch of a data parallel rank has room for; empty if the ranks do not divide the batch."""
    train = config.train
    sizes = [train.micro_batch_size]
    if "train.micro_batch_size" not in fixed:
        tokens = min([_MOST_TOKENS * parallel.cp, *config.data.length_buckets[-1:]])
        most = max(1, tokens // config.data.seq_length)
        sizes = [size for power in range(8) if (size := 1 << power) <= most]
    accepted = []
    for size in sizes:
        if train.global_batch_size % size == 0:
            try:
                check_micro_batches(train.model_copy(update={"micro_batch_size": size}), parallel, world_size)
            except UsageError:
                continue
            accepted.append(size)
    return accepted


def recompute_choices(
    arch: Architecture, config: RunConfig, parallel: ParallelConfig, fixed: Collection[str]
) -> list[dict[str, Any]]:
    """From the least to the most recomputation, as settings of ``train``."""
    if "train.recompute" in fixed:
        return [{}]
    stage_layers = -(-arch.num_layers // (parallel.pp * parallel.vpp))
    full: dict[str, Any] = {"recompute": "full"}
    half = [full | {"recompute_layers": stage_layers // 2}] if stage_layers > 1 else []
    return [{}, {"recompute": "selective", "recompute_modules": _cheap_modules(arch, parallel)}, *half, full]


def _cheap_modules(arch: Architecture, parallel: ParallelConfig) -> tuple[str, ...]:
    """What a run may recompute without matmuls; see ``check_training``."""
    shared_heads = arch.attention.qk_norm and arch.attention.num_query_groups < parallel.tp
    present = recomputable_modules(arch) - ({"rope"} if shared_heads else set())
    return tuple(name for name in _CHEAP if name in present)
